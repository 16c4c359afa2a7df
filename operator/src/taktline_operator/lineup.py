"""Which Deployments a policy has at this moment of its rollout: whose revision each runs, and with how many workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from taktline_operator import naming, revisions, rollout, tracks
from taktline_operator.revisions import Stored
from taktline_operator.spec import PolicyDeployment, Pool

Json = dict[str, Any]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One Deployment.

    Attributes:
        policy: the PolicyDeployment with the revision that this Deployment runs.
        pool: its pool, with that revision's image.
        track: tells it apart from the pool's other Deployment; empty for the plain one.
    """

    policy: PolicyDeployment
    pool: Pool
    track: str
    replicas: int

    @property
    def name(self) -> str:
        """Name of the Deployment."""
        return naming.workload_name(self.policy.name, self.pool.name, self.track)

    def has(self, pod: Json) -> bool:
        """Whether a pod belongs to it."""
        pool = pod["metadata"].get("labels", {}).get(naming.LABEL_POOL)
        return bool(pool == self.pool.name and tracks.track_of(pod) == self.track)


class Lineup(msgspec.Struct, frozen=True, kw_only=True):
    """All Deployments.

    Attributes:
        stable: of the revision that serves.
        candidate: of the one on trial, or taking over, or leaving.
        finishing: the candidate's workers are the ones that serve.
        left_alone: Deployments that stay as they are: their revision is not stored any more, so they cannot be built.
        revisions: revisions to keep stored.
    """

    stable: tuple[Line, ...]
    candidate: tuple[Line, ...] = ()
    finishing: bool = False
    left_alone: frozenset[str] = frozenset()
    revisions: tuple[revisions.Revision, ...] = ()

    @property
    def serving(self) -> tuple[Line, ...]:
        """Those whose workers get observations."""
        return self.candidate if self.finishing else self.stable


def of(
    policy: PolicyDeployment,
    state: rollout.State,
    before: str,
    stored: Mapping[str, Stored],
    replicas: Mapping[str, int],
    children: Sequence[Json],
) -> Lineup:
    """The Deployments of a policy in a state of its rollout.

    Args:
        before: hash of the revision that served before this state; a rolling update goes through its Deployments.
        replicas: workers wanted by pool.
        children: live objects of the policy.
    """
    wanted = revisions.of_spec(policy.spec)
    plan = policy.spec.rollout
    progressive = plan.strategy == "Progressive"
    stable: list[Line] = []
    candidate: list[Line] = []
    left_alone: set[str] = set()
    for pool in policy.spec.pools:
        live = tracks.live_tracks(policy, pool.name, children)
        count = replicas[pool.name]
        if not progressive:
            stable.append(Line(policy=policy, pool=pool, track=tracks.in_place_track(live, before), replicas=count))
            continue
        serving = _built(policy, pool, wanted, stored, state.stable)
        track = tracks.serving_track(live, state.stable)
        if serving is None:
            left_alone |= {naming.workload_name(policy.name, pool.name, track)}
        else:
            count_now = rollout.stable_replicas(state, plan, count)
            stable.append(Line(policy=serving[0], pool=serving[1], track=track, replicas=count_now))
        trying = _built(policy, pool, wanted, stored, state.candidate) if state.candidate else None
        if trying is not None:
            others = {name: found for name, found in live.items() if name != track} | {track: state.stable}
            count_now = rollout.candidate_replicas(state, plan, count)
            name = tracks.candidate_track(others, state.candidate)
            candidate.append(Line(policy=trying[0], pool=trying[1], track=name, replicas=count_now))
    keep = {wanted.hash: wanted}
    keep |= {hash_: stored[hash_].revision for hash_ in (state.stable, state.candidate) if hash_ in stored}
    return Lineup(
        stable=tuple(stable),
        candidate=tuple(candidate),
        finishing=progressive and state.phase == "Finishing",
        left_alone=frozenset(left_alone),
        revisions=tuple(keep.values()),
    )


def _built(
    policy: PolicyDeployment, pool: Pool, wanted: revisions.Revision, stored: Mapping[str, Stored], hash_: str
) -> tuple[PolicyDeployment, Pool] | None:
    if hash_ == wanted.hash:
        return policy, pool
    if hash_ not in stored:
        return None
    found = revisions.with_revision(policy, stored[hash_].revision)
    return found, next(part for part in found.spec.pools if part.name == pool.name)
