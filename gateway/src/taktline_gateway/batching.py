"""Which tickets make the next batch: as many deadlines as possible, then as little waiting as the load allows."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from taktline_gateway.service_times import ServiceTimes

LOOKAHEAD = 128
"""Tickets that a decision looks at. A queue deeper than this is served for throughput."""
TAIL_QUANTILE = 2.326
"""How many standard deviations above the median the 99th percentile of a normal distribution lies."""
GRAIN = 0.05
"""Expected numbers of tickets on time that differ by less are equal: then the waiting decides."""
_SQRT2 = math.sqrt(2.0)


def choose_batch(
    deadlines: Sequence[float],
    now: float,
    times: ServiceTimes,
    limit: int,
    rate_hz: float = 0.0,
    beyond: int = 0,
    price_hz: float = 0.0,
    *,
    patience_hz: float = 0.0,
    bold: bool = True,
) -> tuple[int, int]:
    """(start, size) of the slice of `deadlines` to launch now on a worker with these times; see `weigh_batch`."""
    return weigh_batch(deadlines, now, times, limit, rate_hz, beyond, price_hz, patience_hz=patience_hz, bold=bold)[:2]


def weigh_batch(
    deadlines: Sequence[float],
    now: float,
    times: ServiceTimes,
    limit: int,
    rate_hz: float,
    beyond: int,
    price_hz: float,
    *,
    patience_hz: float = 0.0,
    bold: bool = True,
) -> tuple[int, int, float]:
    """(start, size, on_time): the slice of `deadlines` to launch now, and how many in sight would be on time then.

    `deadlines` are those of the tickets in sight, ascending; `rate_hz` is the arrival rate, `beyond` counts the
    tickets out of sight, `price_hz` is what a second of the worker is worth in tickets (`overload`), `patience_hz` what
    a second is worth that a ticket waits while the batch runs (`arrivals`).

    Candidates begin at the head, with every bucket that keeps the most urgent member on time by the tail, and behind as
    many heads as stand in the way of a larger bucket; where `bold`, also those that fit by the median only. Each is
    judged by how many of the tickets in sight are expected on time when the rest follows greedily: a member that has
    the tail counts whole, one with less by its chance, with log-normal durations of that median and tail; what the
    batches before it may take beyond their medians makes that tail longer, by the square root of the sum of squares, as
    they are independent. So an order of batches that ends in time only if all keep to their medians is not taken for
    one that leaves room. Between
    equals the one with the least total waiting wins: of those in sight, and of those expected to arrive meanwhile. So a
    large batch is formed where the load needs its throughput and a small one where it would only delay. Under lasting
    overload the worker's time has a price, as others could be served in it: then tight heads give way to fuller
    batches, and no chance is taken with a place in a batch that can be filled with tickets that have the tail: each
    place is somebody's; and a plan is worth what its best beginning is, as nobody has to be served at a loss.

    With k tickets in sight, b buckets and batches of B: O(b * (log k + k / B)) steps.
    """
    count = len(deadlines)
    limit = min(limit, times.max_batch)
    tail, median = times.tail, times.median
    head = bisect_right(tail, deadlines[0] - now, 1, min(limit, count) + 1) - 1 or 1
    if head == 1 and count == 1:
        return (0, 1, int(deadlines[0] >= now + median[1]))
    bold = bold and tail[-1] > median[-1]
    candidates = {(0, -head), (0, -times.thrifty(head))}  # (start, -size): in order, the largest of a start comes first
    scarce = price_hz > 0.0
    if bold and not (scarce and count - bisect_left(deadlines, now + tail[limit], 0, count) >= limit):
        candidates.add((0, 1 - bisect_right(median, deadlines[0] - now, 1, min(limit, count) + 1) or -1))
    for bucket in times.buckets:
        size = min(bucket, limit)
        if size < head:
            candidates.add((0, -size))
        elif size > head:
            start = bisect_left(deadlines, now + tail[size], 0, count)
            chances = bold and not (scarce and count - start >= size)
            for durations in (tail, median) if chances else (tail,):
                if durations is median:
                    start = bisect_left(deadlines, now + median[size], 0, count)
                if 0 < start < count:
                    most = min(limit, count - start)
                    candidates.add((start, 1 - bisect_right(durations, deadlines[start] - now, 1, most + 1) or -1))
    best: tuple[int, int, float] = (0, 1, 0)
    best_worth, best_cost = -math.inf, 0.0
    everybody = round(count / GRAIN)
    follower = max(0.0, 1.0 - price_hz / times.best_rate)
    full = times.max_batch
    if count + beyond > 2 * full:  # the next batch is full anyway
        patience_hz = 0.0
    plain = not price_hz and not patience_hz
    # The largest first: where the load is deep it serves everybody soonest, and shows the others to be hopeless.
    for start, less in sorted(candidates):
        size = -less
        # The heads that it begins behind are lost to it; who follows takes the time of the best throughput at least.
        waiting = count - start - size
        gain = patience_hz * median[size] * (waiting if waiting < full else full)
        most_worth = size - price_hz * median[size] + waiting * follower + gain
        if most_worth / GRAIN < best_worth - 0.5:
            continue
        if plain and best_worth == everybody and best_cost < _least_cost(size, count, times, rate_hz, beyond):
            continue  # nobody is lost to either, and its end cannot be sooner than this
        on_time, elapsed, waited, value = follow(start, size, deadlines, now, times, limit, price_hz)
        worth = round((value + gain) / GRAIN)
        # Whoever arrives while these are served, rate * elapsed of them, waits for their end, half of elapsed each, and
        # then for its own batch, which is about as long again where the load is high.
        cost = elapsed if beyond else waited + rate_hz * elapsed * elapsed
        if worth > best_worth or (worth == best_worth and (cost, start, -size) < (best_cost, best[0], -best[1])):
            best, best_worth, best_cost = (start, size, on_time), worth, cost
    return best


def _expected(start: int, size: int, deadlines: Sequence[float], now: float, times: ServiceTimes) -> float:
    """How many members of a batch that begins now are expected on time, where its tail is too long for the first."""
    median, tail = times.median[size], times.tail[size]
    apart = math.log(tail / median) / TAIL_QUANTILE * _SQRT2
    expected, erf, log = 0.0, math.erf, math.log
    for index in range(start, start + size):
        slack = deadlines[index] - now
        if slack >= tail:  # and so have all that are less urgent
            return expected + start + size - index
        if slack > 0.0 and apart > 0.0:
            expected += 0.5 + 0.5 * erf(log(slack / median) / apart)
        elif slack >= median:
            expected += 1.0
    return expected


def _missing(deadlines: Sequence[float], begin: int, end_index: int, end: float, spread: float) -> float:
    """How many of these tickets are expected to be late where the 99th percentile of their end is `end` + `spread`."""
    lost, erf, apart = 0.0, math.erf, spread * _SQRT2
    for due in deadlines[begin : bisect_left(deadlines, end + spread, begin, end_index)]:
        lost += 0.5 - 0.5 * erf(TAIL_QUANTILE * (due - end) / apart)
    return lost


def _least_cost(size: int, count: int, times: ServiceTimes, rate_hz: float, beyond: int) -> float:
    """A lower bound of the cost of a candidate from the head that serves all `count` tickets in time.

    The j-th ticket behind it is not done before j / best_rate after its end.
    """
    first, rest, rate = times.median[size], count - size, times.best_rate
    elapsed = first + rest / rate
    if beyond:
        return elapsed
    return size * first + rest * (first + 0.5 * rest / rate) + rate_hz * elapsed * elapsed


def follow(
    start: int,
    size: int,
    deadlines: Sequence[float],
    now: float,
    times: ServiceTimes,
    limit: int,
    price_hz: float,
    *,
    fits: Sequence[float] | None = None,
    wait_s: float = 0.0,
    variance: float = 0.0,
) -> tuple[float, float, float, float]:
    """(tickets on time, duration, their summed waits in s, worth) when a candidate goes first and the rest follows.

    The heads before a candidate count as lost: they stood in its way because they could not wait. Its worth is that of
    the best beginning of this plan: where time has a price, a batch that is not worth it need not follow.

    Args:
        fits: the durations by size by which later batches must fit their most urgent members; the tail where not given.
        wait_s: how long the candidate waits from `now` on, with a `variance` in the units of `ServiceTimes.variance`.
    """
    median, tail, thrifty, sqrt = times.median, times.tail, times.thrifty_table, math.sqrt
    fits = tail if fits is None else fits
    variances = times.variance
    elapsed, spread = wait_s + median[size], variance + variances[size]
    on_time: float = size
    if variance:
        on_time -= _missing(deadlines, start, start + size, now + elapsed, sqrt(spread))
    elif deadlines[start] < now + wait_s + tail[size]:
        on_time = _expected(start, size, deadlines, now + wait_s, times)
    worth = on_time - price_hz * elapsed
    waited = size * elapsed
    index = start + size
    total = len(deadlines)
    shortest = now + fits[1]
    while index < total:
        most = total - index
        fitting = bisect_right(fits, deadlines[index] - now - elapsed, 1, (most if most < limit else limit) + 1) - 1
        if fitting:
            size = thrifty[fitting]
            elapsed += median[size]
            spread += variances[size]
            on_time += size
            if spread and deadlines[index] < now + elapsed + sqrt(spread):
                on_time -= _missing(deadlines, index, index + size, now + elapsed, sqrt(spread))
            waited += size * elapsed
            index += size
            if on_time - price_hz * elapsed > worth:
                worth = on_time - price_hz * elapsed
        else:
            index = bisect_left(deadlines, shortest + elapsed, index + 1, total)
    return on_time, elapsed, waited, worth
