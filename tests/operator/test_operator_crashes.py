"""The operator ends between any two API calls, and just after any one: every scenario ends in the same state."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from simulated_cluster import Cluster, comparable, differing_trial

Json = dict[str, Any]
PLAN = {
    "strategy": "Progressive",
    "steps": [50, 100],
    "stepSeconds": 10,
    "stepMinObservations": 20,
    "shadow": {"percent": 100, "minObservations": 50},
}
POOLS = [{"name": "cpu", "accelerator": "cpu", "minReplicas": 2}]
B = {"family": "pi05", "source": {"path": "/srv/policies/reach-b"}, "revision": "b"}
Scenario = Callable[[Cluster], Awaitable[None]]


async def good(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(160)


async def bad(cluster: Cluster) -> None:
    cluster.trial = differing_trial
    cluster.edit(model=B)
    await cluster.run(100)


async def aborted(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(30)
    cluster.say("abort")
    await cluster.run(60)


async def promoted(cluster: Cluster) -> None:
    cluster.edit(model=B)
    cluster.say("promote b")
    await cluster.run(100)


async def replaced(cluster: Cluster) -> None:
    cluster.edit(model=B)
    await cluster.run(30)
    cluster.edit(model=B | {"revision": "c"})
    await cluster.run(190)


async def rolling(cluster: Cluster) -> None:
    cluster.edit(model=B, rollout={"strategy": "RollingUpdate"})
    await cluster.run(60)


async def scaled(cluster: Cluster) -> None:
    cluster.edit(pools=[{"name": "cpu", "accelerator": "cpu", "minReplicas": 1}, {"name": "two", "accelerator": "cpu"}])
    await cluster.run(60)
    cluster.edit(pools=[{"name": "two", "accelerator": "cpu", "minReplicas": 3}])
    await cluster.run(60)


async def created(cluster: Cluster) -> None:
    """From the first call on: nothing of the policy exists yet."""
    await cluster.run(40)


async def resized(cluster: Cluster) -> None:
    """As `kubectl scale` does, up and down."""
    for total in (5, 1):
        cluster.edit(pools=[{"name": "cpu", "accelerator": "cpu", "maxReplicas": 6}], replicas=total)
        await cluster.run(40)


async def deleted(cluster: Cluster) -> None:
    """The owner goes first, then the garbage collector takes what it owned."""
    owner = cluster.live["metadata"]["uid"]
    del cluster.api.objects["PolicyDeployment", *cluster.key]
    await cluster.run(100)
    for key, found in list(cluster.api.objects.items()):
        owners = [reference["uid"] for reference in found["metadata"].get("ownerReferences", [])]
        if owner in owners or key[0] == "Pod":
            del cluster.api.objects[key]
    await cluster.run(100)


async def played(
    make: Any, scenario: Scenario, kills: tuple[int, int] | None = None, *, after: bool = False
) -> Cluster:
    """Play a scenario; `kills` = (first, every): the operator ends at these calls, before or just after them."""
    cluster = Cluster(make, make.body(rollout=PLAN, pools=POOLS))
    cluster.start_s = 10.0
    if scenario is not created:
        await cluster.run(30)
    cluster.door.calls = 0
    if kills is not None:
        cluster.door.kill_at, cluster.door.kill_every = kills
        cluster.door.after = after
    await scenario(cluster)
    cluster.door.kill_at = None
    await cluster.run(20)
    return cluster


@pytest.mark.parametrize(
    "scenario", [created, good, bad, aborted, promoted, replaced, rolling, scaled, resized, deleted]
)
async def test_a_killed_operator_ends_where_a_living_one_does(make: Any, scenario: Scenario) -> None:
    undisturbed = await played(make, scenario)
    expected = comparable(undisturbed)
    # It dies again and again, after so many calls; over all first calls every boundary between two is one of them.
    every = SHORT if scenario is deleted else EVERY
    for first in range(1, every + 1, min(STEP, every - 1)):
        for after in (False, True):
            cluster = await played(make, scenario, (first, every), after=after)
            assert cluster.restarts, (scenario.__name__, first)
            assert comparable(cluster) == expected, (scenario.__name__, first, after)
            assert (cluster.route() is None) == (scenario is deleted)
            # The simulated Deployments replace all workers of a rolling update at once.
            if scenario not in (created, rolling, deleted):
                assert all(route.targets for route in cluster.routes_seen[1:]), (scenario.__name__, first)


SHORT = 25  # of a deletion, after which there is little to call
EVERY = 41  # more than one reconciliation takes, or no operator would ever get through
STEP = int(os.environ.get("TAKTLINE_CRASH_STEP", "40"))  # 1 visits every boundary; that takes minutes
