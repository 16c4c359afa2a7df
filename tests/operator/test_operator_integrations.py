"""Other products: KubeRay, Kueue and KEDA where a policy asks for them, and what is said where they are absent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from taktline_operator import discovery, group_pods, groups, keda, kueue, naming, ray_services
from taktline_operator.kube import ApiError
from taktline_operator.plan import ref_of
from taktline_operator.reconcile import ROUTES, Controller

Json = dict[str, Any]
ALL = frozenset({groups.LWS_KIND, ray_services.KIND, keda.KIND, kueue.KIND})
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}


def observed(make: Any, children: Any = (), pods: Any = (), kinds: frozenset[str] | None = ALL) -> Any:
    body = make.body()
    children = {ref_of(child): child for child in children}
    return make.Observed(live=body, now=make.now, children=children, pods=pods, kinds=kinds)


def condition(plan: Any, kind: str) -> Json | None:
    return next((found for found in plan.status["conditions"] if found["type"] == kind), None)


def on_ray(make: Any, **parts: Any) -> Any:
    return make.policy(
        **{
            "model": PLANNER,
            "engine": {"runtime": "ray", "parallel": {"search": 4}},
            "pools": [{"name": "line", "accelerator": "h100", "image": "registry.example/worker-ray:1"}],
            **parts,
        }
    )


def ray_pods(service: Json, cluster: str) -> list[Json]:
    """The pods that KubeRay makes of a RayService, all ready as KubeRay sees it."""
    config = service["spec"]["rayClusterConfig"]
    templates = [("head", config["headGroupSpec"]["template"])]
    templates += [("worker", config["workerGroupSpecs"][0]["template"])] * config["workerGroupSpecs"][0]["replicas"]
    made = []
    for index, (node, template) in enumerate(templates):
        labels = template["metadata"]["labels"] | {"ray.io/node-type": node, "ray.io/cluster": cluster}
        metadata = template["metadata"] | {"name": f"{cluster}-{node}-{index}", "namespace": "line-1", "labels": labels}
        ready = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": f"10.2.0.{index + 1}", "conditions": ready}
        made.append({"kind": "Pod", "metadata": metadata, "spec": {"volumes": []}, "status": status})
    return made


def test_a_planner_on_ray_is_a_ray_service_whose_head_takes_the_robots(make: Any) -> None:
    policy = on_ray(make)
    first = make.plan(policy, observed(make), make.settings)
    assert "Deployment" not in [found["kind"] for found in first.desired]
    (service,) = [found for found in first.desired if found["kind"] == ray_services.KIND]
    (application,) = json.loads(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "taktline_worker.ray:app"
    assert application["args"]["config"] == "/etc/taktline/engine.json"
    config = service["spec"]["rayClusterConfig"]
    (ranks,) = config["workerGroupSpecs"]
    assert ranks["replicas"] == ranks["minReplicas"] == ranks["maxReplicas"] == 4
    (container,) = ranks["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    (head,) = config["headGroupSpec"]["template"]["spec"]["containers"]
    assert "limits" not in head["resources"]
    assert not {"command", "readinessProbe", "livenessProbe", "startupProbe"} & (head.keys() | container.keys())
    (budget,) = [found for found in first.desired if found["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["minAvailable"] == 4
    assert "maxUnavailable" not in budget["spec"]

    pods = ray_pods(service, "reach-line-0-abc")
    waiting = make.plan(policy, observed(make, first.desired, pods), make.settings)
    assert waiting.status["readyReplicas"] == 0, "ready pods of a cluster that does not serve yet"
    assert waiting.again_s == ray_services.STARTING_LOOK_S, "no event tells of the application"
    running = {"activeServiceStatus": {"rayClusterName": "reach-line-0-abc"}}
    running["activeServiceStatus"]["applicationStatuses"] = {"planner": {"status": "RUNNING"}}
    children = [found if found is not service else service | {"status": running} for found in first.desired]
    serving = make.plan(policy, observed(make, children, pods), make.settings)
    assert serving.status["readyReplicas"] == 1
    (target,) = serving.route.targets
    assert target.address == f"10.2.0.1:{naming.WORKER_PORT}"
    assert serving.status["selector"].endswith("ray.io/node-type notin (worker)")
    assert not serving.writes
    assert serving.again_s == ray_services.SERVING_LOOK_S


def test_ray_without_kuberay_is_refused_and_served_once_it_is_there(make: Any) -> None:
    policy = on_ray(make)
    refused = make.plan(policy, observed(make, kinds=frozenset()), make.settings)
    accepted = condition(refused, "Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "KindsAbsent")
    assert "install KubeRay" in accepted["message"]
    assert not refused.writes
    assert condition(make.plan(policy, observed(make), make.settings), "Accepted")["status"] == "True"


def test_the_worker_runtime_leaves_no_trace_in_revisions(make: Any) -> None:
    """Adding the field changed the name and the pods of no policy that does not set it."""
    plain = make.policy()
    assert plain.spec.revision() == make.policy(engine={"runtime": "worker"}).spec.revision()
    assert "runtime" not in plain.spec.engine.described()
    assert "runtime" not in on_ray(make).spec.engine.written()
    unnamed = {"model": {"family": "vjepa2-ac", "source": {"path": "/srv/x"}}}
    assert on_ray(make, **unnamed).spec.revision() != make.policy(**unnamed).spec.revision()


def test_kueue_holds_workers_back_and_is_not_a_fault(make: Any) -> None:
    policy = make.policy(queue={"name": "robots", "priorityClass": "line"})
    first = make.plan(policy, observed(make), make.settings)
    labelled = {found["kind"] for found in first.desired if kueue.QUEUE_LABEL in found["metadata"]["labels"]}
    assert labelled == {"Deployment"}
    (deployment,) = [found for found in first.desired if found["kind"] == "Deployment"]
    assert deployment["metadata"]["labels"][kueue.PRIORITY_LABEL] == "line"
    assert kueue.QUEUE_LABEL not in deployment["spec"]["template"]["metadata"]["labels"], "Kueue's webhook sets that"
    pod = make.pod("a", owner=policy, ready=False)
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gated"}
    pod["status"] = {"phase": "Pending", "conditions": [gated]}
    held = make.plan(policy, observed(make, first.desired, [pod]), make.settings)
    assert condition(held, "Degraded")["status"] == "False"
    queued = condition(held, "Queued")
    assert (queued["status"], queued["reason"]) == ("True", "WaitingForQuota")
    assert "1 of 1 pods wait until Kueue admits them to queue robots" in queued["message"]
    admitted = make.plan(policy, observed(make, first.desired, [make.pod("a", owner=policy)]), make.settings)
    assert condition(admitted, "Queued")["status"] == "False"
    # A RayService that Kueue suspends never runs under KubeRay: its pods are a group instead, admitted as a whole.
    ray = on_ray(make, queue={"name": "robots"})
    desired = make.plan(ray, observed(make), make.settings).desired
    (service,) = [found for found in desired if found["kind"] == ray_services.KIND]
    assert kueue.QUEUE_LABEL not in service["metadata"]["labels"]
    cluster = service["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"]["template"], *(part["template"] for part in cluster["workerGroupSpecs"])]
    ranks = sum(part["replicas"] for part in cluster["workerGroupSpecs"])
    assert {template["metadata"]["labels"][kueue.QUEUE_LABEL] for template in templates} == {"robots"}
    assert len({template["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for template in templates}) == 1
    size = {template["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for template in templates}
    assert size == {str(1 + ranks)}
    plain = make.plan(on_ray(make), observed(make), make.settings).desired
    assert "kueue" not in json.dumps(plain)
    # What Kueue writes is not drift: where a site's default queue takes RayServices, `suspend` is left alone.
    service["spec"]["rayClusterConfig"]["suspend"] = True
    suspended = make.plan(ray, observed(make, desired), make.settings)
    assert not suspended.writes
    assert condition(suspended, "Queued")["reason"] == "WaitingForQuota"


@pytest.mark.parametrize("serves", [True, False], ids=["serves", "idle"])
@pytest.mark.parametrize(
    ("queue", "then"),
    [
        ({"name": "others"}, {"kueue.x-k8s.io/queue-name": "others", "kueue.x-k8s.io/priority-class": "line"}),
        ({"name": "others", "priorityClass": "night"}, {"kueue.x-k8s.io/queue-name": "others"}),
        (None, {"kueue.x-k8s.io/queue-name": "robots", "kueue.x-k8s.io/priority-class": "line"}),
    ],
    ids=["another", "another, other class", "none"],
)
def test_kueue_is_asked_for_no_move_that_it_refuses(make: Any, serves: bool, queue: Any, then: Json) -> None:
    """Its webhooks would refuse the whole object, and with it every later change of the policy."""
    first = make.plan(make.policy(queue={"name": "robots", "priorityClass": "line"}), observed(make), make.settings)
    for found in first.desired:
        if found["kind"] == "Deployment":
            found["status"] = {"readyReplicas": 1} if serves else {}
    changed = make.policy(**({"queue": queue} if queue else {}))
    again = make.plan(changed, observed(make, first.desired, [make.pod("a", owner=changed)]), make.settings)
    (deployment,) = [found for found in again.desired if found["kind"] == "Deployment"]
    labels = deployment["metadata"]["labels"]
    assert labels[kueue.QUEUE_LABEL] == ("robots" if serves else then[kueue.QUEUE_LABEL])
    assert labels[kueue.PRIORITY_LABEL] == ((queue or {}).get("priorityClass") or "line")  # another may be, none not
    said = condition(again, "Queued")
    if serves or queue is None:
        assert (said["status"], said["reason"]) == ("False", "QueueKept")
        assert "workers serve in queue robots" in said["message"]
    elif "priorityClass" not in queue:
        assert said["reason"] == "PriorityKept"
    else:
        assert said["reason"] == "Admitted"
    # A class that is named no longer stays, and is not hidden by what is said of the queue.
    dropped = queue is not None and "priorityClass" not in queue
    assert ("keep priority class line" in said["message"]) == dropped
    # A policy that never was in a queue enters none while it serves.
    plain = make.plan(make.policy(), observed(make), make.settings)
    for found in plain.desired:
        if found["kind"] == "Deployment":
            found["status"] = {"readyReplicas": 1} if serves else {}
    asked = make.policy(queue={"name": "robots"})
    entered = make.plan(asked, observed(make, plain.desired, [make.pod("a", owner=asked)]), make.settings)
    (deployment,) = [found for found in entered.desired if found["kind"] == "Deployment"]
    assert (kueue.QUEUE_LABEL in deployment["metadata"]["labels"]) == (not serves)
    assert ("no queue" in condition(entered, "Queued")["message"]) == serves


class Queues:
    """An API that knows LocalQueues, by path; it may refuse."""

    def __init__(self, *, status: int = 0, **queues: Json) -> None:
        self._queues, self._status = queues, status
        self.asked: list[str] = []

    async def raw(self, path: str) -> Json | None:
        self.asked.append(path)
        if self._status:
            raise ApiError(self._status, "Forbidden", 'User "x" cannot get resource "localqueues"')
        return self._queues.get(path.rpartition("/")[2]) if "/v1beta1/" in path else None


def in_queue(make: Any, *, gated: bool = True) -> tuple[Any, list[Json]]:
    policy = make.policy(queue={"name": "robots"})
    pod = make.pod("a", owner=policy, ready=not gated)
    if gated:
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return policy, [pod]


@pytest.mark.parametrize(
    ("queues", "state", "reason", "words"),
    [
        ({"robots": {"status": {}}}, "open", "WaitingForQuota", "until Kueue admits them to queue robots"),
        ({}, "absent", "QueueAbsent", "namespace line-1 has no LocalQueue robots"),
        (
            {"robots": {"status": {"conditions": [{"type": "Active", "status": "False", "message": "it is stopped"}]}}},
            "stopped",
            "QueueStopped",
            "queue robots, which admits nobody now: it is stopped",
        ),
    ],
)
async def test_a_queue_that_admits_nobody_is_told_from_one_without_quota(
    make: Any, queues: Json, state: str, reason: str, words: str
) -> None:
    policy, pods = in_queue(make)
    seen = await kueue.look(Queues(**queues), policy, pods, ALL)
    assert seen is not None
    assert seen.state == state
    assert kueue.admits(seen) == (state == "open")
    looked = make.Observed(live=make.body(), now=make.now, pods=pods, kinds=ALL, queue=seen)
    said = condition(make.plan(policy, looked, make.settings), "Queued")
    assert (said["status"], said["reason"]) == ("True", reason)
    assert words in said["message"]


async def test_a_queue_is_asked_about_only_where_somebody_waits_in_it(make: Any) -> None:
    policy, pods = in_queue(make, gated=False)
    api = Queues()
    assert await kueue.look(api, policy, pods, ALL) is None
    waiting = in_queue(make)[1]
    assert await kueue.look(api, policy, waiting, frozenset()) is None, "no Kueue"
    assert await kueue.look(api, make.policy(), waiting, ALL) is None, "no queue"
    assert api.asked == []
    # Without the right it goes on as if nobody knew.
    assert await kueue.look(Queues(status=403), policy, waiting, ALL) is None


async def test_a_queue_that_cannot_be_looked_at_holds_nothing_else_up(make: Any) -> None:
    """Kueue's own webhook may be down: the route is set all the same, and no worker leaves until it is known again."""
    policy, waiting = in_queue(make)
    seen = await kueue.look(Queues(status=500), policy, waiting, ALL)
    assert seen == kueue.Seen("unknown")
    assert not kueue.admits(seen)

    class Failing(make.Api):
        async def raw(self, path: str) -> Any:
            if "localqueues" in path:
                raise ApiError(500, "InternalError", "conversion webhook failed: connection refused")
            return None

    spec = {"queue": {"name": "robots"}}
    api = Failing(make.body(**spec), make.pod("b", owner=policy), *waiting)
    api.installed["kueue.x-k8s.io/v1beta1"] = frozenset({"LocalQueue"})
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    await controller.handle(("line-1", "reach"))
    await controller.handle(ROUTES)
    assert "10.0.0" in json.dumps(api.objects["ConfigMap", make.settings.gateway_namespace, naming.ROUTES_NAME])
    (live,) = api.of_kind("PolicyDeployment")
    queued = next(found for found in live["status"]["conditions"] if found["type"] == "Queued")
    assert (queued["status"], queued["reason"]) == ("True", "WaitingForQuota")
    assert queued["message"].endswith("could not be read")


def test_what_a_default_queue_took_was_not_kept_from_an_earlier_one(make: Any) -> None:
    """Kueue labels what names no queue where the namespace has one called default: nobody asked for another."""
    policy = make.policy()
    first = make.plan(policy, observed(make), make.settings)
    for found in first.desired:
        if found["kind"] == "Deployment":
            found["metadata"]["labels"][kueue.QUEUE_LABEL] = "default"
            found["status"] = {"readyReplicas": 1}
    serving = make.plan(policy, observed(make, first.desired, [make.pod("a", owner=policy)]), make.settings)
    assert condition(serving, "Queued") is None
    gated = in_queue(make)[1]
    gated[0]["metadata"]["labels"][kueue.QUEUE_LABEL] = "default"
    waiting = condition(make.plan(policy, observed(make, first.desired, gated), make.settings), "Queued")
    assert (waiting["status"], waiting["reason"]) == ("True", "WaitingForQuota")
    assert waiting["message"].endswith("to queue default")


def test_keda_sets_the_number_that_scaling_recommends(make: Any) -> None:
    scaling = {"mode": "Recommend", "keda": {"serverAddress": "http://prometheus:9090"}}
    pools = [
        {"name": "a", "accelerator": "cpu", "maxReplicas": 3},
        {"name": "b", "accelerator": "cpu", "maxReplicas": 2},
    ]
    policy = make.policy(scaling=scaling, pools=pools, replicas=1)
    (found,) = [made for made in make.plan(policy, observed(make), make.settings).desired if made["kind"] == keda.KIND]
    assert found["spec"]["scaleTargetRef"]["kind"] == "PolicyDeployment"
    assert (found["spec"]["minReplicaCount"], found["spec"]["maxReplicaCount"]) == (2, 5)
    (trigger,) = found["spec"]["triggers"]
    query = 'max(taktline_policydeployment_wanted_workers{namespace="line-1",policy="reach"})'
    assert trigger["metadata"] == {"serverAddress": "http://prometheus:9090", "query": query, "threshold": "1"}
    # No longer asked for, it goes.
    plain = make.policy(pools=pools, replicas=1)
    desired = make.plan(policy, observed(make), make.settings).desired
    pods = [make.pod(pool, owner=plain, pool=pool) for pool in ("a", "b")]
    later = make.plan(plain, observed(make, desired, pods), make.settings)
    assert keda.KIND in [ref.kind for ref in later.deletions]
    # Also where no worker serves: people take the number into their own hands because nothing settles.
    broken = make.plan(plain, observed(make, desired), make.settings)
    assert [ref.kind for ref in broken.deletions] == [keda.KIND]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"queue": {"name": "robots"}}, "no LocalQueue (Kueue)"),
        (
            {
                "replicas": 1,
                "pools": [{"name": "a", "accelerator": "cpu", "maxReplicas": 3}],
                "scaling": {"mode": "Recommend", "keda": {"serverAddress": "http://p:9090"}},
            },
            "no ScaledObject (KEDA), so nobody sets spec.replicas",
        ),
    ],
)
def test_what_is_asked_for_and_absent_is_said(make: Any, parts: Json, words: str) -> None:
    policy = make.policy(**parts)
    absent = condition(make.plan(policy, observed(make, kinds=frozenset()), make.settings), "Integrated")
    assert (absent["status"], absent["reason"]) == ("False", "KindsAbsent")
    assert words in absent["message"]
    assert condition(make.plan(policy, observed(make), make.settings), "Integrated")["status"] == "True"


def test_a_policy_that_asks_for_nothing_hears_nothing(make: Any) -> None:
    plan = make.plan(make.policy(), observed(make, kinds=frozenset()), make.settings)
    assert condition(plan, "Integrated") is None
    assert condition(plan, "Queued") is None


def test_groups_without_leader_worker_sets_say_what_they_are(make: Any) -> None:
    policy = make.policy(
        model=PLANNER,
        engine={"parallel": {"search": 16}},
        pools=[{"name": "line", "accelerator": "h100", "gpusPerNode": 8}],
    )
    found = condition(make.plan(policy, observed(make, kinds=frozenset()), make.settings), "Integrated")
    assert (found["status"], found["reason"]) == ("True", "Fallback")


async def test_a_kind_that_is_installed_later_is_used_without_a_restart(make: Any) -> None:
    body = make.body(model=PLANNER, engine={"runtime": "ray", "parallel": {"search": 2}})
    body["spec"]["pools"] = [{"name": "line", "accelerator": "h100"}]
    api = make.Api(body)
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    await controller.handle(("line-1", "reach"))
    assert not api.of_kind(ray_services.KIND)
    (live,) = api.of_kind("PolicyDeployment")
    assert live["status"]["conditions"][0]["reason"] == "KindsAbsent"
    while (await asyncio.wait_for(controller.queue.get(), 10)) != ("line-1", "reach"):
        pass
    controller.queue.done(("line-1", "reach"), failed=False)
    api.installed["ray.io/v1"] = frozenset({"RayService", "RayCluster"})
    await controller.resync(everything=False)
    # A new kind makes everybody look again.
    while (await asyncio.wait_for(controller.queue.get(), 10)) != ("line-1", "reach"):
        pass
    await controller.handle(("line-1", "reach"))
    assert len(api.of_kind(ray_services.KIND)) == 1
    (live,) = api.of_kind("PolicyDeployment")
    accepted = next(found for found in live["status"]["conditions"] if found["type"] == "Accepted")
    assert accepted["status"] == "True"


async def test_a_kind_without_rights_counts_as_absent(make: Any) -> None:
    class Forbidding(make.Api):
        async def get(self, kind: str, namespace: str, name: str) -> Any:
            if kind == keda.KIND:
                raise ApiError(403, "Forbidden", "no")
            return await super().get(kind, namespace, name)

    api = Forbidding()
    api.installed = {
        "keda.sh/v1alpha1": frozenset({"ScaledObject"}),
        "kueue.x-k8s.io/v1beta1": frozenset({"LocalQueue"}),
        "leaderworkerset.x-k8s.io/v1": frozenset({"LeaderWorkerSet"}),
    }
    assert await discovery.usable(api, "line-1") == {kueue.KIND, groups.LWS_KIND}


def test_heads_and_ranks_of_ray_are_one_unit(make: Any) -> None:
    (service,) = [
        found
        for found in make.plan(on_ray(make), observed(make), make.settings).desired
        if found["kind"] == "RayService"
    ]
    pods = ray_pods(service, "c1")
    assert list(group_pods.units(pods)) == ["ray/c1"]
    assert [group_pods.index_of(pod) for pod in pods] == [0, 1, 1, 1, 1]
