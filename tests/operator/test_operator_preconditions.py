"""What is deleted is what was looked at: an object of its name that somebody made anew since then stays."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_cluster import Cluster
from taktline_operator.kube import ApiError

Json = dict[str, Any]
NAMESPACE = "line-1"


async def cluster_of_two_pools(make: Any) -> Cluster:
    cluster = Cluster(make, make.body(pools=[{"name": name, "accelerator": "cpu"} for name in ("a", "b")]))
    await cluster.run(60)
    for number, found in enumerate(cluster.api.objects.values()):
        found["metadata"].setdefault("uid", f"uid-{number}")
        found["metadata"]["resourceVersion"] = str(number)
    return cluster


def remade_at_deletion(cluster: Cluster, key: tuple[str, str, str], **metadata: str) -> None:
    """Somebody replaces or changes an object in the instant before the operator's deletion of it arrives."""
    delete = cluster.api.delete

    async def late(kind: str, namespace: str, name: str, uid: str, version: str = "") -> None:
        if (kind, namespace, name) == key:
            cluster.api.objects[key]["metadata"] |= metadata
            metadata.clear()  # once
        await delete(kind, namespace, name, uid, version)

    cluster.api.delete = late


async def test_a_deployment_made_anew_by_somebody_is_not_deleted_in_place_of_ours(make: Any) -> None:
    cluster = await cluster_of_two_pools(make)
    theirs = ("Deployment", NAMESPACE, "reach-b")
    assert theirs in cluster.api.objects
    remade_at_deletion(cluster, theirs, uid="of somebody else")
    cluster.edit(pools=[{"name": "a", "accelerator": "cpu"}])
    with pytest.raises(ApiError, match="409"):
        await cluster.reconcile()
    assert theirs in cluster.api.objects
    await cluster.reconcile()  # it bears our labels and no other owner: looked at again, it is ours to take away
    assert theirs not in cluster.api.objects


async def test_a_worker_that_serves_by_the_time_of_its_removal_stays(make: Any) -> None:
    cluster = await cluster_of_two_pools(make)
    pod = cluster.pods()[0]
    key = ("Pod", NAMESPACE, pod["metadata"]["name"])
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    running = {"startedAt": "2026-03-01T07:00:00Z"}
    pod["status"]["containerStatuses"] = [{"name": "worker", "ready": False, "state": {"running": running}}]
    remade_at_deletion(cluster, key, resourceVersion="changed")
    with pytest.raises(ApiError, match="409"):
        await cluster.reconcile()
    assert key in cluster.api.objects
    pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    pod["status"]["containerStatuses"][0] |= {"ready": True, "started": True}
    await cluster.reconcile(2)
    assert key in cluster.api.objects
