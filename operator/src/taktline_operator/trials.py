"""A rollout: its stored state and what is observed, put together to Deployments, pods, a route, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from taktline_protocol.deployment import Candidate
from taktline_protocol.measurements import Trial as Measured

from taktline_operator import faults, lineup, naming, revisions, rollout, routing, tracks
from taktline_operator.faults import Fault
from taktline_operator.lineup import Lineup
from taktline_operator.rollout import State
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

SURE_RESTARTS = 2  # a worker that has ended so often will end again
HISTORY = 8  # revisions kept besides those in use
_HOPELESS = ("InvalidImageName",)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout at this moment.

    Attributes:
        before: its state as stored; everything done now follows from it.
        after: its state as it is to be stored.
        lines: its Deployments.
        serving_pods: pods that may get observations, ready or not.
        candidate_pods: pods of the candidate, ready or not, while it is on trial.
        stable_name: name of the revision that serves; the candidate's is `candidate_name`.
        numbers: history number by revision hash, of stored and of new revisions.
        obsolete: names of ControllerRevisions beyond the history.
    """

    policy: PolicyDeployment
    before: State
    after: State
    lines: Lineup
    serving_pods: tuple[Json, ...]
    candidate_pods: tuple[Json, ...]
    stable_name: str
    candidate_name: str
    numbers: Mapping[str, int]
    obsolete: frozenset[str]

    @property
    def progressive(self) -> bool:
        """Whether changes go through a trial."""
        return self.policy.spec.rollout.strategy == "Progressive"

    @property
    def again_s(self) -> float | None:
        """When to look again though nothing happens in the cluster; None for never."""
        if not self.progressive:
            return None
        moved = (self.before.phase, self.before.step, self.before.weight) != (
            self.after.phase,
            self.after.step,
            self.after.weight,
        )
        if moved:
            return 0.0
        return None if self.after.phase in ("Complete", "RolledBack") else rollout.LOOK_AGAIN_S

    @property
    def serving_name(self) -> str:
        """Name of the revision that gets observations."""
        return self.candidate_name if self.lines.finishing else self.stable_name

    def candidate_route(self) -> Candidate | None:
        """What the gateways are told of the candidate; None outside a trial."""
        state, plan = self.before, self.policy.spec.rollout
        if not self.progressive or state.phase not in rollout.ROUTED:
            return None
        return Candidate(
            id=state.candidate,
            step=state.trial_step,
            revision=self.candidate_name,
            targets=routing.targets(self.candidate_pods),
            weight=float(state.weight),
            mirror=float(plan.shadow.percent) if state.phase == "Shadow" else 0.0,
            tolerance=plan.parity.tolerance,
            tolerances=plan.parity.tolerances,
            rows=plan.parity.rows,
            hold_s=float(plan.session_hold_seconds),
        )


def of(
    policy: PolicyDeployment,
    live: Json,
    children: Sequence[Json],
    pods: Sequence[Json],
    measured: Sequence[Measured] | None,
    replicas: Mapping[str, int],
    now: str,
) -> Trial:
    """The rollout of a policy.

    Args:
        measured: what each gateway that answered says of it; None where none did.
        replicas: workers wanted by pool.
    """
    stored = revisions.read(children)
    wanted = revisions.of_spec(policy.spec)
    before = _stored_state(policy, live, children)
    progressive = policy.spec.rollout.strategy == "Progressive"
    if not progressive:
        after = State(stable=wanted.hash, handled=before.handled)
        acting = after
    else:
        acting = before if before.stable else rollout.State(stable=wanted.hash)
        after = acting
    lines = lineup.of(policy, acting, before.stable, stored, replicas, children)
    trying = [pod for pod in pods if any(line.has(pod) for line in lines.candidate)]
    others = _serving(policy, acting, children, pods, lines) if progressive else list(pods)
    serving = trying if lines.finishing else [pod for pod in others if pod not in trying]
    names = {hash_: revisions.with_revision(policy, found.revision).spec.revision() for hash_, found in stored.items()}
    names[wanted.hash] = policy.spec.revision()
    if progressive and before.stable:
        after = rollout.advance(
            before,
            policy.spec.rollout,
            policy.spec.slo.on_time_objective,
            rollout.Facts(
                wanted=wanted.hash,
                revision=names.get(before.candidate or before.rejected, ""),
                replicas=replicas,
                stable_ready=sum(routing.is_ready(pod) for pod in others if pod not in trying),
                candidate_ready=_ready_by_pool(trying),
                fault=_sure_fault(trying),
                trials=None if measured is None else tuple(measured),
                command=live["metadata"].get("annotations", {}).get(naming.ANNOTATION_ROLLOUT, ""),
                now=now,
            ),
        )
    newest = max((found.number for found in stored.values()), default=0)
    numbers = {hash_: found.number for hash_, found in stored.items()}
    numbers.setdefault(wanted.hash, newest + 1)
    return Trial(
        policy=policy,
        before=acting,
        after=after,
        lines=lines,
        serving_pods=tuple(serving),
        candidate_pods=tuple(trying),
        stable_name=names.get(acting.stable, ""),
        candidate_name=names.get(acting.candidate or acting.rejected, ""),
        numbers=numbers,
        obsolete=_obsolete(policy, stored, {wanted.hash, acting.stable, acting.candidate, acting.rejected}),
    )


def _stored_state(policy: PolicyDeployment, live: Json, children: Sequence[Json]) -> State:
    try:
        state = msgspec.convert(live.get("status", {}).get("rollout", {}), State)
    except msgspec.ValidationError:
        state = State()  # somebody else's status: begin from what runs
    if state.stable:
        return state
    # The status is lost or older than rollouts: what the Deployments say they run is what serves. Of two, the one that
    # the spec does not ask for: what was on trial is tried again.
    wanted = revisions.of_spec(policy.spec).hash
    tracked = [tracks.live_tracks(policy, pool.name, children) for pool in policy.spec.pools]
    running = sorted(
        {hash_ for found in tracked for hash_ in found.values() if hash_}, key=lambda hash_: hash_ == wanted
    )
    return State(stable=running[0]) if running else state


def _serving(
    policy: PolicyDeployment, state: State, children: Sequence[Json], pods: Sequence[Json], lines: Lineup
) -> list[Json]:
    """Pods of the revision that serves: never one of a revision that was taken back or has not been tried."""
    live: dict[str, dict[str, str]] = {}
    found = []
    for pod in pods:
        pool = pod["metadata"].get("labels", {}).get(naming.LABEL_POOL, "")
        if pool not in live:
            live[pool] = tracks.live_tracks(policy, pool, children)
        running = live[pool].get(tracks.track_of(pod))
        ours = any(line.has(pod) for line in lines.stable)
        if ours or running in (state.stable, ""):
            found.append(pod)
    return found


def _ready_by_pool(pods: Sequence[Json]) -> dict[str, int]:
    ready: dict[str, int] = {}
    for pod in filter(routing.is_ready, pods):
        pool = pod["metadata"]["labels"][naming.LABEL_POOL]
        ready[pool] = ready.get(pool, 0) + 1
    return ready


def _sure_fault(pods: Sequence[Json]) -> Fault | None:
    """Why the candidate will not come up, where waiting would not help."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        fault = faults.of_pod(pod)
        if fault is None:
            continue
        statuses = pod.get("status", {}).get("containerStatuses", [])
        restarts = max((int(found.get("restartCount", 0)) for found in statuses), default=0)
        if fault.reason in _HOPELESS or (fault.reason == "CrashLoopBackOff" and restarts >= SURE_RESTARTS):
            return fault
    return None


def _obsolete(policy: PolicyDeployment, stored: Mapping[str, revisions.Stored], used: set[str]) -> frozenset[str]:
    spare = [hash_ for hash_ in stored if hash_ not in used]
    return frozenset(f"{policy.name}-{hash_}" for hash_ in spare[: max(0, len(spare) - HISTORY)])
