"""Which robots a candidate revision serves: a share of those that are active, and the same ones all along."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import OrderedDict

ACTIVE_S = 60.0
"""A robot that sent nothing for so long does not count."""
PAUSE_S = 5.0
"""A robot that was silent for so long begins a new session, whatever it says."""
COUNT_EVERY_S = 0.5
FIRST_COUNT_S = 2.0
"""So long after the start the fleet is unknown, and a robot's own rank decides alone."""


@dataclasses.dataclass(slots=True)
class _Seat:
    rank: float
    session_id: str
    on_candidate: bool
    seen_at: float


class RobotSplit:
    """Seats each robot with one of two revisions.

    Every robot has a fixed rank in [0, 1) for this trial. The candidate gets the lowest-ranked ones, as many as make
    `weight` percent of the active robots, rounded up: one robot of a small fleet already at 5 %. Gateways agree on
    ranks without talking to each other. A seated robot stays: to the candidate it moves only where a session begins,
    or once `hold_s` have passed since the step began; back only when the weight falls to 0.
    """

    def __init__(self, trial: str, now: float) -> None:
        self._trial = trial
        self._weight = 0.0
        self._hold_until = 0.0
        self._limit = 0.0
        self._counted_at = -math.inf
        self._began_at = now
        self._seats: OrderedDict[str, _Seat] = OrderedDict()

    def set_weight(self, weight: float, hold_s: float, now: float) -> None:
        """A step begins: the candidate is to serve `weight` percent of the robots."""
        self._weight = weight
        self._hold_until = now + hold_s
        self._counted_at = -math.inf

    def is_on_candidate(self, robot_id: str, session_id: str, now: float) -> bool:
        """Where an observation of this robot goes."""
        if self._weight <= 0.0:
            return False
        seat = self._seats.get(robot_id)
        if seat is None:
            seat = _Seat(self._rank(robot_id), session_id, False, -math.inf)
            self._seats[robot_id] = seat
        begins = now - seat.seen_at >= PAUSE_S or seat.session_id != session_id
        seat.session_id, seat.seen_at = session_id, now
        self._seats.move_to_end(robot_id)
        if not seat.on_candidate and (begins or now >= self._hold_until):
            self._count(now)
            seat.on_candidate = seat.rank < self._limit
        return seat.on_candidate

    def active(self, now: float) -> tuple[int, int]:
        """(robots seen lately, those of them that the candidate serves)."""
        self._forget(now)
        return len(self._seats), sum(seat.on_candidate for seat in self._seats.values())

    def note(self, robot_id: str, session_id: str, now: float) -> None:
        """A robot was seen while the candidate serves nobody, so that the first step begins with a known fleet."""
        seat = self._seats.get(robot_id)
        if seat is None:
            seat = self._seats[robot_id] = _Seat(self._rank(robot_id), session_id, False, now)
        seat.session_id, seat.seen_at = session_id, now
        self._seats.move_to_end(robot_id)

    def _count(self, now: float) -> None:
        if now - self._counted_at < COUNT_EVERY_S:
            return
        self._counted_at = now
        self._forget(now)
        share = self._weight / 100.0
        if share >= 1.0 or now - self._began_at < FIRST_COUNT_S or not self._seats:
            self._limit = share if share < 1.0 else math.inf
            return
        ranks = sorted(seat.rank for seat in self._seats.values())
        chosen = math.ceil(share * len(ranks))
        self._limit = ranks[chosen] if chosen < len(ranks) else math.inf

    def _forget(self, now: float) -> None:
        while self._seats:
            robot_id, seat = next(iter(self._seats.items()))
            if now - seat.seen_at < ACTIVE_S:
                break
            del self._seats[robot_id]

    def _rank(self, robot_id: str) -> float:
        digest = hashlib.blake2b(f"{self._trial}/{robot_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64
