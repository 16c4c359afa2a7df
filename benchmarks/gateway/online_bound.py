"""How many deadlines a rule can meet that does not know who comes next: a bound of its long-run share.

python -m benchmarks.gateway.online_bound [--output FILE] [--load L ...] [--seeds N] [--duration SECONDS]

Robots that ask once each, at Poisson instants, with the three kinds of budgets of `Pace.mixed`; batches take exactly
their median. The clairvoyant optimum (`bounds`) knows when the next tight one comes, which no rule can. Here the
problem is made easier for every rule until what is left can be solved without foresight:

- Whoever is not of the tightest kind has no deadline, and there are always as many of them as a batch has room for. To
  serve one costs a price p, and p is paid for each one that comes. No more are served than come, so with
  0 <= p <= 1 nothing is lost by it: tight + others <= tight + (1 - p) others served + p others that come. This is the
  Lagrangian relaxation of weakly coupled dynamic programs (Adelman and Mersereau, Operations Research 56, 2008). All
  prices are bounds, and the lowest one counts.
- Then only tight requests are waited with, and a batch of B brings (1 - p) B, and p more for each tight one in it.
- What a tight one has left when the worker is free matters only by the sequences of batches that fit into it, so it is
  rounded down to the largest sum of durations that does: this loses nothing. While the worker idles, nobody's time
  passes; then idling is worth nothing until the next tight one comes.
- Who finds `most` tight ones waiting is worth p at once. No more can be lost by leaving one out: in each plan somebody
  else takes the place, who brings 1 - p of the 1.

What remains is a semi-Markov decision process of 400,000 states, solved by value iteration. Its end is a
certificate that owes nothing to convergence: where V is any bounded function of the states and
(reward + E V(next) - V) / duration is at most g in every state for every action, no rule earns more than g in the long
run (Puterman, Markov Decision Processes, 1994, chapter 11).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gateway.paired import QUANTILES
from benchmarks.gateway.peers import Ours
from benchmarks.gateway.results import write_rows
from benchmarks.gateway.simulator import simulate
from benchmarks.gateway.times import ENGINES, Engine
from benchmarks.gateway.traces import HELD_OUT_SEEDS, poisson

Values = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

LOADS = (0.7, 0.8, 0.9)
DURATION_S = 300.0
MOST_WAITING, MOST_WAITING_SEARCH = 6, 4
SPREAD = 1e-5
"""Values have converged where the rates of all states are within this of one another, in requests a second."""
_EPSILON_MS = 1e-6


@dataclasses.dataclass(frozen=True)
class Demand:
    """Requests a second: tight ones with budgets spread evenly from `low_ms` to `high_ms`, and all others."""

    tight_hz: float
    others_hz: float
    low_ms: float
    high_ms: float


def mixed(engine: Engine, load: float) -> Demand:
    """What `poisson(..., engine.pace.mixed)` draws from: each kind of budget is as likely as the others."""
    kinds = engine.pace.thirds_ms
    rate = load * engine.capacity_hz
    return Demand(rate / len(kinds), rate * (1 - 1 / len(kinds)), *min(kinds))


class Relaxation:
    """The easier problem. A state is who waits when the worker is free: a sorted tuple of indices into `left_ms`."""

    def __init__(self, engine: Engine, demand: Demand, most: int) -> None:
        self.demand, self.most = demand, most
        self.buckets = engine.buckets
        self.lengths_ms = [1e3 * engine.median_s(bucket) for bucket in engine.buckets]
        if demand.low_ms < self.lengths_ms[0]:
            raise ValueError("some budgets are shorter than a batch of one")
        self.left_ms = self._sums()
        kinds = len(self.left_ms)
        self.states = [
            state for size in range(most + 1) for state in itertools.combinations_with_replacement(range(kinds), size)
        ]
        self._sizes = [math.comb(kinds + size - 1, size) for size in range(most + 1)]
        self._starts = [0, *itertools.accumulate(self._sizes)]
        numbers = {state: number for number, state in enumerate(self.states)}
        self._with = np.array(
            [[numbers[tuple(sorted((*state, kind)))] for kind in range(kinds)] for state in self.states[: self._full]]
        )
        self._moves = [move for which in range(len(self.buckets)) for move in self._moves_of(which, numbers)]
        self._expected = [self._arriving(length) for length in self.lengths_ms]
        high, width = demand.high_ms, demand.high_ms - demand.low_ms
        above = [min(1.0, (high - left) / width) for left in self.left_ms] + [0.0]
        self._kind_of_next = np.array([one - other for one, other in itertools.pairwise(above)])

    @property
    def _full(self) -> int:
        """The first state in which `most` wait."""
        return self._starts[self.most]

    def _sums(self) -> list[float]:
        """All sums of batch durations up to the longest budget, ascending; sums that differ by rounding are one."""
        sums = found = {0.0}
        while found:
            longer = {before + length for before in found for length in self.lengths_ms}
            found = {total for total in longer if total <= self.demand.high_ms}
            sums = sums | found
        ordered = sorted(sums)
        return [total for before, total in itertools.pairwise(ordered) if total - before > _EPSILON_MS]

    def kind(self, left_ms: float) -> int:
        """Index of the largest sum of durations that fits; -1 where none does."""
        return bisect_right(self.left_ms, left_ms + _EPSILON_MS) - 1

    def _moves_of(self, which: int, numbers: dict[tuple[int, ...], int]) -> list[tuple[int, int, Indices, Indices]]:
        """(bucket, tight members, states where it is possible, who still waits at its end but for those who come)."""
        length = self.lengths_ms[which]
        later = [self.kind(left - length) for left in self.left_ms]
        first = self.kind(length)  # whoever has less left than this batch takes is served by none that is as long
        if self.left_ms[first] < length - _EPSILON_MS:
            first += 1
        rows: list[list[tuple[int, int]]] = [[] for _ in range(min(self.most, self.buckets[which]) + 1)]
        for number, state in enumerate(self.states):
            able = [kind for kind in state if kind >= first]
            for members in range(min(len(able), self.buckets[which]) + 1):
                rest = tuple(later[kind] for kind in able[members:] if later[kind] >= 0)
                rows[members].append((number, numbers[rest]))
        return [(which, members, *np.array(row).T) for members, row in enumerate(rows) if row]

    def _arriving(self, length_ms: float) -> Values:
        """How many tight ones of each kind wait at the end of a batch that came while it ran, on average."""
        low, high = self.demand.low_ms, self.demand.high_ms
        width = high - low

        def area(left: float) -> float:
            return 0.0 if left <= 0 else left * left / (2 * width) if left < width else left - width / 2

        # Who comes r before the end has b - r left; P(b - r >= left), integrated over r from 0 to the batch's length.
        at_least = [area(high - left) - area(high - left - length_ms) for left in self.left_ms] + [0.0]
        return np.array([one - other for one, other in itertools.pairwise(at_least)]) * self.demand.tight_hz / 1e3

    def _then(self, values: Values, means: Values, price: float) -> Values:
        """E V(state and who comes) for each state, where Poisson numbers of each kind come."""
        for kind, mean in enumerate(means):
            chances = [math.exp(-mean) * mean**number / math.factorial(number) for number in range(self.most + 1)]
            after = np.empty_like(values)
            for size, (begin, end) in enumerate(itertools.pairwise(self._starts)):
                room = self.most - size
                at: Indices = np.arange(begin, end)
                found = np.zeros(end - begin)
                for number in range(room):
                    found += chances[number] * values[at]
                    at = self._with[at, kind]
                more = 1.0 - sum(chances[:room])
                beyond = mean - sum(number * chances[number] for number in range(room)) - room * more
                after[begin:end] = found + more * values[at] + price * beyond
            values = after
        return values

    def rates(self, values: Values, price: float) -> Values:
        """The best (reward + E V(next) - V) / duration of each state, in requests a second."""
        idle = np.empty_like(values)
        idle[: self._full] = values[self._with] @ self._kind_of_next
        idle[self._full :] = values[self._full :] + price
        best: Values = (idle - values) * self.demand.tight_hz
        for which, members, states, rests in self._moves:
            if members == 0:
                then = self._then(values, self._expected[which], price)
            reward = (1.0 - price) * self.buckets[which] + price * members
            rate = (reward + then[rests] - values[states]) * 1e3 / self.lengths_ms[which]
            best[states] = np.maximum(best[states], rate)
        return best

    def share(self, price: float, values: Values | None = None, steps: int = 400) -> tuple[float, Values]:
        """The bound of the long-run share at this price, and the values that certify it, which may start another."""
        values = np.zeros(len(self.states)) if values is None else values
        step_s = 0.98 * min(self.lengths_ms[0] / 1e3, 1.0 / self.demand.tight_hz)
        rates = self.rates(values, price)
        for _ in range(steps):
            if np.ptp(rates) < SPREAD * self.demand.tight_hz:
                break
            values = values + step_s * rates
            values = values - values[0]
            rates = self.rates(values, price)
        others = self.demand.others_hz
        return float(rates.max() + price * others) / (self.demand.tight_hz + others), values


def online_bound(
    engine: Engine, demand: Demand, most: int = MOST_WAITING, search: int = MOST_WAITING_SEARCH
) -> tuple[float, float]:
    """(the share that no rule without foresight passes in the long run, the price of the others that shows it)."""
    rough = Relaxation(engine, demand, search)
    low, high, values = 0.0, 1.0, None
    shares: dict[float, float] = {}
    while high - low > 0.01:  # the bound is convex in the price
        for price in (thirds := (low + (high - low) / 3, high - (high - low) / 3)):
            shares[price], values = rough.share(price, values)
        low, high = (low, thirds[1]) if shares[thirds[0]] <= shares[thirds[1]] else (thirds[0], high)
    price = min(shares, key=shares.__getitem__)
    return min(1.0, Relaxation(engine, demand, most).share(price)[0]), price


def compare(engine: Engine, loads: Sequence[float], seeds: Sequence[int], duration_s: float) -> list[dict[str, Any]]:
    """Ours on long traces against the bound."""
    engine = dataclasses.replace(engine, sigma=0.0)
    rows = []
    print(f"{engine.name}, mixed budgets, {len(seeds)} x {duration_s:g} s, exact medians")
    print(f"{'load':>5}{'ours %':>9}{'±':>6}{'bound':>8}{'gap':>7}{'price':>7}")
    for load in loads:
        days = [
            poisson("poisson, mixed", load, engine.capacity_hz, engine.pace.mixed, one, duration_s) for one in seeds
        ]
        shares = [simulate(day, Ours(engine), engine).share for day in days]
        half = QUANTILES[len(shares)] * statistics.stdev(shares) / math.sqrt(len(shares))
        bound, price = online_bound(engine, mixed(engine, load))
        ours = statistics.fmean(shares)
        print(
            f"{load:>5.1f}{100 * ours:>9.2f}{100 * half:>6.2f}{100 * bound:>8.2f}{100 * (bound - ours):>7.2f}"
            f"{price:>7.2f}",
            flush=True,
        )
        rows.append(
            {
                "bench": "gateway-online-bound",
                "policy": engine.name,
                "trace": "poisson, mixed",
                "load": load,
                "scheduler": Ours.name,
                "seeds": list(seeds),
                "duration_s": duration_s,
                "requests": sum(len(day.jobs) for day in days),
                "on_time": round(ours, 5),
                "on_time_half": round(half, 5),
                "on_time_by_seed": [round(share, 5) for share in shares],
                "bound": round(bound, 5),
                "price": round(price, 4),
                "most_waiting": MOST_WAITING,
                "ratio": round(ours / bound, 4),
            }
        )
    return rows


def main() -> None:
    """Prints the table and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--load", type=float, action="append", help=f"{', '.join(map(str, LOADS))} unless given")
    parser.add_argument("--seeds", type=int, default=len(HELD_OUT_SEEDS), help="how many of the held-out seeds")
    parser.add_argument("--duration", type=float, default=DURATION_S, help="seconds of each trace")
    arguments = parser.parse_args()
    rows = compare(ENGINES[0], arguments.load or LOADS, HELD_OUT_SEEDS[: arguments.seeds], arguments.duration)
    if arguments.output is not None:
        write_rows(arguments.output, rows, " ".join(["python -m benchmarks.gateway.online_bound", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
