"""What a planner says of its own search, by which the gateway knows what a request's search takes."""

from __future__ import annotations

import msgspec


class SearchWork(msgspec.Struct, frozen=True, kw_only=True):
    """A planner's own search, which its T_sync was measured with, and how far one request may change it.

    Attributes:
        candidates: action sequences a round; likewise rounds, horizon and whether the hand-off deadline ends it.
        unit: candidates that are scored at a time, by all ranks together; a round is whole units.
        round_share: the part of T_sync of one observation that one round takes, in (0, 1 / rounds].
        max_candidates: the most that a request may ask for; likewise rounds and horizon.
    """

    candidates: int
    rounds: int
    horizon: int
    anytime: bool
    unit: int
    round_share: float
    max_candidates: int
    max_rounds: int
    max_horizon: int
