"""The trial of a candidate revision as a pure state machine: shadow, parity gate, steps, done; or taken back.

`advance` makes at most one transition from what is stored in status.rollout and what is observed. Its result is stored
before anything follows from it, so an operator that dies anywhere goes on where its predecessor decided to be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec
from taktline_protocol.measurements import Trial

from taktline_operator import judgement
from taktline_operator.faults import Fault
from taktline_operator.spec import Rollout

Phase = Literal["Complete", "Starting", "Shadow", "Shifting", "Finishing", "RollingBack", "RolledBack"]
ON_TRIAL = ("Starting", "Shadow", "Shifting")
ROUTED = ("Shadow", "Shifting")  # phases in which the gateways know of the candidate

GRACE_S = 15.0  # after the routes have changed, before workers that they no longer name are taken away
BLIND_GRACE_S = 60.0  # the same while no gateway can be asked whether it has the new routes
LOOK_AGAIN_S = 2.0


class State(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """status.rollout; the CRD describes the fields."""

    phase: Phase = "Complete"
    stable: str = ""
    candidate: str = ""
    step: int = -1
    weight: int = 0
    paused: bool = False
    promoted: bool = False
    started_at: str = ""
    since: str = ""
    baseline: float = 0.0
    rejected: str = ""
    reason: str = ""
    message: str = ""
    handled: str = ""

    @property
    def trial_step(self) -> str:
        """Names the present step to the gateways."""
        return "shadow" if self.phase == "Shadow" else f"step-{self.step}-{self.weight}"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is observed of a rollout.

    Attributes:
        wanted: hash of the revision that the spec asks for, and `revision` its name.
        replicas: workers wanted by pool.
        stable_ready: workers of the serving revision that serve.
        candidate_ready: the candidate's, by pool.
        fault: why the candidate cannot come up, where that is sure.
        trials: what each gateway that answered measures of this policy; None where none answered.
        command: the annotation taktline.dev/rollout.
        now: RFC 3339 time.
    """

    wanted: str
    revision: str
    replicas: Mapping[str, int]
    stable_ready: int
    candidate_ready: Mapping[str, int]
    now: str
    fault: Fault | None = None
    trials: tuple[Trial, ...] | None = None
    command: str = ""


def share(replicas: int, weight: float) -> int:
    """Workers that serve `weight` percent of what `replicas` workers serve: at least one of any."""
    return max(1, math.ceil(replicas * weight / 100)) if replicas and weight > 0 else 0


def candidate_replicas(state: State, rollout: Rollout, replicas: int) -> int:
    """Workers that the candidate needs in a pool of `replicas`."""
    if state.promoted or state.phase == "Finishing":
        return replicas
    step = max(0, min(state.step, len(rollout.steps) - 1))
    return share(replicas, rollout.steps[step])


def stable_replicas(state: State, rollout: Rollout, replicas: int) -> int:
    """Workers that the serving revision keeps in a pool of `replicas` while a candidate is on trial."""
    if rollout.capacity == "Surge" or state.phase not in ("Shifting", "Finishing"):
        return replicas
    return min(replicas, max(1, share(replicas, 100 - state.weight)))


def seconds_between(earlier: str, later: str) -> float:
    """Seconds from one RFC 3339 time to another; 0 where the clock went back."""
    if not earlier or not later:
        return 0.0
    return max(0.0, (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds())


def advance(state: State, rollout: Rollout, objective: float, facts: Facts) -> State:
    """The next state, at most one transition away. Equal input gives equal output."""
    state, order = _commanded(state, facts)
    if state.phase in ON_TRIAL:
        return _on_trial(state, rollout, objective, facts, order)
    if state.phase == "Finishing":
        return _finishing(state, facts)
    if state.phase == "RollingBack":
        return _rolling_back(state, facts)
    if facts.wanted == state.stable:
        return _enter(state, "Complete", facts, rejected="", reason="", message="")
    if facts.wanted == state.rejected and order != "retry":
        return state
    if not state.stable:  # the first revision ever: nobody is served, so nothing can be put at risk
        return _enter(state, "Complete", facts, stable=facts.wanted, rejected="", reason="", message="")
    return _enter(
        state,
        "Starting",
        facts,
        candidate=facts.wanted,
        started_at=facts.now,
        rejected="",
        reason="",
        message="its workers start",
    )


def _commanded(state: State, facts: Facts) -> tuple[State, str]:
    """Pausing holds while the annotation says so; promote, abort and retry are taken once for each new text."""
    words = facts.command.split()
    action, target = (words[0] if words else ""), (words[1] if len(words) > 1 else "")
    subject = state.candidate or state.rejected
    meant = not target or target in (subject, facts.revision)
    state = msgspec.structs.replace(state, paused=action == "pause" and meant and state.phase in ON_TRIAL)
    if action not in ("promote", "abort", "retry") or facts.command == state.handled:
        return state, ""
    if target and not meant:  # it names a candidate that may still come
        return state, ""
    return msgspec.structs.replace(state, handled=facts.command), action if meant else ""


def _on_trial(state: State, rollout: Rollout, objective: float, facts: Facts, order: str) -> State:
    if facts.wanted != state.candidate:
        return _back(state, facts, "Superseded", "the spec asks for another revision now")
    if order == "abort":
        return _back(state, facts, "Aborted", "somebody aborted it")
    if facts.fault is not None:
        return _back(state, facts, "CandidateFails", facts.fault.message)
    limit = rollout.timeout_minutes
    if limit is not None and not state.paused and seconds_between(state.started_at, facts.now) > 60.0 * limit:
        waited = f"not through after {limit} min, last: {state.message}"
        return _back(state, facts, "TimedOut", waited)
    if order == "promote":
        return _enter(state, "Shifting", facts, promoted=True, step=len(rollout.steps) - 1, message="promoted by hand")
    if state.phase == "Starting":
        return _starting(state, rollout, facts)
    verdict = _judged(state, rollout, objective, facts)
    if verdict.kind == "fail":
        return _back(state, facts, verdict.reason, verdict.message)
    if state.phase == "Shadow":
        if verdict.kind == "pass" and not state.paused:
            baseline = _baseline(state, facts)
            return _enter(state, "Shifting", facts, step=0, baseline=baseline, message=verdict.message)
        return _waiting(state, verdict.message)
    return _shifting(state, rollout, facts, verdict)


def _judged(state: State, rollout: Rollout, objective: float, facts: Facts) -> judgement.Verdict:
    measured = judgement.merged(list(facts.trials or ()), state.candidate, state.trial_step)
    if state.phase == "Shadow":
        return judgement.of_shadow(measured, rollout, objective, state.baseline)
    if state.promoted:
        return judgement.Verdict("pass", "Promoted", "promoted by hand")
    return judgement.of_step(measured, rollout, objective, state.baseline)


def _baseline(state: State, facts: Facts) -> float:
    """Misses of the serving revision, remembered for steps in which it serves nobody."""
    measured = judgement.merged(list(facts.trials or ()), state.candidate, state.trial_step)
    share = judgement.miss_share(measured.stable) if measured is not None else None
    return state.baseline if share is None else round(share, 4)


def _starting(state: State, rollout: Rollout, facts: Facts) -> State:
    if not _enough(state, rollout, facts):
        return _waiting(state, "its workers start")
    if state.paused:
        return _waiting(state, "its workers are ready")
    if facts.stable_ready == 0:
        # Robots are served by nobody, so there is nothing to compare with and nothing to lose.
        return _enter(state, "Finishing", facts, weight=100, message="no worker of the old revision serves")
    if rollout.shadow.percent == 0:
        return _enter(state, "Shifting", facts, step=0, message="no shadow phase")
    return _enter(state, "Shadow", facts, message="compares actions on mirrored observations")


def _shifting(state: State, rollout: Rollout, facts: Facts, verdict: judgement.Verdict) -> State:
    target = rollout.steps[min(state.step, len(rollout.steps) - 1)]
    if state.weight != target:
        if not _enough(state, rollout, facts):
            return _waiting(state, f"waits for workers before it serves {target} % of the robots")
        return _enter(state, "Shifting", facts, weight=target, message=f"serves {target} % of the robots")
    held_s = seconds_between(state.since, facts.now)
    if state.paused:
        return _waiting(state, f"serves {target} % of the robots: {verdict.message}")
    if not state.promoted and held_s < rollout.step_seconds:
        return _waiting(state, f"serves {target} % of the robots: {verdict.message}")
    if verdict.kind != "pass":
        return _waiting(state, f"serves {target} % of the robots: {verdict.message}")
    if state.step + 1 < len(rollout.steps):
        baseline = _baseline(state, facts)
        return _enter(state, "Shifting", facts, step=state.step + 1, baseline=baseline, message=verdict.message)
    return _enter(state, "Finishing", facts, message="all robots are served by it; the old workers leave")


def _finishing(state: State, facts: Facts) -> State:
    # Not until all of the candidate's workers serve: one that lacks a node may be waiting for that of an old worker.
    if not _settled(state, facts):
        return _waiting(state, "all robots are served by it; the old workers leave")
    return _enter(
        state,
        "Complete",
        facts,
        stable=state.candidate,
        candidate="",
        step=-1,
        weight=0,
        baseline=0.0,
        promoted=False,
        paused=False,
        message="",
        started_at="",
    )


def _rolling_back(state: State, facts: Facts) -> State:
    if not _settled(state, facts):
        return state
    # A superseded candidate was not found bad: it may come back.
    rejected = "" if state.reason == "Superseded" else state.candidate
    return _enter(
        state,
        "RolledBack" if rejected else "Complete",
        facts,
        candidate="",
        rejected=rejected,
        step=-1,
        baseline=0.0,
        promoted=False,
        paused=False,
        started_at="",
    )


def _back(state: State, facts: Facts, reason: str, message: str) -> State:
    return _enter(state, "RollingBack", facts, weight=0, paused=False, reason=reason, message=message)


def _settled(state: State, facts: Facts) -> bool:
    """Whether every gateway has stopped using the routes of before."""
    waited_s = seconds_between(state.since, facts.now)
    if facts.trials is None:
        return waited_s >= BLIND_GRACE_S
    return waited_s >= GRACE_S and not any(trial.id == state.candidate for trial in facts.trials)


def _enough(state: State, rollout: Rollout, facts: Facts) -> bool:
    return all(
        facts.candidate_ready.get(pool, 0) >= candidate_replicas(state, rollout, count)
        for pool, count in facts.replicas.items()
    )


def _enter(state: State, phase: Phase, facts: Facts, **changes: object) -> State:
    moved = phase != state.phase or any(
        name in ("step", "weight", "promoted") and getattr(state, name) != value for name, value in changes.items()
    )
    since = facts.now if moved or not state.since else state.since
    return msgspec.structs.replace(state, phase=phase, since=since, **changes)


def _waiting(state: State, message: str) -> State:
    return msgspec.structs.replace(state, message=message)
