"""What pools become: MIG slices, Jetsons, spot capacity; and workers that hang while they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from taktline_operator import cli, stuck, workload
from taktline_operator.plan import Ref, Settings, ref_of

Json = dict[str, Any]


def template(make: Any, **pool: Any) -> Json:
    policy = make.policy(pools=[{"name": "line", "accelerator": "h100", **pool}])
    made: Json = workload.pod_template(policy, policy.spec.pools[0], "registry.example/worker:1")
    return made["spec"]


def worker(spec: Json) -> Json:
    (container,) = spec["containers"]
    found: Json = container
    return found


@pytest.mark.parametrize(
    ("profile", "resource"),
    [
        ("1g.10gb", "nvidia.com/mig-1g.10gb"),
        ("3g.40gb", "nvidia.com/mig-3g.40gb"),
        ("1g.10gb+me", "nvidia.com/mig-1g.10gb.me"),
    ],
)
def test_a_worker_on_a_mig_slice_asks_for_that_slice_and_no_gpu(make: Any, profile: str, resource: str) -> None:
    spec = template(make, migProfile=profile)
    resources = worker(spec)["resources"]
    assert resources["limits"] == {resource: "1"}
    assert resources["requests"][resource] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


def test_a_slice_is_one_gpu_whatever_the_mesh_asks_for(make: Any) -> None:
    pool = {"name": "line", "accelerator": "h100", "migProfile": "1g.10gb"}
    policy = make.policy(engine={"parallel": {"dp": 2}}, pools=[pool])
    result = make.plan(policy, make.Observed(live=make.body(), now=make.now), make.settings)
    (accepted,) = [found for found in result.status["conditions"] if found["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", "TooFewGpus")


def claiming(make: Any, **more: Any) -> Any:
    pool = {"name": "line", "accelerator": "h100", "claimTemplate": "one-gpu"}
    return make.policy(pools=[pool | more.pop("pool", {})], **more)


def test_a_gpu_by_resource_claim_asks_for_no_extended_resource(make: Any) -> None:
    policy = claiming(make)
    pod = make.applied(policy)[Ref("Deployment", "reach-line")]["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "accelerator", "resourceClaimTemplateName": "one-gpu"}]
    found = worker(pod)["resources"]
    assert found["claims"] == [{"name": "accelerator"}]
    assert not any(name.startswith("nvidia.com/") for side in ("requests", "limits") for name in found.get(side, {}))
    assert found["requests"] == {"cpu": "4", "memory": "24Gi"}
    # Others are as they were, to the byte.
    plain = make.policy(pools=[{"name": "line", "accelerator": "h100"}])
    other = make.applied(plain)[Ref("Deployment", "reach-line")]["spec"]["template"]["spec"]
    assert "resourceClaims" not in other
    assert "claims" not in worker(other)["resources"]


def test_each_pod_of_a_group_has_a_claim_of_its_own_and_a_ray_head_has_none(make: Any) -> None:
    planner = {"family": "vjepa2-ac", "source": {"path": "/srv/x"}, "revision": "a"}
    spread = claiming(make, model=planner, engine={"parallel": {"search": 16}}, pool={"gpusPerNode": 8})
    desired = make.plan(spread, make.Observed(live=make.body(), now=make.now), make.settings).desired
    (group,) = [found for found in desired if found["kind"] == "StatefulSet"]
    pod = group["spec"]["template"]["spec"]
    assert pod["resourceClaims"][0]["resourceClaimTemplateName"] == "one-gpu"
    assert worker(pod)["resources"]["claims"] == [{"name": "accelerator"}]
    ray = claiming(make, model=planner, engine={"runtime": "ray", "parallel": {"search": 2}})
    desired = make.plan(ray, make.Observed(live=make.body(), now=make.now), make.settings).desired
    (service,) = [found for found in desired if found["kind"] == "RayService"]
    config = service["spec"]["rayClusterConfig"]
    head, rank = config["headGroupSpec"]["template"]["spec"], config["workerGroupSpecs"][0]["template"]["spec"]
    assert "resourceClaims" not in head
    assert "claims" not in worker(head)["resources"]
    assert worker(rank)["resources"]["claims"] == [{"name": "accelerator"}]


@pytest.mark.parametrize(("version", "served"), [((1, 33), False), ((1, 34), True), (None, True)])
def test_a_cluster_that_would_drop_the_claim_is_told_so(make: Any, version: Any, served: bool) -> None:
    """A pod without its claim would run, on a node with GPUs, and have none."""
    observed = make.Observed(live=make.body(), now=make.now, version=version)
    result = make.plan(claiming(make), observed, make.settings)
    assert bool(result.writes) is served
    if not served:
        accepted = result.status["conditions"][0]
        assert (accepted["status"], accepted["reason"]) == ("False", "ClaimsUnsupported")
        assert "since 1.34, and this cluster is 1.33" in accepted["message"]


def test_a_jetson_is_arm64_with_nvidias_runtime_also_where_nodes_are_named(make: Any) -> None:
    plain = template(make, accelerator="jetson-thor", image="registry.example/worker:1-jetson")
    assert plain["runtimeClassName"] == "nvidia"
    assert worker(plain)["image"] == "registry.example/worker:1-jetson"
    terms = plain["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    arm = {"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}
    assert all(arm in term["matchExpressions"] for term in terms)
    assert worker(plain)["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    named = template(make, accelerator="jetson-thor", nodeSelector={"line": "3"})
    assert named["nodeSelector"] == {"kubernetes.io/arch": "arm64", "line": "3"}
    assert template(make, accelerator="jetson-thor", runtimeClassName="own")["runtimeClassName"] == "own"
    assert "runtimeClassName" not in template(make)
    assert template(make, nodeSelector={"line": "3"})["nodeSelector"] == {"line": "3"}


def test_a_class_may_have_an_image_of_its_own(make: Any) -> None:
    pools = [{"name": name, "accelerator": name} for name in ("h100", "jetson-thor")]
    policy = make.policy(pools=pools)
    settings = Settings(image="worker:1", images={"jetson-thor": "worker:1-arm64"})
    desired = make.plan(policy, make.Observed(live=make.body(), now=make.now), settings).desired
    images = {
        found["metadata"]["name"]: worker(found["spec"]["template"]["spec"])["image"]
        for found in desired
        if found["kind"] == "Deployment"
    }
    assert images == {"reach-h100": "worker:1", "reach-jetson-thor": "worker:1-arm64"}


def test_an_unknown_class_of_an_image_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "policy.yaml").write_text("{}")
    assert cli.main(["plan", "-f", str(tmp_path / "policy.yaml"), "--worker-image-for", "tpu=x"]) != 0
    assert "accelerator classes are cpu, jetson-thor" in capsys.readouterr().err


def test_spot_capacity_is_tolerated_only_where_it_is_asked_for(make: Any) -> None:
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Exists", "effect": "NoSchedule"}
    assert spot in template(make, spot=True)["tolerations"]
    assert spot not in template(make)["tolerations"]
    lost = [found for found in template(make, spot=True)["tolerations"] if found["effect"] == "NoExecute"]
    assert all(found["tolerationSeconds"] == 30 for found in lost), "a node that is taken back is left soon"


def test_the_kubelet_waits_a_minute_longer_than_the_operator(make: Any) -> None:
    probe = worker(template(make, startupSeconds=300))["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 360
    usual = worker(template(make))["startupProbe"]
    assert usual["periodSeconds"] * usual["failureThreshold"] == 1800
    assert stuck.STARTUP_S < 1800


def starting(make: Any, owner: Any, since: str, **status: Any) -> Json:
    found: Json = make.pod("reach-line-a", owner=owner, pool="line", ready=False)
    running = {"name": "worker", "state": {"running": {"startedAt": since}}, "started": False, "ready": False}
    found["status"]["containerStatuses"] = [running | status]
    return found


@pytest.mark.parametrize(
    ("since", "changed", "gone"),
    [
        ("2026-03-01T07:54:00Z", {}, True),
        ("2026-03-01T07:56:00Z", {}, False),
        ("2026-03-01T07:00:00Z", {"started": True, "ready": True}, False),
        ("2026-03-01T07:00:00Z", {"started": True}, False),
        ("2026-03-01T07:00:00Z", {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}, False),
    ],
    ids=["over its budget", "within it", "serving", "was ready: its liveness probe decides", "not running"],
)
def test_a_worker_that_hangs_while_it_starts_is_restarted(make: Any, since: str, changed: Json, gone: bool) -> None:
    policy = make.policy(pools=[{"name": "line", "accelerator": "h100", "startupSeconds": 300}])
    children = make.applied(policy)
    pod = starting(make, policy, since, **changed)
    observed = make.Observed(live=make.body(), now="2026-03-01T08:00:00Z", children=children, pods=[pod])
    result = make.plan(policy, observed, make.settings)
    assert [found.reason for found in result.removals] == (["StuckStart"] if gone else [])
    if gone:
        assert "300 s in which its worker should have loaded and captured" in result.removals[0].message


def test_the_operator_looks_again_when_the_budget_is_used_up(make: Any) -> None:
    """Nothing happens in the cluster while a worker hangs, so no event would wake the operator."""
    policy = make.policy(pools=[{"name": "line", "accelerator": "h100", "startupSeconds": 300}])
    pod = starting(make, policy, "2026-03-01T07:58:00Z")
    observed = make.Observed(live=make.body(), now="2026-03-01T08:00:00Z", children=make.applied(policy), pods=[pod])
    assert make.plan(policy, observed, make.settings).again_s == 181.0
    ready = make.Observed(
        live=make.body(), now=make.now, children=make.applied(policy), pods=[make.pod("a", owner=policy, pool="line")]
    )
    assert make.plan(policy, ready, make.settings).again_s is None


async def test_a_hanging_worker_is_told_of_in_an_event(make: Any) -> None:
    from taktline_operator.reconcile import Controller

    pools = [{"name": "line", "accelerator": "h100", "startupSeconds": 300}]
    body = make.body(pools=pools)
    policy = make.policy(pools=pools)
    pod = starting(make, policy, "2026-03-01T07:00:00Z")
    api = make.Api(body, pod, *(found | {} for found in make.applied(policy).values()))
    controller = Controller(api, make.settings, clock=lambda: make.now)
    await controller.resync(everything=True)
    await controller.handle(("line-1", "reach"))
    assert not api.of_kind("Pod")
    (event,) = [found for found in api.of_kind("Event") if found["reason"] == "StuckStart"]
    assert event["type"] == "Warning"
    assert "reach-line-a" in event["message"]


def hanging(make: Any, policy: Any, status: Json, now: str, since: str, **pod: str) -> Any:
    live = make.body() | {"status": status}
    found = starting(make, policy, since)
    found["metadata"]["annotations"] |= pod
    return make.plan(
        policy, make.Observed(live=live, now=now, children=make.applied(policy), pods=[found]), make.settings
    )


def test_a_worker_that_hangs_again_and_again_is_taken_away_ever_more_seldom(make: Any) -> None:
    policy = make.policy(pools=[{"name": "line", "accelerator": "h100", "startupSeconds": 300}])
    first = hanging(make, policy, {}, "2026-03-01T08:00:00Z", "2026-03-01T07:54:00Z")
    assert len(first.removals) == 1
    assert first.status["pools"][0]["stuckStarts"]["count"] == 1
    # The next one hangs as well: the kubelet restarts it in place before the operator moves it again.
    held = hanging(make, policy, first.status, "2026-03-01T08:06:00Z", "2026-03-01T08:00:30Z")
    assert held.removals == ()
    assert held.again_s == 240.0, "until twice the budget has passed since the last one"
    second = hanging(make, policy, held.status, "2026-03-01T08:11:00Z", "2026-03-01T08:05:40Z")
    assert len(second.removals) == 1
    assert second.status["pools"][0]["stuckStarts"]["count"] == 2
    degraded = next(found for found in second.status["conditions"] if found["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "StuckStart")
    assert "2 starts in a row hung for 300 s" in degraded["message"]
    assert "no sooner than 2026-03-01T08:31:00Z" in degraded["message"]
    later = hanging(make, policy, second.status, "2026-03-01T08:30:00Z", "2026-03-01T08:24:00Z")
    assert later.removals == ()
    assert later.status == hanging(make, policy, later.status, "2026-03-01T08:30:10Z", "2026-03-01T08:24:00Z").status
    assert [stuck.pause_s(count, 300) for count in (1, 2, 3, 9)] == [600, 1200, 2400, 21600]
    assert stuck.pause_s(9, 14400) == 21600
    assert stuck.pause_s(9, 36000) == 36000, "never less than a whole try"


def test_what_hung_is_forgotten_when_workers_serve_or_the_spec_changes(make: Any) -> None:
    pools = [{"name": "line", "accelerator": "h100", "startupSeconds": 300}]
    policy = make.policy(pools=pools)
    status = hanging(make, policy, {}, "2026-03-01T08:00:00Z", "2026-03-01T07:54:00Z").status
    well = make.pod("reach-line-b", owner=policy, pool="line")
    observed = make.Observed(live=make.body() | {"status": status}, now=make.now, children={}, pods=[well])
    assert "stuckStarts" not in make.plan(policy, observed, make.settings).status["pools"][0]
    # Another one of two serves, but the one that hung is not back: its place on the node may be the reason.
    two = make.policy(pools=[pools[0] | {"minReplicas": 2}])
    assert "stuckStarts" in make.plan(two, observed, make.settings).status["pools"][0]
    corrected = make.policy(pools=pools, engine={"buckets": [1]})
    found = hanging(make, corrected, status, "2026-03-01T08:06:00Z", "2026-03-01T08:00:30Z")
    assert len(found.removals) == 1, "a corrected spec begins anew"
    assert found.status["pools"][0]["stuckStarts"]["count"] == 1


def test_a_group_that_hangs_goes_as_a_whole(make: Any) -> None:
    policy = make.policy(
        model={"family": "vjepa2-ac", "source": {"path": "/srv/x"}, "revision": "a"},
        engine={"parallel": {"search": 16}},
        pools=[{"name": "line", "accelerator": "h100", "gpusPerNode": 8, "startupSeconds": 300}],
    )
    desired = make.plan(policy, make.Observed(live=make.body(), now=make.now), make.settings).desired
    (group,) = [found for found in desired if found["kind"] == "StatefulSet"]
    pods = []
    for index, since in enumerate(("2026-03-01T07:00:00Z", "2026-03-01T07:59:00Z")):
        pod = starting(make, policy, since)
        labels = group["spec"]["template"]["metadata"]["labels"] | {"apps.kubernetes.io/pod-index": str(index)}
        pod["metadata"] |= {"name": f"{group['metadata']['name']}-{index}", "labels": labels}
        pods.append(pod)
    observed = make.Observed(live=make.body(), now=make.now, children={ref_of(c): c for c in desired}, pods=pods)
    assert len(make.plan(policy, observed, make.settings).removals) == 2


def test_a_group_that_is_half_placed_lets_go_of_the_accelerators_it_holds(make: Any) -> None:
    """Without a gang scheduler two policies may hold half of their pods each, and wait for each other.

    Nobody waits for its whole start budget, of 29 minutes here.
    """
    policy = make.policy(
        model={"family": "vjepa2-ac", "source": {"path": "/srv/x"}, "revision": "a"},
        engine={"parallel": {"search": 16}},
        pools=[{"name": "line", "accelerator": "h100", "gpusPerNode": 8}],
    )
    desired = make.plan(policy, make.Observed(live=make.body(), now=make.now), make.settings).desired
    (group,) = [found for found in desired if found["kind"] == "StatefulSet"]
    message = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."

    def removed(since: str) -> set[str]:
        starved = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        starved["lastTransitionTime"] = since
        placed = starting(make, policy, since)
        placed["spec"]["nodeName"] = "node-1"
        placed["status"]["startTime"] = since
        waits = make.pod("w", owner=policy, pool="line", ready=False, phase="Pending", podIP="", conditions=[starved])
        for index, pod in enumerate((placed, waits)):
            labels = group["spec"]["template"]["metadata"]["labels"] | {"apps.kubernetes.io/pod-index": str(index)}
            pod["metadata"] |= {"name": f"{group['metadata']['name']}-{index}", "labels": labels}
        children = {ref_of(child): child for child in desired}
        observed = make.Observed(live=make.body(), now=make.now, children=children, pods=[placed, waits])
        return {found.pod for found in make.plan(policy, observed, make.settings).removals}

    assert removed("2026-03-01T07:58:00Z") == set()
    assert removed("2026-03-01T07:52:00Z") == {f"{group['metadata']['name']}-{index}" for index in (0, 1)}


@pytest.mark.parametrize("init", [False, True], ids=["worker", "fetching"])
def test_a_pod_that_its_node_makes_no_container_of_is_pointed_at(make: Any, init: bool) -> None:
    """A folder that is not there, or a volume that cannot be mounted, is told in events of the pod alone."""
    reason = "PodInitializing" if init else "ContainerCreating"
    waiting = [{"name": "worker", "ready": False, "restartCount": 0, "state": {"waiting": {"reason": reason}}}]
    parts = {"initContainerStatuses": waiting, "containerStatuses": waiting} if init else {"containerStatuses": waiting}

    def plan(started: str, **state: Any) -> Any:
        pod = make.pod("slow", ready=False, phase="Pending", startTime=started, **(parts | state))
        return make.plan(make.policy(), make.Observed(live=make.body(), now=make.now, pods=[pod]), make.settings)

    def said(result: Any) -> str:
        message: str = next(c["message"] for c in result.status["conditions"] if c["type"] == "Progressing")
        return message

    at_first = plan("2026-03-01T07:59:30Z")
    assert "describe" not in said(at_first)
    assert at_first.again_s == pytest.approx(30.0)
    late = plan("2026-03-01T07:58:30Z")
    assert "pod/slow has no container yet: `kubectl describe pod slow` says what it waits for" in said(late)
    running = [{"name": "model", "ready": False, "restartCount": 0, "state": {"running": {}}}]
    assert "describe" not in said(plan("2026-03-01T07:00:00Z", initContainerStatuses=running))
