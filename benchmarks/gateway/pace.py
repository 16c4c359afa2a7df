"""How the robots of an engine ask: how much time they leave, and how long a trace is that shows it."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Pace:
    """The requests of the robots that an engine is for.

    Attributes:
        low_ms: what is left of the buffer when a robot asks, at least; `high_ms` at most.
        thirds_ms: the same of three kinds of robots that share a worker.
        chunk_ms: no robot leaves more time than its chunk lasts.
        robots: sizes of the fleets.
        duration_s: length of a trace.
        stretch: how many times slower bursts come and go than those of a fast policy.
    """

    low_ms: float
    high_ms: float
    thirds_ms: tuple[tuple[float, float], ...]
    chunk_ms: float
    robots: tuple[int, ...]
    duration_s: float
    stretch: float = 1.0

    def even(self, rng: random.Random) -> float:
        """A budget in s, all values from `low_ms` to `high_ms` alike."""
        return rng.uniform(self.low_ms, self.high_ms) / 1e3

    def mixed(self, rng: random.Random) -> float:
        """A budget in s of one of the three kinds."""
        return rng.choice([rng.uniform(*third) for third in self.thirds_ms]) / 1e3

    @property
    def label(self) -> str:
        """The usual budgets in words."""
        return f"{self.low_ms:g}-{self.high_ms:g} ms"


MANIPULATION = Pace(
    low_ms=150.0,
    high_ms=500.0,
    # 50 Hz controllers with little buffer, 20 Hz, and slow ones with a whole chunk left.
    thirds_ms=((60.0, 120.0), (150.0, 400.0), (500.0, 1000.0)),
    chunk_ms=float("inf"),
    robots=(8, 32, 128, 512),
    duration_s=30.0,
)
"""Chunks of seconds from a policy that answers in a fraction of one."""


def imagined_chunks(actions: int, control_hz: float, robots: tuple[int, ...], duration_s: float) -> Pace:
    """Robots of a policy that is about as slow as its chunk is long: they ask soon after they have begun one."""
    chunk_ms = 1e3 * actions / control_hz
    return Pace(
        low_ms=round(0.4 * chunk_ms, -1),
        high_ms=round(0.95 * chunk_ms, -1),
        thirds_ms=tuple((round(low * chunk_ms, -1), round(high * chunk_ms, -1)) for low, high in THIRDS),
        chunk_ms=chunk_ms,
        robots=robots,
        duration_s=duration_s,
        stretch=duration_s / MANIPULATION.duration_s,
    )


THIRDS = ((0.35, 0.5), (0.5, 0.75), (0.75, 1.0))
"""Shares of a chunk that three kinds of robots have left: one asks late, one halfway, one at once."""
