"""What a round costs here, learned from the plans that were run, so that a budget too short for one is refused."""

from __future__ import annotations

from taktline_worker.planning.settings import SearchSettings

_WEIGHT = 0.25
"""Of the newest measurement: a few plans forget a slow start, one outlier does not change the answer much."""


class RoundTimes:
    """Seconds of one unit of one step, from whole plans; a round is units x horizon of them.

    Deeper steps attend to more frames, which at the published size adds 4 % a step and is left out.
    """

    def __init__(self, micro_batch: int, ranks: int = 1) -> None:
        self._micro_batch = micro_batch
        self.ranks = ranks
        self._unit_step_s: float | None = None

    def on(self, ranks: int) -> RoundTimes:
        """What is known here, for another number of ranks."""
        other = RoundTimes(self._micro_batch, ranks)
        other._unit_step_s = self._unit_step_s
        return other

    def learn(self, work: list[tuple[SearchSettings, int]], seconds: float) -> None:
        """Takes in one call: the settings of each robot's plan with the rounds it ran, and the time of all of them."""
        steps = sum(self._steps(settings) * rounds for settings, rounds in work)
        if steps <= 0 or seconds <= 0:
            return
        measured = seconds / steps
        known = self._unit_step_s
        self._unit_step_s = measured if known is None else known + _WEIGHT * (measured - known)

    def round_s(self, settings: SearchSettings) -> float | None:
        """Seconds of one round, or None before anything was measured."""
        return None if self._unit_step_s is None else self._unit_step_s * self._steps(settings)

    def _steps(self, settings: SearchSettings) -> int:
        units = -(-settings.candidates // self._micro_batch)
        return -(-units // self.ranks) * settings.horizon
