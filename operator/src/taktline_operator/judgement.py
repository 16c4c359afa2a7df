"""Judges a candidate by what the gateways measured: does it act like the serving revision, and does it keep deadlines.

A share is judged by the binomial tail: a candidate fails once what it shows would happen with a probability below
`ALPHA` to one that keeps the declared share. So one late chunk among a few does not condemn it, and a broken candidate
is known after a handful of observations.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from taktline_protocol.measurements import Outcomes, Trial

from taktline_operator.spec import Rollout

ALPHA = 1e-3
ENOUGH_FOR_SHARE = 20


class Verdict(NamedTuple):
    """What the measurements say: `wait` for more, `pass` this gate, or `fail` with a reason and a sentence."""

    kind: Literal["wait", "pass", "fail"]
    reason: str
    message: str


def tail(count: int, total: int, share: float) -> float:
    """P(X >= count) for X ~ Binomial(total, share)."""
    if count <= 0:
        return 1.0
    if share <= 0.0:
        return 0.0
    if share >= 1.0:
        return 1.0
    below = 0.0
    for k in range(count):
        log_p = math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        below += math.exp(log_p + k * math.log(share) + (total - k) * math.log1p(-share))
    return max(0.0, 1.0 - below)


def merged(trials: list[Trial], candidate: str, step: str) -> Trial | None:
    """The counts of all gateways that are at this step of this candidate; None where none is yet."""
    present = [trial for trial in trials if (trial.id, trial.step) == (candidate, step)]
    if not present:
        return None
    total = Trial(id=candidate, step=step)
    for trial in present:
        total.seconds = max(total.seconds, trial.seconds)
        total.workers = max(total.workers, trial.workers)
        total.robots += trial.robots
        total.candidate_robots += trial.candidate_robots
        total.rescued += trial.rescued
        _add(total.stable, trial.stable)
        _add(total.candidate, trial.candidate)
        _add(total.shadow.outcomes, trial.shadow.outcomes)
        shadow, other = total.shadow, trial.shadow
        shadow.compared += other.compared
        shadow.agreed += other.agreed
        shadow.reshaped += other.reshaped
        shadow.ratio_sum += other.ratio_sum
        shadow.ratio_max = max(shadow.ratio_max, other.ratio_max)
        shadow.distance_max = max(shadow.distance_max, other.distance_max)
    return total


def _add(total: Outcomes, part: Outcomes) -> None:
    total.on_time += part.on_time
    total.late += part.late
    total.refused += part.refused
    total.failed += part.failed


def miss_share(outcomes: Outcomes) -> float | None:
    """Share of observations without a chunk in time; None where there are too few to say."""
    return outcomes.missed / outcomes.total if outcomes.total >= ENOUGH_FOR_SHARE else None


def of_shadow(trial: Trial | None, rollout: Rollout, objective: float, baseline: float) -> Verdict:
    """The parity gate: mirrored observations agree, and the candidate answers them in time.

    Args:
        baseline: share of misses of the serving revision where it serves too few to say now.
    """
    needed = rollout.shadow.min_observations
    if trial is None:
        return Verdict("wait", "Shadow", "no gateway has begun the trial yet")
    shadow = trial.shadow
    if shadow.reshaped:
        return Verdict(
            "fail",
            "ParityFailed",
            f"{shadow.reshaped} of {shadow.compared} chunks have another shape than the serving revision's,"
            " or than rollout.parity.tolerances",
        )
    late = _deadline(shadow.outcomes, trial.stable, objective, baseline, "mirrored observations")
    if late is not None:
        return late
    disagreed = shadow.compared - shadow.agreed
    allowed = 1.0 - rollout.parity.min_agreement
    if tail(disagreed, shadow.compared, allowed) < ALPHA:
        return Verdict("fail", "ParityFailed", _disagreement(trial, rollout))
    if not shadow.compared and not shadow.outcomes.total:
        return Verdict("wait", "Shadow", f"waits for observations to mirror, none of {needed} so far: do robots ask?")
    if shadow.compared < needed:
        share = _rounded(shadow.compared, needed)
        return Verdict("wait", "Shadow", f"compares actions on mirrored observations, {share} of {needed} so far")
    if disagreed > allowed * shadow.compared:
        return Verdict("wait", "Shadow", f"{_disagreement(trial, rollout)}; more observations decide")
    return Verdict("pass", "ParityPassed", _agreement(trial))


def of_step(trial: Trial | None, rollout: Rollout, objective: float, baseline: float) -> Verdict:
    """One step of the traffic: what the candidate serves by itself is in time. `baseline` as in `of_shadow`."""
    if trial is None:
        return Verdict("wait", "Shifting", "no gateway has begun this step yet")
    late = _deadline(trial.candidate, trial.stable, objective, baseline, "observations")
    if late is not None:
        return late
    needed, seen = rollout.step_min_observations, trial.candidate.total
    if not seen:
        return Verdict("wait", "Shifting", f"none of {needed} observations so far: do robots ask?")
    if seen < needed:
        return Verdict("wait", "Shifting", f"{_rounded(seen, needed)} of {needed} observations so far")
    return Verdict("pass", "StepPassed", f"{trial.candidate.on_time} of {seen} observations in time")


def _deadline(outcomes: Outcomes, stable: Outcomes, objective: float, baseline: float, what: str) -> Verdict | None:
    # The serving revision's own share counts too: what a slow network costs both is not the candidate's fault.
    share = miss_share(stable)
    expected = max(1.0 - objective, baseline if share is None else share)
    if outcomes.failed and tail(outcomes.failed, outcomes.total, 1.0 - objective) < ALPHA:
        return Verdict("fail", "CandidateFails", f"its workers failed {outcomes.failed} of {outcomes.total} {what}")
    if tail(outcomes.missed, outcomes.total, expected) < ALPHA:
        return Verdict(
            "fail",
            "DeadlineMissed",
            f"{outcomes.missed} of {outcomes.total} {what} got no chunk in time"
            f" ({outcomes.late} late, {outcomes.refused} refused, {outcomes.failed} failed); the serving revision:"
            f" {stable.missed} of {stable.total}; slo.onTimeObjective is {objective:g}",
        )
    return None


def _disagreement(trial: Trial, rollout: Rollout) -> str:
    shadow = trial.shadow
    return (
        f"actions differ beyond the tolerance in {shadow.compared - shadow.agreed} of {shadow.compared} mirrored"
        f" observations, by {_times(shadow.ratio_max)} at most ({shadow.distance_max:.3g} in robot units);"
        f" rollout.parity.minAgreement is {rollout.parity.min_agreement:g}"
    )


def _agreement(trial: Trial) -> str:
    shadow = trial.shadow
    return (
        f"{shadow.agreed} of {shadow.compared} mirrored observations agree; largest difference"
        f" {shadow.distance_max:.3g}, {_times(shadow.ratio_max)} its tolerance"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times" if ratio < 1e6 else "more than any multiple of"


def _rounded(seen: int, needed: int) -> int:
    """Progress in tenths, so that a status that nothing decides on is not written with every observation."""
    tenth = max(1, needed // 10)
    return min(seen, needed) // tenth * tenth
