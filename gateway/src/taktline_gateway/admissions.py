"""Robots that ask at connect whether there is room for them, and what was promised to those who have not begun yet."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence

from taktline_protocol.messages import AdmissionAnswer, AdmissionQuestion

from taktline_gateway.phases import PhasePlanner
from taktline_gateway.schedulability import TARGET_LOAD, Demand, Verdict, schedulable
from taktline_gateway.service_times import ServiceTimes

PROMISE_S = 15.0
"""A robot that was told yes counts for so long, even if it has not sent anything yet."""
MAX_PROMISES = 100_000


@dataclasses.dataclass(slots=True)
class _Promise:
    """A place that is kept. `begun`: its robot's rhythm is known, so that it counts among those seen."""

    number: int
    promised_at: float
    demand: Demand
    begun: bool


class Admissions:
    """The demand of one policy: of robots seen, by their rhythm, and of robots promised a place.

    With n promises a question takes O(log n) steps, amortised, and O(w b) for w workers of b buckets: the promised
    rates are kept as a sum, the promised budgets as a heap from which promises that are over leave as they come up.
    """

    def __init__(self, phases: PhasePlanner) -> None:
        self._phases = phases
        self._promised: OrderedDict[tuple[str, str], _Promise] = OrderedDict()  # by when they were promised
        self._budgets: list[tuple[float, int, tuple[str, str]]] = []
        self._waiting_hz = 0.0
        self._waiting = 0
        self._numbers = 0
        phases.when_known = self._begun

    def __len__(self) -> int:
        return len(self._promised)

    def ask(
        self,
        source: tuple[str, str],
        question: AdmissionQuestion,
        now: float,
        tightest_s: float,
        workers: Sequence[ServiceTimes],
        share: float = 1.0,
    ) -> AdmissionAnswer:
        """Answers one robot; where there is room, its place is kept for PROMISE_S.

        Args:
            tightest_s: the smallest budget that came lately.
            workers: T_sync of each batch that can run at a time.
            share: of it, what one of the robot's answers needs.
        """
        self._forget(now)
        self._drop(source)
        new = Demand(question.rate_hz, question.budget_ms / 1e3, share)
        own_hz = self._phases.load_hz(source)
        rate_hz = self._phases.demand_hz - own_hz + self._waiting_hz
        verdict = schedulable(new, max(0.0, rate_hz), min(tightest_s, self._tightest_s()), workers)
        if verdict.admissible:
            self._promise(source, new, now, begun=own_hz > 0.0)
        return answer_of(verdict)

    def _promise(self, source: tuple[str, str], demand: Demand, now: float, *, begun: bool) -> None:
        self._numbers += 1
        promise = self._promised[source] = _Promise(self._numbers, now, demand, begun)
        if not begun:
            self._count(promise, 1)
        heapq.heappush(self._budgets, (demand.budget_s, promise.number, source))
        if len(self._promised) > MAX_PROMISES:
            self._drop(next(iter(self._promised)))
        if len(self._budgets) > 2 * len(self._promised) + 64:  # of robots that ask again and again
            self._budgets = [(one.demand.budget_s, one.number, name) for name, one in self._promised.items()]
            heapq.heapify(self._budgets)

    def _begun(self, source: tuple[str, str]) -> None:
        """The robot's rhythm is known: what was promised to it is asked for."""
        promise = self._promised.get(source)
        if promise is not None and not promise.begun:
            promise.begun = True
            self._count(promise, -1)

    def _tightest_s(self) -> float:
        """The smallest budget among the promises; infinite without one."""
        while self._budgets:
            budget_s, number, source = self._budgets[0]
            promise = self._promised.get(source)
            if promise is not None and promise.number == number:
                return budget_s
            heapq.heappop(self._budgets)
        return math.inf

    def _count(self, promise: _Promise, change: int) -> None:
        self._waiting += change
        # A sum that is added to and taken from for days drifts; with nobody in it, it is zero.
        self._waiting_hz = self._waiting_hz + change * promise.demand.load_hz if self._waiting else 0.0

    def _forget(self, now: float) -> None:
        while self._promised:
            source, promise = next(iter(self._promised.items()))
            if now - promise.promised_at <= PROMISE_S:
                break
            self._drop(source)

    def _drop(self, source: tuple[str, str]) -> None:
        promise = self._promised.pop(source, None)
        if promise is not None and not promise.begun:
            self._count(promise, -1)


def answer_of(verdict: Verdict) -> AdmissionAnswer:
    """What the robot is told."""
    reasons = {
        "": "there is room",
        "rate": f"the workers would be promised beyond {100 * TARGET_LOAD:.0f}% of their time",
        "budget": f"at worst an answer takes {1e3 * verdict.worst_s:.1f} ms, longer than the tightest budget",
    }
    return AdmissionAnswer(
        admissible=verdict.admissible,
        reason=reasons[verdict.reason],
        utilisation=round(verdict.utilisation, 4),
        batch=verdict.batch,
        worst_ms=round(1e3 * verdict.worst_s, 2),
        spare=verdict.spare,
    )
