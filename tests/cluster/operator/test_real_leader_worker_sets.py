"""Meshes under LeaderWorkerSet's own controller and webhooks: groups become pods, serve, restart and roll as wholes.

Opt-in, as the controller is built from its module once: `make controllers-test`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from taktline_local.controllers import LeaderWorkerSets
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.programs import find_controllers

pytestmark = pytest.mark.usefixtures("running_operator", "node")

Json = dict[str, Any]
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
LIMIT_S = 180.0
SET = "leaderworkerset.sigs.k8s.io/name"
INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


@pytest.fixture(scope="module", autouse=True)
def controller(
    kubectl: Kubectl, installed: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LeaderWorkerSets]:
    """LeaderWorkerSet's controller, with the kind and the webhooks of its module; there before the operator runs."""
    if os.environ.get("TAKTLINE_CONTROLLERS") != "1":
        pytest.skip("controllers of other products are tested by `make controllers-test`")
    programs = find_controllers("lws")
    assert programs is not None, "run `make controllers`"
    with LeaderWorkerSets(programs, kubectl, tmp_path_factory.mktemp("lws")) as found:
        yield found


class Groups:
    """The groups of one policy."""

    def __init__(self, policies: Any, name: str) -> None:
        self.policies, self.name = policies, name

    def pods(self) -> list[Json]:
        """Its pods, those that are being deleted left out."""
        found = self.policies.kubectl.list("pods", self.policies.namespace, f"taktline.dev/policy={self.name}")
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def members(self) -> dict[tuple[str, str], Json]:
        """Pods by group and place in it."""
        found = {}
        for pod in self.pods():
            labels = pod["metadata"]["labels"]
            found[labels[SET], labels[INDEX]] = pod
        return found

    def names(self) -> list[str]:
        """Of its groups."""
        return sorted({name for name, _ in self.members()})

    def uids(self, group: str = "") -> set[str]:
        """Of the pods of one group, or of all."""
        return {pod["metadata"]["uid"] for (name, _), pod in self.members().items() if group in ("", name)}

    def serving(self, workers: int) -> bool:
        """Whether so many workers serve, and the routes are those of their first pods."""
        status = (self.policies.get(self.name) or {}).get("status", {})
        members = self.members()
        leaders = {f"{pod['status'].get('podIP')}:50051" for (_, index), pod in members.items() if index == "0"}
        routed = self.policies.routes().get(self.name, [])
        return (
            status.get("readyReplicas") == workers
            and len(members) == 2 * workers
            and set(routed) == leaders
            and len(routed) == workers
        )


def body(policies: Any, name: str, workers: int, **parts: Any) -> Json:
    made: Json = policies.body(name, model=PLANNER, engine={"buckets": [1], "parallel": {"search": 4}}, **parts)
    made["spec"]["pools"][0] |= {"gpusPerNode": 2, "minReplicas": workers, "maxReplicas": 2}
    made["spec"]["slo"] = {"controlBudgetMs": 4000}
    return made


def applied(policies: Any, name: str, workers: int = 2) -> Groups:
    policies.kubectl.apply(body(policies, name, workers))
    found = Groups(policies, name)
    wait_until(lambda: found.serving(workers), f"{name} serves: {policies.get(name)}", timeout_s=LIMIT_S)
    return found


def gone(policies: Any, name: str) -> None:
    """Deletes a policy, and waits for the end of everything that was made for it."""
    policies.kubectl("-n", policies.namespace, "delete", "pd", name, "--timeout=60s")
    wait_until(lambda: Groups(policies, name).pods() == [], "its pods are gone", timeout_s=LIMIT_S)
    wait_until(
        lambda: policies.kubectl.list("leaderworkersets,statefulsets", policies.namespace) == [],
        "its groups are gone",
        timeout_s=LIMIT_S,
    )


def test_groups_become_pods_that_find_each_other_and_are_served(policies: Any) -> None:
    groups = applied(policies, "lws-served")
    assert policies.wait("lws-served", "Integrated", "True")["reason"] == "Present"
    policies.wait("lws-served", "Progressing", "False", "Complete")
    for (_, index), pod in groups.members().items():
        variables = pod["spec"]["containers"][0]["env"]
        names = [variable["name"] for variable in variables]
        assert len(names) == len(set(names)), names
        # A variable is put into another only where it stands before it.
        assert names.index("LWS_LEADER_ADDRESS") < names.index("MASTER_ADDR")
        values = {variable["name"]: variable.get("value") for variable in variables}
        assert values["LWS_LEADER_ADDRESS"].startswith(f"{pod['metadata']['labels'][SET]}-")
        assert values["NNODES"] == "2"
        assert values["WORLD_SIZE"] == "4"
        assert index in ("0", "1")
    status = policies.get("lws-served")["status"]
    assert (status["replicas"], status["pools"][0]["podsPerWorker"]) == (2, 2)
    selected = policies.kubectl.list("pods", policies.namespace, status["selector"])
    assert {pod["metadata"]["labels"][INDEX] for pod in selected} == {"0"}
    gone(policies, "lws-served")


def test_nothing_is_written_while_groups_rest(policies: Any, control_plane: Any) -> None:
    applied(policies, "lws-rest")
    policies.wait("lws-rest", "Progressing", "False", "Complete")

    def versions() -> dict[str, str]:
        found = policies.kubectl.list(
            "pd,leaderworkersets,services,configmaps,poddisruptionbudgets", policies.namespace
        )
        return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in found}

    def unchanged() -> bool:
        before = versions()
        time.sleep(3.0)
        return versions() == before

    wait_until(unchanged, "nothing is written any more", timeout_s=LIMIT_S)
    gone(policies, "lws-rest")


def test_a_pod_that_fails_takes_its_group_down_and_no_other(policies: Any, node: Any) -> None:
    groups = applied(policies, "lws-fails")
    fails, stays = groups.names()
    first, second = groups.uids(fails), groups.uids(stays)
    victim = groups.members()[fails, "1"]["metadata"]["uid"]

    def behave(pod: Json) -> Json:
        status: Json = node.serving(pod)
        if pod["metadata"]["uid"] == victim:
            status["containerStatuses"][0]["restartCount"] = 1
        return status

    node.behave = behave
    wait_until(lambda: groups.uids(fails).isdisjoint(first), "no pod of the group is left", timeout_s=LIMIT_S)
    wait_until(lambda: groups.serving(2), "both groups serve", timeout_s=LIMIT_S)
    assert groups.names() == sorted([fails, stays])
    assert groups.uids(stays) == second
    gone(policies, "lws-fails")


def test_a_group_that_is_put_together_is_not_served_before_it_is_whole(policies: Any, node: Any) -> None:
    groups = applied(policies, "lws-whole")
    begins, stays = groups.names()
    first = groups.uids(begins)
    known = {pod["metadata"]["uid"] for pod in groups.pods()}

    def behave(pod: Json) -> Json:
        late = pod["metadata"]["labels"].get(INDEX) == "1" and pod["metadata"]["uid"] not in known
        status: Json = node.starting(pod) if late else node.serving(pod)
        return status

    node.behave = behave
    leader = groups.members()[begins, "0"]["metadata"]["name"]
    policies.kubectl("-n", policies.namespace, "delete", "pod", leader, "--wait=false")
    wait_until(
        lambda: (now := groups.uids(begins)).isdisjoint(first) and len(now) == 2,
        "there is a new group",
        timeout_s=LIMIT_S,
    )
    wait_until(
        lambda: (
            policies.get("lws-whole")["status"]["readyReplicas"] == 1
            and policies.routes()["lws-whole"] == [f"{groups.members()[stays, '0']['status']['podIP']}:50051"]
        ),
        "only the other group is served",
        timeout_s=LIMIT_S,
    )
    node.behave = node.serving
    wait_until(lambda: groups.serving(2), "both groups serve", timeout_s=LIMIT_S)
    gone(policies, "lws-whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_another_revision_rolls_group_by_group_and_never_without_one(policies: Any, workers: int) -> None:
    """One has room for a second beside it; of two, which fill the node, one makes room for the first new one."""
    name = f"lws-rolls-{workers}"
    groups = applied(policies, name, workers)
    before = groups.uids()
    changed = body(policies, name, workers)
    changed["spec"]["model"] = PLANNER | {"revision": "b"}
    policies.kubectl.apply(changed)

    def rolled() -> bool:
        assert policies.routes()[name], "robots have nobody"
        status = policies.get(name)["status"]
        return status["currentRevision"] == "b" and groups.uids().isdisjoint(before) and groups.serving(workers)

    wait_until(rolled, "the second revision serves", timeout_s=LIMIT_S)
    policies.wait(name, "Progressing", "False", "Complete")
    gone(policies, name)


def test_fewer_workers_are_fewer_groups(policies: Any) -> None:
    groups = applied(policies, "lws-fewer")
    before = {name: groups.uids(name) for name in groups.names()}
    policies.kubectl.apply(body(policies, "lws-fewer", 1))
    wait_until(lambda: groups.serving(1), "one group serves", timeout_s=LIMIT_S)
    (stays,) = groups.names()
    assert groups.uids(stays) == before[stays]
    gone(policies, "lws-fewer")
