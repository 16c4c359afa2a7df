"""Workers under Kueue's own controllers and webhooks: they wait for quota, groups come whole, and rollouts go through.

Opt-in, as Kueue is built from its module once: `make controllers-test`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from taktline_local.controllers import KubeRay, LeaderWorkerSets
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.kueue import Kueue
from taktline_local.programs import find_controllers

pytestmark = [pytest.mark.usefixtures("running_operator", "node"), pytest.mark.timeout(900)]

Json = dict[str, Any]
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
LIMIT_S = 180.0
API = "kueue.x-k8s.io/v1beta2"
GATE = "kueue.x-k8s.io/admission"
GPU = "nvidia.com/gpu"


def programs(name: str) -> Any:
    """Where a controller is; skips where these tests are not asked for."""
    if os.environ.get("TAKTLINE_CONTROLLERS") != "1":
        pytest.skip("controllers of other products are tested by `make controllers-test`")
    found = find_controllers(name)
    assert found is not None, "run `make controllers`"
    return found


@pytest.fixture(scope="module", autouse=True)
def controller(kubectl: Kubectl, installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kueue]:
    """Kueue with its kinds, webhooks and conversions; there before the operator runs."""
    with Kueue(programs("kueue"), kubectl, tmp_path_factory.mktemp("kueue")) as found:
        yield found


class Queue:
    """A queue of one namespace whose quota of GPUs the test sets; of all else there is plenty."""

    def __init__(self, policies: Any) -> None:
        self.policies, self.name = policies, f"cluster-{policies.namespace}"
        flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": self.name}}
        policies.kubectl.apply(flavor)
        self.gpus(0)
        self.local("robots")

    def gpus(self, count: int) -> None:
        """Set the quota."""
        quota = {"cpu": 1000, "memory": "1000Gi", "ephemeral-storage": "1000Gi", GPU: count}
        resources = [{"name": name, "nominalQuota": value} for name, value in quota.items()]
        flavors = [{"name": self.name, "resources": resources}]
        spec = {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.policies.namespace}},
            "resourceGroups": [{"coveredResources": list(quota), "flavors": flavors}],
        }
        about = {"name": self.name}
        self.policies.kubectl.apply({"apiVersion": API, "kind": "ClusterQueue", "metadata": about, "spec": spec})

    def local(self, name: str) -> None:
        """A queue of the namespace that draws on this quota."""
        about = {"namespace": self.policies.namespace, "name": name}
        body = {"apiVersion": API, "kind": "LocalQueue", "metadata": about, "spec": {"clusterQueue": self.name}}
        self.policies.kubectl.apply(body)

    def workloads(self) -> list[Json]:
        """What Kueue counts as one."""
        found: list[Json] = self.policies.kubectl.list("workloads.kueue.x-k8s.io", self.policies.namespace)
        return found


@pytest.fixture
def queue(policies: Any) -> Iterator[Queue]:
    """A queue without quota."""
    found = Queue(policies)
    yield found
    policies.kubectl("-n", policies.namespace, "delete", "pd", "--all", "--timeout=60s")
    wait_until(lambda: pods(policies) == [], "no worker is left", timeout_s=LIMIT_S)
    policies.kubectl("-n", policies.namespace, "delete", "localqueues.kueue.x-k8s.io", "--all", "--timeout=60s")
    policies.kubectl("delete", f"clusterqueue/{found.name}", f"resourceflavor/{found.name}", "--timeout=60s")


def pods(policies: Any) -> list[Json]:
    """All workers' pods."""
    found: list[Json] = policies.kubectl.list("pods", policies.namespace, "app.kubernetes.io/name=taktline-worker")
    return found


def held(policies: Any) -> list[bool]:
    """Of each live pod, whether Kueue holds it back."""
    live = [pod for pod in pods(policies) if not pod["metadata"].get("deletionTimestamp")]
    return [any(gate["name"] == GATE for gate in pod["spec"].get("schedulingGates", [])) for pod in live]


def is_ready(pod: Json) -> bool:
    """Whether a pod is ready and stays."""
    told = pod["status"].get("conditions", [])
    return not pod["metadata"].get("deletionTimestamp") and any(
        one["type"] == "Ready" and one["status"] == "True" for one in told
    )


def ready(policies: Any, name: str) -> int:
    """Workers that serve."""
    return int((policies.get(name) or {}).get("status", {}).get("readyReplicas", 0))


def plain(policies: Any, name: str, workers: int, revision: str = "a", queue: str | None = "robots") -> Json:
    """A policy whose workers are one pod with one GPU each."""
    made: Json = policies.body(name, **({"queue": {"name": queue}} if queue else {}))
    made["spec"]["model"] |= {"revision": revision}
    made["spec"]["pools"][0] |= {"minReplicas": workers, "maxReplicas": 4}
    return made


def grouped(policies: Any, name: str, workers: int, revision: str = "a") -> Json:
    """A policy whose workers are groups of two pods with two GPUs each."""
    made: Json = policies.body(
        name,
        model=PLANNER | {"revision": revision},
        engine={"buckets": [1], "parallel": {"search": 4}},
        queue={"name": "robots"},
    )
    made["spec"]["pools"][0] |= {"gpusPerNode": 2, "minReplicas": workers, "maxReplicas": 2}
    made["spec"]["slo"] = {"controlBudgetMs": 4000}
    return made


def test_workers_wait_for_quota_and_are_no_fault(policies: Any, queue: Queue) -> None:
    policies.kubectl.apply(plain(policies, "waits", 2))
    said = policies.wait("waits", "Queued", "True", "WaitingForQuota")
    wait_until(lambda: held(policies) == [True, True], "both are held back", timeout_s=LIMIT_S)
    said = wait_until(
        lambda: (found := policies.wait("waits", "Queued", "True"))["message"].startswith("2 of 2 pods") and found,
        "both are counted",
        timeout_s=LIMIT_S,
    )
    assert "queue robots" in said["message"]
    assert policies.wait("waits", "Degraded", "False")
    queue.gpus(1)
    wait_until(lambda: ready(policies, "waits") == 1, "one serves", timeout_s=LIMIT_S)
    assert sorted(held(policies)) == [False, True]
    queue.gpus(2)
    wait_until(lambda: ready(policies, "waits") == 2, "both serve", timeout_s=LIMIT_S)
    assert policies.wait("waits", "Queued", "False", "Admitted")
    assert policies.wait("waits", "Progressing", "False", "Complete")
    assert len(policies.routes()["waits"]) == 2


def admitted_whole(policies: Any, queue: Queue, name: str) -> None:
    """A group without room for all of its pods has none; with room it has all."""
    queue.gpus(3)  # one short
    policies.kubectl.apply(grouped(policies, name, 1))

    def waits() -> bool:
        now = held(policies)
        assert all(now), "a pod of a group may run before there is room for all"
        return len(now) == 2 and len(queue.workloads()) == 1

    wait_until(waits, "the group waits", timeout_s=LIMIT_S)
    wait_until(
        lambda: any(
            one["type"] == "QuotaReserved" for one in queue.workloads()[0].get("status", {}).get("conditions", [])
        ),
        "Kueue has decided",
        timeout_s=LIMIT_S,
    )
    assert waits()
    assert policies.wait(name, "Queued", "True", "WaitingForQuota")["message"].startswith("2 of 2 pods")
    queue.gpus(4)
    wait_until(lambda: ready(policies, name) == 1, f"the group serves: {policies.get(name)}", timeout_s=LIMIT_S)
    assert held(policies) == [False, False]
    (workload,) = queue.workloads()
    assert [part["count"] for part in workload["spec"]["podSets"]] == [2]
    assert policies.wait(name, "Queued", "False", "Admitted")


def test_a_group_is_admitted_whole_or_not_at_all(policies: Any, queue: Queue) -> None:
    admitted_whole(policies, queue, "whole")
    kinds = {child["kind"] for child in policies.kubectl.list("statefulsets", policies.namespace)}
    assert kinds == {"StatefulSet"}


def test_a_leader_worker_set_is_admitted_whole_or_not_at_all(
    policies: Any, queue: Queue, kubectl: Kubectl, tmp_path: Any
) -> None:
    with LeaderWorkerSets(programs("lws"), kubectl, tmp_path / "lws"):
        policies.kubectl.apply(grouped(policies, "looks", 1))

        def is_used() -> bool:  # the operator looks for further kinds once a minute
            return bool(policies.kubectl.list("leaderworkersets", policies.namespace))

        def anew() -> bool:
            policies.kubectl("-n", policies.namespace, "delete", "pd", "looks", "--ignore-not-found", "--timeout=60s")
            policies.kubectl.apply(grouped(policies, "looks", 1))
            wait_until(
                lambda: policies.kubectl.list("leaderworkersets,statefulsets", policies.namespace),
                "a group",
                timeout_s=LIMIT_S,
            )
            return is_used()

        wait_until(anew, "the operator makes LeaderWorkerSets", timeout_s=LIMIT_S)
        policies.kubectl("-n", policies.namespace, "delete", "pd", "looks", "--timeout=60s")
        wait_until(lambda: pods(policies) == [] and queue.workloads() == [], "it is gone", timeout_s=LIMIT_S)
        admitted_whole(policies, queue, "whole-lws")
        policies.kubectl("-n", policies.namespace, "delete", "pd", "whole-lws", "--timeout=60s")
        wait_until(lambda: pods(policies) == [], "no worker is left", timeout_s=LIMIT_S)
        wait_until(lambda: not is_used(), "no group is left", timeout_s=LIMIT_S)


@pytest.mark.parametrize("make", [plain, grouped], ids=["pods", "groups"])
def test_another_revision_comes_through_where_the_quota_is_used_up(policies: Any, queue: Queue, make: Any) -> None:
    """A worker beside the old ones has no quota: an old one makes room, as it does where no accelerator is free."""
    queue.gpus(2 if make is plain else 8)
    policies.kubectl.apply(make(policies, "rolls", 2))
    wait_until(lambda: ready(policies, "rolls") == 2, "both serve", timeout_s=LIMIT_S)
    before = {pod["metadata"]["uid"] for pod in pods(policies)}
    policies.kubectl.apply(make(policies, "rolls", 2, "b"))

    def rolled() -> bool:
        assert policies.routes()["rolls"], "robots have nobody"
        now = {pod["metadata"]["uid"] for pod in pods(policies)}
        status = policies.get("rolls")["status"]
        return status.get("currentRevision") == "b" and now.isdisjoint(before) and ready(policies, "rolls") == 2

    wait_until(rolled, f"the second revision serves: {policies.get('rolls')}", timeout_s=LIMIT_S)
    assert policies.wait("rolls", "Progressing", "False", "Complete")


@pytest.mark.parametrize(("make", "gpus"), [(plain, 2), (grouped, 8)], ids=["pods", "groups"])
def test_another_revision_comes_through_where_the_quota_admits_fewer_than_are_wanted(
    policies: Any, queue: Queue, make: Any, gpus: int
) -> None:
    """Two of three serve: no Deployment controller takes one that serves while fewer than wanted do."""
    queue.gpus(gpus)
    made = make(policies, "short", 3)
    made["spec"]["pools"][0]["maxReplicas"] = 3
    policies.kubectl.apply(made)
    wait_until(lambda: ready(policies, "short") == 2, "two serve", timeout_s=LIMIT_S)
    made["spec"]["model"]["revision"] = "b"
    policies.kubectl.apply(made)

    def rolled() -> bool:
        assert policies.routes()["short"], "robots have nobody"
        serving = [pod for pod in pods(policies) if pod["status"].get("podIP") and is_ready(pod)]
        revisions = {pod["metadata"]["annotations"]["taktline.dev/revision"] for pod in serving}
        return revisions == {"b"} and ready(policies, "short") == 2

    wait_until(rolled, f"the second revision serves: {policies.get('short')}", timeout_s=4 * LIMIT_S)
    assert policies.wait("short", "Degraded", "False")


def test_a_queue_that_admits_nobody_costs_no_worker_and_says_so(policies: Any, queue: Queue) -> None:
    queue.gpus(2)
    policies.kubectl.apply(plain(policies, "on-hold", 2))
    wait_until(lambda: ready(policies, "on-hold") == 2, "both serve", timeout_s=LIMIT_S)
    before = {pod["metadata"]["uid"] for pod in pods(policies)}
    hold = {"spec": {"stopPolicy": "Hold"}}
    queue.gpus(8)
    policies.kubectl(
        "-n", policies.namespace, "patch", "localqueue", "robots", "--type=merge", f"--patch={json.dumps(hold)}"
    )

    def is_on_hold() -> bool:
        (found,) = policies.kubectl.list("localqueues.kueue.x-k8s.io", policies.namespace)
        told = found.get("status", {}).get("conditions", [])
        return any(one["type"] == "Active" and one["status"] == "False" for one in told)

    wait_until(is_on_hold, "Kueue has heard of it", timeout_s=LIMIT_S)  # else it admits the new pod first
    policies.kubectl.apply(plain(policies, "on-hold", 2, "b"))
    said = policies.wait("on-hold", "Queued", "True", "QueueStopped")
    assert "queue robots, which admits nobody now" in said["message"]
    wait_until(lambda: [pod for pod in pods(policies) if pod["metadata"]["uid"] not in before], "a new pod")

    def long_enough() -> bool:
        assert before <= {pod["metadata"]["uid"] for pod in pods(policies)}, "a worker left for nothing"
        assert ready(policies, "on-hold") == 2
        return bool(time.monotonic() > until)

    until = time.monotonic() + 45.0  # more than twice as long as one waits before another makes room
    wait_until(long_enough, "nobody leaves", timeout_s=LIMIT_S)
    resume = {"spec": {"stopPolicy": "None"}}
    policies.kubectl(
        "-n", policies.namespace, "patch", "localqueue", "robots", "--type=merge", f"--patch={json.dumps(resume)}"
    )
    wait_until(
        lambda: (policies.get("on-hold") or {})["status"].get("currentRevision") == "b", "it goes on", timeout_s=LIMIT_S
    )


def test_a_queue_that_is_not_there_is_named(policies: Any, queue: Queue) -> None:
    policies.kubectl.apply(plain(policies, "nowhere", 1, queue="no-such-queue"))
    said = policies.wait("nowhere", "Queued", "True", "QueueAbsent")
    assert f"namespace {policies.namespace} has no LocalQueue no-such-queue" in said["message"]
    queue.gpus(1)
    queue.local("no-such-queue")
    wait_until(lambda: ready(policies, "nowhere") == 1, "it serves", timeout_s=LIMIT_S)
    assert policies.wait("nowhere", "Queued", "False", "Admitted")


def test_a_single_worker_stays_where_its_successor_has_no_quota(policies: Any, queue: Queue) -> None:
    queue.gpus(1)
    policies.kubectl.apply(plain(policies, "single", 1))
    wait_until(lambda: ready(policies, "single") == 1, "it serves", timeout_s=LIMIT_S)
    policies.kubectl.apply(plain(policies, "single", 1, "b"))

    def says_so() -> bool:
        assert ready(policies, "single") == 1
        found = policies.wait("single", "Progressing", "True")
        return "no room for a second worker" in found["message"]

    wait_until(says_so, "the status says what is missing", timeout_s=LIMIT_S)
    assert policies.routes()["single"]
    queue.gpus(2)
    wait_until(
        lambda: policies.get("single")["status"].get("currentRevision") == "b" and ready(policies, "single") == 1,
        "the second revision serves",
        timeout_s=LIMIT_S,
    )


@pytest.mark.parametrize("make", [plain, grouped], ids=["pods", "groups"])
@pytest.mark.parametrize("wanted", ["others", None], ids=["another queue", "no queue"])
def test_what_serves_goes_on_in_its_queue(policies: Any, queue: Queue, make: Any, wanted: str | None) -> None:
    """Kueue refuses to move what serves; nothing else of the policy may wait for that."""
    queue.gpus(8)
    queue.local("others")
    policies.kubectl.apply(make(policies, "moves", 1))
    wait_until(lambda: ready(policies, "moves") == 1, "it serves", timeout_s=LIMIT_S)
    changed = make(policies, "moves", 1, "b")
    if wanted:
        changed["spec"]["queue"] = {"name": wanted}
    else:
        changed["spec"].pop("queue")
    policies.kubectl.apply(changed)

    def rolled() -> bool:
        assert policies.routes()["moves"], "robots have nobody"
        status = policies.get("moves")["status"]
        return status.get("currentRevision") == "b" and ready(policies, "moves") == 1

    wait_until(rolled, f"the second revision serves: {policies.get('moves')}", timeout_s=LIMIT_S)
    assert policies.wait("moves", "Degraded", "False")
    kinds = "deployments,statefulsets"
    (made,) = policies.kubectl.list(kinds, policies.namespace, "taktline.dev/policy=moves")
    # A Deployment is one object for all revisions and stays; another revision's group is another object.
    stays = make is plain
    assert made["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == ("robots" if stays else wanted)
    if stays:
        assert "workers serve in queue robots" in policies.wait("moves", "Queued", "False", "QueueKept")["message"]
    elif wanted:
        assert policies.wait("moves", "Queued", "False", "Admitted")


def test_a_ray_cluster_is_admitted_whole_or_not_at_all(
    policies: Any, queue: Queue, kubectl: Kubectl, tmp_path: Any
) -> None:
    engine = {"runtime": "ray", "buckets": [1], "parallel": {"search": 4}}
    made = policies.body("on-ray", model=PLANNER, engine=engine, queue={"name": "robots"})
    made["spec"]["slo"] = {"controlBudgetMs": 4000}
    with KubeRay(programs("kuberay"), kubectl, tmp_path / "kuberay"):
        queue.gpus(3)  # one short of its ranks
        policies.kubectl.apply(
            made
        )  # the operator looks for further kinds once a minute, and then makes its RayService

        def waits() -> bool:
            now = held(policies)
            assert all(now), "a pod of the cluster may run before there is room for all"
            return len(now) == 5 and len(queue.workloads()) == 1

        wait_until(waits, "head and ranks wait", timeout_s=LIMIT_S)
        assert waits()
        said = wait_until(
            lambda: (found := policies.wait("on-ray", "Queued", "True"))["message"].startswith("5 of 5") and found,
            "all are counted",
            timeout_s=LIMIT_S,
        )
        assert said["reason"] == "WaitingForQuota"
        assert policies.wait("on-ray", "Degraded", "False")
        queue.gpus(4)
        wait_until(lambda: held(policies) == [False] * 5, "Kueue lets them go", timeout_s=LIMIT_S)
        wait_until(
            lambda: [pod["status"].get("phase") for pod in pods(policies)] == ["Running"] * 5,
            "they run",
            timeout_s=LIMIT_S,
        )
        policies.wait("on-ray", "Queued", "False", "Admitted")
        policies.kubectl("-n", policies.namespace, "delete", "pd", "on-ray", "--timeout=60s")
        wait_until(lambda: pods(policies) == [], "no worker is left", timeout_s=LIMIT_S)
        wait_until(
            lambda: policies.kubectl.list("rayservices", policies.namespace) == [], "no Ray cluster", timeout_s=LIMIT_S
        )
