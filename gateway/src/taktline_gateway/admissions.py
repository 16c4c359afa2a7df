"""Robots that ask at connect whether there is room for them, and what was promised to those who have not begun yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from taktline_protocol.messages import AdmissionAnswer, AdmissionQuestion

from taktline_gateway.phases import PhasePlanner
from taktline_gateway.schedulability import TARGET_LOAD, Demand, Verdict, schedulable
from taktline_gateway.service_times import ServiceTimes

PROMISE_S = 15.0
"""A robot that was told yes counts for so long, even if it has not sent anything yet."""
MAX_PROMISES = 100_000


class Admissions:
    """The demand of one policy: of robots seen, by their rhythm, and of robots promised a place."""

    def __init__(self, phases: PhasePlanner) -> None:
        self._phases = phases
        self._promised: OrderedDict[tuple[str, str], tuple[float, Demand]] = OrderedDict()

    def ask(
        self,
        source: tuple[str, str],
        question: AdmissionQuestion,
        now: float,
        tightest_s: float,
        workers: Sequence[ServiceTimes],
    ) -> AdmissionAnswer:
        """Answers one robot; where there is room, its place is kept for PROMISE_S.

        Args:
            tightest_s: the smallest budget that came lately.
            workers: T_sync of each batch that can run at a time.
        """
        self._forget(now)
        self._promised.pop(source, None)
        new = Demand(question.rate_hz, question.budget_ms / 1e3)
        rate_hz = self._phases.demand_hz - self._phases.rate_hz(source)
        for other, (_, demand) in self._promised.items():
            tightest_s = min(tightest_s, demand.budget_s)
            if not self._phases.rate_hz(other):
                rate_hz += demand.rate_hz
        verdict = schedulable(new, max(0.0, rate_hz), tightest_s, workers)
        if verdict.admissible:
            self._promised[source] = (now, new)
            if len(self._promised) > MAX_PROMISES:
                self._promised.popitem(last=False)
        return answer_of(verdict)

    def _forget(self, now: float) -> None:
        while self._promised:
            source, (promised_at, _) = next(iter(self._promised.items()))
            if now - promised_at <= PROMISE_S:
                break
            del self._promised[source]


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
