"""What a round costs here, learned from the plans that were run, so that a budget too short for one is refused."""

from __future__ import annotations

from collections.abc import Sequence

from taktline_protocol.search_latency import units_of

from taktline_worker.planning.settings import SearchSettings

_WEIGHT = 0.25
"""Of the newest measurement: a few plans forget a slow start, one outlier does not change the answer much."""
_MOST = 4.0
"""Times what is known is the most that one measurement says: a pause says little, a mesh that stays slow is learned."""
REFUSALS = 10
"""In a row with nothing learned; then one plan that would be refused is tried: what runs nothing teaches nothing."""


class RoundTimes:
    """Seconds of one unit of one step, from whole plans; a round is units x horizon of them.

    Deeper steps attend to more frames, which at the published size adds 4 % a step and is left out.
    """

    def __init__(self, micro_batch: int, ranks: int = 1) -> None:
        self._micro_batch = micro_batch
        self.ranks = ranks
        self._unit_step_s: float | None = None
        self._least_s: float | None = None  # that was ever measured, for the same work
        self._refusals = 0  # since something was learned

    @property
    def unit(self) -> int:
        """Candidates that all ranks together score at a time."""
        return self._micro_batch * self.ranks

    def on(self, ranks: int) -> RoundTimes:
        """What is known here, for another number of ranks."""
        other = RoundTimes(self._micro_batch, ranks)
        other._unit_step_s, other._least_s, other._refusals = self._unit_step_s, self._least_s, self._refusals
        return other

    def learn(self, work: list[tuple[SearchSettings, int]], seconds: float) -> None:
        """Takes in one call: the settings of each robot's plan with the rounds it ran, and the time of all of them."""
        steps = sum(self._steps(settings) * rounds for settings, rounds in work)
        if steps <= 0 or seconds <= 0:
            return
        measured = seconds / steps
        known, weight = self._unit_step_s, 1.0 if self._refusals >= REFUSALS else _WEIGHT
        if known is None:
            self._unit_step_s = measured
        else:  # a plan that was tried after refusals is all that is known of now
            self._unit_step_s = known + weight * (min(measured, _MOST * known) - known)
        self._least_s = measured if self._least_s is None else min(measured, self._least_s)
        self._refusals = 0

    def round_s(self, settings: SearchSettings) -> float | None:
        """Seconds of one round, or None before anything was measured."""
        return None if self._unit_step_s is None else self._unit_step_s * self._steps(settings)

    def refuse(self, plans: Sequence[SearchSettings], left_s: float) -> bool:
        """Whether `left_s`, too short for one round of all `plans` by what `round_s` says, is a reason to refuse.

        Now and then it is none, where rounds have been fast enough before: else what one slow plan taught would refuse
        all plans for ever.
        """
        if self._least_s is None or left_s < self._least_s * sum(self._steps(settings) for settings in plans):
            return True
        self._refusals += 1
        return self._refusals % REFUSALS != 0

    def _steps(self, settings: SearchSettings) -> int:
        units = units_of(settings.candidates, self._micro_batch)
        return units_of(units, self.ranks) * settings.horizon
