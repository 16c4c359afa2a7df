"""What one ticket takes of a worker where that is not what T_sync says: a planner's search of its own size, or cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from taktline_protocol import worker_pb2
from taktline_protocol.search_latency import units_of
from taktline_protocol.search_work import SearchWork

from taktline_gateway.service_times import ServiceTimes

if TYPE_CHECKING:
    from taktline_gateway.deadline_queue import Ticket


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Shares of the time that T_sync says of one ticket.

    Attributes:
        least: what an answer takes at least.
        most: what it takes where nothing ends it sooner.
        limit_s: seconds after which it is answered with what there is, where that is sooner than `most`.
        until_deadline: whether its deadline ends it in the same way.
    """

    least: float = 1.0
    most: float = 1.0
    limit_s: float = math.inf
    until_deadline: bool = False

    def needs(self, whole_s: float) -> float:
        """The share that an answer takes where T_sync is `whole_s`: what only a limit ends goes on until then."""
        if self.until_deadline or self.limit_s == math.inf:
            return self.least
        return min(self.most, max(self.least, self.limit_s / whole_s))


WHOLE = Work()
"""What T_sync says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Durations:
    """How long a batch takes, in seconds.

    Attributes:
        median_s: its prediction; `tail_s` likewise.
        share: of what T_sync says of a batch of its size, where nothing ends it sooner.
        cut_s: when it is ended; infinite where nothing ends it.
        least: share of T_sync that it takes at least.
    """

    median_s: float
    tail_s: float
    share: float = 1.0
    cut_s: float = math.inf
    least: float = 1.0

    def was_cut(self, seconds: float) -> bool:
        """Whether one that took so long may have been ended: it is before the round that would end after `cut_s`.

        That is in the second half of its time, whatever a round takes.
        """
        return seconds >= 0.5 * self.cut_s


def durations(tickets: Sequence[Ticket], times: ServiceTimes, begins: float) -> Durations:
    """Of a batch of these tickets that begins then.

    Members share the engine, so a batch takes the mean of its members' shares, and no less than its largest one alone.
    What can be ended is ended with the last of those beside it: a batch is answered as a whole.
    """
    size = len(tickets)
    median_s, tail_s = times.median[size], times.tail[size]
    if all(ticket.work is WHOLE for ticket in tickets):
        return Durations(median_s, tail_s)
    alone = times.median[1] / median_s
    works = [ticket.work for ticket in tickets]
    most = max(sum(work.most for work in works) / size, max(work.most for work in works) * alone)
    least = max(sum(work.least for work in works) / size, max(work.least for work in works) * alone)
    cut_s = max(_limit_s(ticket, begins) for ticket in tickets)
    end_s = max(cut_s, least * median_s)
    return Durations(min(most * median_s, end_s), min(most * tail_s, end_s + least * tail_s), most, cut_s, least)


def _limit_s(ticket: Ticket, begins: float) -> float:
    work = ticket.work
    return min(work.limit_s, ticket.deadline - begins) if work.until_deadline else work.limit_s


def work_of(asked: worker_pb2.Search, own: SearchWork) -> Work:
    """What a request's search takes, by what its planner says of its own.

    A search is the part that any number of rounds takes, and rounds of whole units: each step of each round scores
    every unit. One that may be ended is answered after its first round at the soonest.
    """
    rounds = asked.rounds if asked.HasField("rounds") else own.rounds
    candidates = asked.candidates if asked.HasField("candidates") else own.candidates
    horizon = asked.horizon if asked.HasField("horizon") else own.horizon
    until_deadline = asked.anytime if asked.HasField("anytime") else own.anytime
    once = max(0.0, 1.0 - own.rounds * own.round_share)
    steps = units_of(candidates, own.unit) * horizon
    round_share = own.round_share * steps / (units_of(own.candidates, own.unit) * own.horizon)
    soonest = once + round_share
    limit_s = asked.budget_ms / 1e3 if asked.HasField("budget_ms") else math.inf
    beyond = rounds > own.max_rounds or candidates > own.max_candidates or horizon > own.max_horizon
    if beyond or not limit_s > 0.0:  # the worker refuses it at once, and says why
        return Work(once, once)
    most = once + rounds * round_share
    if until_deadline or limit_s < math.inf:
        return Work(min(soonest, most), most, limit_s, until_deadline)
    same = (rounds, candidates, horizon) == (own.rounds, own.candidates, own.horizon)
    return WHOLE if same else Work(most, most)
