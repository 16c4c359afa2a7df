"""What goes into the next batch when classes and shares differ: the first rank decides, the others fill its room."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from taktline_gateway.arrivals import Arrivals
from taktline_gateway.batching import LOOKAHEAD, weigh_batch
from taktline_gateway.deadline_queue import RANKS, DeadlineQueue, Priority, Ticket
from taktline_gateway.foresight import Step
from taktline_gateway.service_times import ServiceTimes

LOW_RANK = 2 * Priority.BACKGROUND
"""From this rank on tickets give way to those that are still to come, not only to those that wait."""

LOSS = 0.5
"""So many tickets more on time are worth a lower quality; fractions are chances."""


@dataclasses.dataclass(slots=True)
class Composition:
    """The next batch of one worker.

    Attributes:
        tickets: its members, in service order.
        slices: (rank, position, size) of where they stand in the queue.
        level: the quality it is run at; 0 is full quality.
        wait_until: do not launch yet, ask again then.
    """

    tickets: tuple[Ticket, ...] = ()
    slices: tuple[tuple[int, int, int], ...] = ()
    level: int = 0
    wait_until: float | None = None


NOTHING = Composition()


def compose(
    queue: DeadlineQueue,
    levels: Sequence[ServiceTimes],
    now: float,
    limit: int,
    *,
    arrivals: Arrivals,
    workers: int,
    asked_at: float,
    price_hz: float,
    company_until: Callable[[list[float], tuple[int, int]], float | None],
    foresees: Callable[[list[float]], Step | None],
) -> Composition:
    """The batch to launch now on a worker with these times.

    The first rank with a ticket that this worker can make decides by `weigh_batch`, as if it were alone. Room that is
    left in its bucket costs nothing and is filled from the next ranks; where the rank is exhausted, the batch may grow
    into larger buckets as long as its most urgent member stays on time. Low classes neither begin nor enlarge a batch
    that would outlast what the tightest recent budget leaves beside a batch of one, so that whoever comes during it is
    still on time.

    Quality is lowered, level by level, only where a ticket in sight would otherwise be lost more likely than not, and
    never to a chunk that is over for one of the batch before it is there.

    Args:
        now: when the worker can begin; `asked_at` is the instant of the decision, which is earlier behind a batch.
        arrivals: what came lately to all `workers`.
        price_hz: what a second of this one is worth (`overload`).
        company_until: until when tickets may wait for company (`company`), by their deadlines and the slice of them
            that would be launched now; asked where nobody else waits.
        foresees: what to do with them first, where it is known well enough who comes (`foresight`).
    """
    tightest_s = arrivals.tightest_s(asked_at)
    soonest_s = min(times.median[1] for times in levels)
    for rank in range(RANKS):
        if queue.count(rank):
            position, dues = queue.sight(rank, now + soonest_s, LOOKAHEAD)
            if dues:
                break
    else:
        return NOTHING
    times = levels[0]
    low = rank >= LOW_RANK
    if low:
        limit = min(limit, _unobtrusive(times, tightest_s, limit))
    beyond = len(queue) - len(dues)
    bold = rank >= 2 * Priority.PRODUCTION  # with safety's deadlines no chances are taken
    rate_hz = arrivals.rate_hz(asked_at) / workers
    patience_hz = arrivals.patience_hz() if bold and not low else 0.0

    def weighed(level: int) -> tuple[int, int, float]:
        return weigh_batch(
            dues, now, levels[level], limit, rate_hz, beyond, price_hz, patience_hz=patience_hz, bold=bold
        )

    known = beyond == position  # but for the hopeless, whom nobody has refused yet, all are in sight
    step = foresees(dues) if bold and not low and known and len(levels) == 1 else None
    if step is not None and step.wait_until is not None:
        return Composition(wait_until=step.wait_until)
    start, size, on_time = weighed(0) if step is None else (*step[:2], 0.0)
    saves = len(levels) > 1 and on_time <= len(dues) - LOSS  # then a wait, which full quality is judged by, would lose
    if step is None and not low and not saves and not beyond:  # who waits while others are there waits for nothing
        wait_until = company_until(dues, (start, size))
        if wait_until is not None:
            return Composition(wait_until=wait_until)
    level, too_short = 0, False
    if saves and not low:
        for cheaper in range(1, len(levels)):
            found = weighed(cheaper)
            if found[2] < on_time + LOSS:
                continue
            if _long_enough(levels[cheaper], queue.members(rank, position + found[0], found[1]), now):
                (start, size, on_time), level = found, cheaper
            else:
                too_short = True
            if on_time > len(dues) - LOSS:
                break
        times = levels[level]
        if too_short and dues[start + size - 1] < now + times.median[size]:
            return NOTHING  # only what is over too soon would be in time
    tickets = queue.members(rank, position + start, size)
    slices = [(rank, position + start, size)]
    if size < limit and len(queue) > size:
        exhausted = start == 0 and size == len(dues)
        _fill(queue, times, now, limit, rank, dues[start], tightest_s, tickets, slices, exhausted=exhausted)
    return Composition(tuple(tickets), tuple(slices), level)


def _fill(
    queue: DeadlineQueue,
    times: ServiceTimes,
    now: float,
    limit: int,
    rank: int,
    earliest: float,
    tightest_s: float,
    tickets: list[Ticket],
    slices: list[tuple[int, int, int]],
    *,
    exhausted: bool,
) -> None:
    """Adds members of the ranks behind `rank` to a batch whose most urgent member is due at `earliest`."""
    for other in range(rank + 1, RANKS):
        if not queue.count(other):
            continue
        total = len(tickets)
        room = min(times.bucket(total), limit)
        target = room
        if exhausted:
            most = limit if other < LOW_RANK else min(limit, _unobtrusive(times, tightest_s, limit))
            target = max(room, times.largest_within(earliest - now, most))
        if target <= total:
            continue
        position, dues = queue.sight(other, now + times.tail[target], target - total)
        together = total + len(dues)
        if together > room:
            # Beyond the bucket's own room: only as much as is the quickest way to serve them all.
            together = max(times.thrifty(together), min(room, together))
        more = queue.members(other, position, together - total)
        if times.actions and not _long_enough(times, [*tickets, *more], now):
            more = []
        if more:
            tickets.extend(more)
            slices.append((other, position, len(more)))
        exhausted = exhausted and len(more) == queue.count(other)


def _long_enough(times: ServiceTimes, tickets: Sequence[Ticket], now: float) -> bool:
    """Whether something is left of the chunk for each when a batch of them ends that begins now.

    Only a chunk that is shorter than the policy's own can be over by then: whose delay a whole one cannot bear is told
    so by the worker.
    """
    ends_at = now + times.median[len(tickets)]
    return not times.actions or all(ticket.passing(ends_at) < times.actions for ticket in tickets)


def _unobtrusive(times: ServiceTimes, tightest_s: float, limit: int) -> int:
    """Largest batch that leaves the tightest recent budget time for a batch of one after it; at least 1."""
    return max(1, times.largest_within(tightest_s - times.median[1], limit))
