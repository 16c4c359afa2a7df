"""Objects of other products on a real API that knows their kinds: nothing is pruned, nothing is written twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from taktline_local.kubectl import Kubectl, wait_until

from tests.cluster.operator import crd_subsets

Json = dict[str, Any]
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def foreign_kinds(kubectl: Kubectl, installed: None) -> Iterator[None]:
    """The kinds of LeaderWorkerSet, KubeRay, KEDA and Kueue; no controller of theirs."""
    names = []
    for crd in crd_subsets.ALL:
        kubectl.apply(crd)
        names.append(f"crd/{crd['metadata']['name']}")
    kubectl("wait", "--for=condition=established", *names, "--timeout=60s")
    yield
    kubectl("delete", *names, "--wait=true", "--timeout=60s")


def live(kubectl: Kubectl, kind: str, namespace: str, policy: str) -> Json | None:
    found = kubectl.list(kind, namespace, f"taktline.dev/policy={policy}")
    return found[0] if found else None


def has(wanted: Json, name: str) -> Any:
    return wanted["metadata"]["labels"].get(name)


@pytest.mark.usefixtures("foreign_kinds")
def test_their_kinds_take_what_the_operator_writes(
    kubectl: Kubectl, policies: Any, namespace: str, start_operator: Callable[..., Any]
) -> None:
    start_operator("with-foreign-kinds")
    pool = {"name": "line", "accelerator": "h100", "gpusPerNode": 8, "maxReplicas": 4}
    queue = {"name": "robots"}
    bodies = {
        "groups": {"model": PLANNER, "engine": {"parallel": {"search": 16}}, "pools": [pool], "queue": queue},
        "ray": {
            "model": PLANNER,
            "engine": {"runtime": "ray", "parallel": {"search": 4}},
            "pools": [pool],
            "queue": queue,
        },
        "keda": {
            "pools": [pool],
            "replicas": 1,
            "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://prometheus:9090"}},
        },
    }
    for name, parts in bodies.items():
        kubectl.apply(policies.body(name, **parts), namespace=namespace)
    made = {}
    for name, kind in (("groups", "leaderworkersets"), ("ray", "rayservices"), ("keda", "scaledobjects")):
        made[kind] = wait_until(
            lambda name=name, kind=kind: live(kubectl, kind, namespace, name), f"{name} has {kind}", timeout_s=LIMIT_S
        )
        condition = policies.wait(name, "Integrated", "True")
        assert condition["reason"] == "Present"
    lws = made["leaderworkersets"]["spec"]
    assert lws["leaderWorkerTemplate"]["size"] == 2
    assert lws["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert made["rayservices"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] == 4
    assert made["scaledobjects"]["spec"]["scaleTargetRef"]["name"] == "keda"
    assert has(made["leaderworkersets"], "kueue.x-k8s.io/queue-name") == "robots"
    assert has(made["rayservices"], "kueue.x-k8s.io/queue-name") == "robots"
    assert policies.wait("groups", "Queued", "False")

    # What Kueue would do is left alone, and what was pruned would be written for ever.
    name = made["rayservices"]["metadata"]["name"]
    suspend = '{"spec": {"rayClusterConfig": {"suspend": true}}}'
    kubectl("-n", namespace, "patch", "rayservice", name, "--type=merge", "-p", suspend)
    kubectl("-n", namespace, "annotate", "pd", "ray", "groups", "keda", "look=again")

    def versions() -> list[str]:
        found = [live(kubectl, kind, namespace, name) for name, kind in zip(bodies, made, strict=True)]
        return [one["metadata"]["resourceVersion"] for one in found if one]

    policies.wait("ray", "Queued", "True")
    before = versions()
    time.sleep(3.0)  # a write that repeats itself does so at every look, each of which wakes the next
    assert versions() == before
    assert live(kubectl, "rayservices", namespace, "ray")["spec"]["rayClusterConfig"]["suspend"] is True

    # The scale subresource, as KEDA's autoscaler uses it.
    kubectl("-n", namespace, "scale", "pd", "keda", "--replicas=3")
    wait_until(
        lambda: (policies.get("keda") or {}).get("status", {}).get("replicas") == 3, "three workers", timeout_s=LIMIT_S
    )
    kubectl("-n", namespace, "delete", "pd", *bodies, "--wait=true", "--timeout=60s")
