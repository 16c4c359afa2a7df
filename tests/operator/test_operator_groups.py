"""Workers of several pods: their shape, their objects, how groups replace each other, and how they are counted."""

from __future__ import annotations

import copy
import itertools
from datetime import datetime, timedelta
from typing import Any

import pytest
from taktline_operator import diff, gangs, group_pods, groups, healing, meshes, naming, spec
from taktline_operator.engine_spec import Engine, Parallel
from taktline_operator.plan import ref_of

Json = dict[str, Any]
NODES = meshes.of_nodes(
    [
        {
            "metadata": {"labels": {"nvidia.com/gpu.product": product}},
            "status": {"allocatable": {"nvidia.com/gpu": count}},
        }
        for product, count in (("NVIDIA-H100-80GB-HBM3", "4"), ("NVIDIA-H100-80GB-HBM3", "8"), ("NVIDIA-A40", "16"))
    ]
    + [{"metadata": {"labels": {}}, "status": {"allocatable": {"cpu": "4"}}}]
)


def planner(make: Any, search: int = 16, pool: Json | None = None, **parts: Any) -> Any:
    return make.policy(
        model={"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"},
        engine={"parallel": {"search": search}},
        pools=[{"name": "line", "accelerator": "h100", **(pool or {})}],
        **parts,
    )


def observed(
    make: Any, policy: Any, children: Any = (), pods: Any = (), status: Json | None = None, **more: Any
) -> Any:
    body = make.body()
    body["status"] = status or {}
    return make.Observed(
        live=body, now=make.now, children={ref_of(child): child for child in children}, pods=pods, **more
    )


def pods_of(stateful_set: Json, ready: int | None = None) -> list[Json]:
    """The pods that a StatefulSet's controller makes, the first `ready` of them ready."""
    template, name = stateful_set["spec"]["template"], stateful_set["metadata"]["name"]
    count = stateful_set["spec"]["replicas"]
    made = []
    for index in range(count):
        is_ready = "True" if ready is None or index < ready else "False"
        metadata = copy.deepcopy(template["metadata"])
        metadata |= {"name": f"{name}-{index}", "namespace": stateful_set["metadata"]["namespace"]}
        metadata["labels"] |= {groups.INDEX_LABEL: str(index)}
        status = {
            "phase": "Running",
            "podIP": f"10.1.{sum(name.encode()) % 250}.{index + 1}",
            "conditions": [{"type": "Ready", "status": is_ready}],
        }
        made.append(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"volumes": []}, "status": status}
        )
    return made


def sets_of(objects: Any) -> list[Json]:
    return [found for found in objects if found["kind"] == "StatefulSet"]


@pytest.mark.parametrize(
    ("ranks", "per_node", "shape"),
    [
        (1, 8, (1, 1)),
        (8, 8, (1, 8)),
        (16, 8, (2, 8)),
        (12, 8, (2, 6)),
        (9, 8, (3, 3)),
        (7, 4, (7, 1)),
        (16, None, (1, 16)),
    ],
)
def test_a_worker_has_the_fewest_pods_of_one_size(ranks: int, per_node: int | None, shape: tuple[int, int]) -> None:
    assert meshes.shape(Engine(parallel=Parallel(search=ranks)), per_node) == shape


def test_gpus_of_a_node_come_from_the_spec_else_from_the_largest_node_of_the_pool(make: Any) -> None:
    def found(pool: Json, status: Json | None = None) -> int | None:
        policy = planner(make, pool=pool)
        return meshes.gpus_per_node(policy.spec.pools[0], status or {}, NODES)

    assert found({"gpusPerNode": 2}) == 2
    assert found({}) == 8
    assert found({"accelerator": "a100"}) is None
    assert found({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A40"}}) == 16
    assert found({}, {"pools": [{"name": "line", "gpusPerNode": 4}]}) == 4, "what workers were built on is kept"


def test_a_mesh_larger_than_a_node_is_a_group_that_finds_itself(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8, "mesh": {"interface": "eth1", "topologyKey": "rack", "port": 3000}})
    result = make.plan(policy, observed(make, policy), make.settings)
    kinds = [found["kind"] for found in result.desired]
    assert "Deployment" not in kinds
    (group,) = sets_of(result.desired)
    spec = group["spec"]
    assert (spec["replicas"], spec["podManagementPolicy"]) == (2, "Parallel")
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    services = {found["metadata"]["name"]: found["spec"] for found in result.desired if found["kind"] == "Service"}
    assert services[spec["serviceName"]]["publishNotReadyAddresses"] is True
    (container,) = spec["template"]["spec"]["containers"]
    env = {
        entry["name"]: entry.get("value") or entry["valueFrom"].get("fieldRef", {}).get("fieldPath")
        for entry in container["env"]
    }
    assert env["MASTER_ADDR"] == "$(TAKTLINE_GROUP)-0.reach-ranks.line-1.svc"
    assert env["TAKTLINE_GROUP"] == "metadata.labels['taktline.dev/group']"
    assert env["NODE_RANK"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert (env["MASTER_PORT"], env["NNODES"], env["LOCAL_WORLD_SIZE"], env["WORLD_SIZE"]) == ("3000", "2", "8", "16")
    assert env["NCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "eth1"
    names = [entry["name"] for entry in container["env"]]
    assert names.index("TAKTLINE_GROUP") < names.index("MASTER_ADDR"), "a variable refers to those before it"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["requests"]["memory"] == "192Gi"
    (near,) = spec["template"]["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["podAffinityTerm"]["topologyKey"] == "rack"
    assert near["podAffinityTerm"]["labelSelector"] == {"matchLabels": {naming.LABEL_GROUP: group["metadata"]["name"]}}
    (budget,) = [found for found in result.desired if found["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_another_topology_key_is_another_group(make: Any) -> None:
    # In place, pods that run would keep the old one: a group is never updated.
    names = set()
    for key in ("rack", "zone"):
        policy = planner(make, pool={"gpusPerNode": 8, "mesh": {"topologyKey": key}})
        (found,) = sets_of(make.plan(policy, make.Observed(live=make.body(), now=make.now), make.settings).desired)
        term = found["spec"]["template"]["spec"]["affinity"]["podAffinity"]
        (close,) = term["preferredDuringSchedulingIgnoredDuringExecution"]
        assert close["podAffinityTerm"]["labelSelector"]["matchLabels"] == {
            naming.LABEL_GROUP: found["metadata"]["name"]
        }
        assert close["podAffinityTerm"]["topologyKey"] == key
        names.add(found["metadata"]["name"])
    assert len(names) == 2


def sets_of_lws(objects: Any) -> list[Json]:
    return [found for found in objects if found["kind"] == groups.LWS_KIND]


def pods_of_lws(group: Json, ready: int | None = None) -> list[Json]:
    """The pods that LeaderWorkerSet's controller makes of a set of one group."""
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    template = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    alike = {"metadata": group["metadata"], "spec": {"template": template, "replicas": size}}
    pods = pods_of(alike, ready)
    for index, pod in enumerate(pods):
        pod["metadata"]["labels"].pop(groups.INDEX_LABEL)
        labels = {groups.LWS_NAME_LABEL: group["metadata"]["name"], groups.LWS_GROUP_LABEL: "0"}
        pod["metadata"]["labels"] |= labels | {groups.LWS_INDEX_LABEL: str(index)}
    return pods


WITH_LWS = frozenset({groups.LWS_KIND})


def test_where_leader_worker_sets_are_installed_each_holds_one_group(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8, "minReplicas": 3, "mesh": {"topologyKey": "rack"}})
    result = make.plan(policy, observed(make, policy, kinds=WITH_LWS), make.settings)
    assert not sets_of(result.desired)
    found = sets_of_lws(result.desired)
    assert len({group["metadata"]["name"] for group in found}) == 3
    for group in found:
        spec, name = group["spec"], group["metadata"]["name"]
        assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (1, 2)
        assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
        template = spec["leaderWorkerTemplate"]["workerTemplate"]
        assert template["metadata"]["labels"][naming.LABEL_GROUP] == name
        (near,) = template["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert near["podAffinityTerm"]["labelSelector"] == {"matchLabels": {naming.LABEL_GROUP: name}}
        env = {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]}
        assert env["MASTER_ADDR"]["value"] == "$(LWS_LEADER_ADDRESS)"
        assert "worker-index" in env["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    # Groups that serve already keep their kind: installing a product moves no worker.
    policy = planner(make, pool={"gpusPerNode": 8})
    before = sets_of(make.plan(policy, observed(make, policy), make.settings).desired)
    pods = [pod for group in before for pod in pods_of(group)]
    later = make.plan(policy, observed(make, policy, before, pods, kinds=WITH_LWS), make.settings)
    assert [found["metadata"]["name"] for found in sets_of(later.desired)] == [before[0]["metadata"]["name"]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_leader_worker_set_is_replaced_by_another_that_serves_first(make: Any, workers: int) -> None:
    # LeaderWorkerSet's own rolling update never begins where one group is all there is, and takes two at a time where a
    # surge that found no room is given up.
    pool = {"gpusPerNode": 8, "minReplicas": workers}
    old = planner(make, pool=pool)
    before = make.plan(old, observed(make, old, kinds=WITH_LWS), make.settings).desired
    old_sets = sets_of_lws(before)
    old_pods = [pod for group in old_sets for pod in pods_of_lws(group)]
    new = planner(make, pool=pool | {"image": "registry.example/worker:2"})
    first = make.plan(new, observed(make, new, before, old_pods, kinds=WITH_LWS), make.settings)
    made = sets_of_lws(first.writes)
    assert len(made) == 1, "one more than wanted, and the old ones stay as they are"
    assert not [ref for ref in first.deletions if ref.kind == groups.LWS_KIND]
    assert len(first.route.targets) == workers
    children = [*before, *made]
    half = [*old_pods, *pods_of_lws(made[0], ready=1)]
    waiting = make.plan(new, observed(make, new, children, half, kinds=WITH_LWS), make.settings)
    assert not [ref for ref in waiting.deletions if ref.kind == groups.LWS_KIND], "half a group replaces nobody"
    whole = [*old_pods, *pods_of_lws(made[0])]
    done = make.plan(new, observed(make, new, children, whole, kinds=WITH_LWS), make.settings)
    gone = [ref.name for ref in done.deletions if ref.kind == groups.LWS_KIND]
    assert len(gone) == 1
    assert gone[0] in {group["metadata"]["name"] for group in old_sets}


@pytest.mark.parametrize("template", ["the same", "earlier"])
def test_a_set_of_several_groups_serves_until_all_that_replace_it_do(make: Any, template: str) -> None:
    policy = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2})
    desired = make.plan(policy, observed(make, policy, kinds=WITH_LWS), make.settings).desired
    made = sets_of_lws(desired)
    earlier = copy.deepcopy(made[0])
    earlier["metadata"]["name"] = "reach-line"
    earlier["spec"]["replicas"] = 2
    old_pods = []
    for number in ("0", "1"):
        for pod in pods_of_lws(made[0]):
            pod["metadata"]["name"] = f"reach-line-{number}-{pod['metadata']['name'][-1]}"
            pod["metadata"]["labels"] |= {groups.LWS_NAME_LABEL: "reach-line", groups.LWS_GROUP_LABEL: number}
            del pod["metadata"]["labels"][naming.LABEL_GROUP]
            if template == "earlier":
                pod["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE] = template
            old_pods.append(pod)
    del earlier["metadata"]["labels"][naming.LABEL_GROUP]
    first = make.plan(policy, observed(make, policy, [earlier], old_pods, kinds=WITH_LWS), make.settings)
    assert len(sets_of_lws(first.writes)) == 2
    assert first.deletions == ()
    assert len(first.route.targets) == 2
    one = [*old_pods, *pods_of_lws(made[0])]
    waiting = make.plan(policy, observed(make, policy, [earlier, *made], one, kinds=WITH_LWS), make.settings)
    assert waiting.deletions == ()
    both = [*one, *pods_of_lws(made[1])]
    done = make.plan(policy, observed(make, policy, [earlier, *made], both, kinds=WITH_LWS), make.settings)
    assert [ref.name for ref in done.deletions if ref.kind == groups.LWS_KIND] == ["reach-line"]


@pytest.mark.parametrize("kinds", [frozenset(), WITH_LWS], ids=["StatefulSet", "LeaderWorkerSet"])
def test_an_old_group_waits_until_the_gateways_have_heard_of_the_new_one(make: Any, kinds: frozenset[str]) -> None:
    def found(objects: Any) -> list[Json]:
        return sets_of_lws(objects) if kinds else sets_of(objects)

    def pods(group: Json) -> list[Json]:
        return pods_of_lws(group) if kinds else pods_of(group)

    old = planner(make, pool={"gpusPerNode": 8})
    before = make.plan(old, observed(make, old, kinds=kinds), make.settings).desired
    new = planner(make, pool={"gpusPerNode": 8, "image": "registry.example/worker:2"})
    old_pods = pods(found(before)[0])
    made = found(make.plan(new, observed(make, new, before, old_pods, kinds=kinds), make.settings).writes)
    children, new_pods = [*before, *made], pods(made[0])

    def after(seconds: float) -> Any:
        since = datetime.fromisoformat(make.now) - timedelta(seconds=seconds)
        for pod in new_pods:
            pod["status"]["conditions"][0]["lastTransitionTime"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        return make.plan(new, observed(make, new, children, [*old_pods, *new_pods], kinds=kinds), make.settings)

    early = after(2)
    assert not [ref for ref in early.deletions if ref.kind in ("StatefulSet", groups.LWS_KIND)]
    assert early.again_s == 3.0
    assert len(early.route.targets) == 2, "both serve meanwhile"
    assert [ref.name for ref in after(5).deletions if ref.kind in ("StatefulSet", groups.LWS_KIND)]
    # A node whose clock is an hour ahead holds nothing up for an hour.
    assert [ref.name for ref in after(-3600).deletions if ref.kind in ("StatefulSet", groups.LWS_KIND)]


def test_a_group_counts_once_and_is_ready_only_as_a_whole(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 4, "minReplicas": 2}, search=8)
    desired = make.plan(policy, observed(make, policy), make.settings).desired
    one, two = sets_of(desired)
    pods = [*pods_of(one), *pods_of(two, ready=1)]
    result = make.plan(policy, observed(make, policy, desired, pods), make.settings)
    assert (result.status["replicas"], result.status["readyReplicas"]) == (2, 1)
    assert result.status["pools"][0] | {"podsPerWorker": 2, "ready": 1, "desired": 2} == result.status["pools"][0]
    (target,) = result.route.targets
    assert target.address == f"{pods[0]['status']['podIP']}:{naming.WORKER_PORT}"
    assert "apps.kubernetes.io/pod-index notin (1)" in result.status["selector"]
    missing = make.plan(policy, observed(make, policy, desired, pods[:1]), make.settings)
    assert missing.status["readyReplicas"] == 0, "a first pod without the others serves nobody"


def test_what_is_wrong_with_any_pod_of_a_group_is_said(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8})
    desired = make.plan(policy, observed(make, policy), make.settings).desired
    pods = pods_of(sets_of(desired)[0], ready=0)
    ended = {"exitCode": 2, "message": "taktline-worker: checkpoint_invalid: no sidecar (write one)"}
    pods[1]["status"]["containerStatuses"] = [{"name": "worker", "state": {}, "lastState": {"terminated": ended}}]
    result = make.plan(policy, observed(make, policy, desired, pods), make.settings)
    (degraded,) = [found for found in result.status["conditions"] if found["type"] == "Degraded"]
    assert degraded["status"] == "True"
    assert "no sidecar" in degraded["message"]
    assert pods[1]["metadata"]["name"] in degraded["message"]


def test_a_new_revision_is_a_new_group_which_serves_before_the_old_one_goes(make: Any) -> None:
    old = planner(make, pool={"gpusPerNode": 8})
    before = make.plan(old, observed(make, old), make.settings).desired
    old_pods = pods_of(sets_of(before)[0])
    new = planner(make, pool={"gpusPerNode": 8, "image": "registry.example/worker:2"})
    first = make.plan(new, observed(make, new, before, old_pods), make.settings)
    (made,) = sets_of(first.writes)
    assert made["metadata"]["name"] != sets_of(before)[0]["metadata"]["name"]
    assert not [ref for ref in first.deletions if ref.kind == "StatefulSet"]
    assert len(first.route.targets) == 1

    children = [*before, *first.writes]
    half = make.plan(new, observed(make, new, children, [*old_pods, *pods_of(made, ready=1)]), make.settings)
    assert not [ref for ref in half.deletions if ref.kind == "StatefulSet"], "half a group replaces nobody"
    done = make.plan(new, observed(make, new, children, [*old_pods, *pods_of(made)]), make.settings)
    assert [ref.name for ref in done.deletions if ref.kind == "StatefulSet"] == [sets_of(before)[0]["metadata"]["name"]]


@pytest.mark.parametrize(
    ("since", "stays"),
    [("2026-03-01T07:59:30Z", True), ("2026-03-01T07:58:00Z", False), ("2026-03-01T07:00:00Z", False)],
    ids=["for a moment", "for long", "never was ready"],
)
def test_an_old_group_whose_node_falters_is_not_taken_for_lost(make: Any, since: str, stays: bool) -> None:
    """A node that is not heard of for seconds makes its pods not ready: nobody else serves yet."""
    old = planner(make, pool={"gpusPerNode": 8})
    before = make.plan(old, observed(make, old), make.settings).desired
    pods = pods_of(sets_of(before)[0])
    for pod in pods:
        began = {"type": "Initialized", "status": "True", "lastTransitionTime": "2026-03-01T07:00:00Z"}
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
        pod["status"]["conditions"] = [began, ready]
    new = planner(make, pool={"gpusPerNode": 8, "image": "registry.example/worker:2"})
    found = make.plan(new, observed(make, new, before, pods), make.settings)
    assert ([ref.kind for ref in found.deletions if ref.kind == "StatefulSet"] == []) == stays
    assert found.route.targets == (), "it gets no observations meanwhile"


@pytest.mark.parametrize("which", [0, 1], ids=["the first falters", "the second falters"])
@pytest.mark.parametrize("new_serves", [False, True], ids=["no room for a new one", "a new one serves"])
def test_a_group_that_serves_is_kept_before_one_that_falters(make: Any, which: int, new_serves: bool) -> None:
    old = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2})
    before = make.plan(old, observed(make, old), make.settings).desired
    ordered = sorted(sets_of(before), key=lambda found: str(found["metadata"]["name"]))
    faltering, serving = ordered[which], ordered[1 - which]
    new = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2, "image": "registry.example/worker:2"})
    pods = [*pods_of(faltering), *pods_of(serving)]
    made = sets_of(make.plan(new, observed(make, new, before, pods), make.settings).writes)[0]
    for pod in pods[:2]:
        began = {"type": "Initialized", "status": "True", "lastTransitionTime": "2026-03-01T07:00:00Z"}
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": "2026-03-01T07:59:45Z"}
        pod["status"]["conditions"] = [began, ready]
    new_pods = pods_of(made)
    for pod in () if new_serves else new_pods:
        short = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes: 4 Insufficient nvidia.com/gpu."}
        pod["metadata"]["creationTimestamp"] = "2026-03-01T07:00:00Z"
        pod["status"] = {"phase": "Pending", "conditions": [short]}
    found = make.plan(new, observed(make, new, [*before, made], [*pods, *new_pods]), make.settings)
    gone = {ref.name for ref in found.deletions if ref.kind == "StatefulSet"}
    assert gone == ({faltering["metadata"]["name"]} if new_serves else set())
    if not new_serves:
        assert found.again_s is not None, "it is looked at again when its time is over"
        assert found.again_s <= 45.0


@pytest.mark.parametrize(("served", "leaves"), [(2, 1), (3, 0)], ids=["none has left yet", "one left for nothing"])
def test_no_second_group_leaves_where_the_first_that_left_has_brought_nobody(
    make: Any, served: int, leaves: int
) -> None:
    """Two of three serve: the queue admits no more, or one left for a new one that others kept out."""
    old = planner(make, pool={"gpusPerNode": 8, "minReplicas": 3})
    before = sets_of(make.plan(old, observed(make, old), make.settings).desired)[:2]
    new = planner(make, pool={"gpusPerNode": 8, "minReplicas": 3, "image": "registry.example/worker:2"})
    pods = [pod for found in before for pod in pods_of(found)]
    made = sets_of(make.plan(new, observed(make, new, before, pods), make.settings).writes)
    assert [group["metadata"]["annotations"][naming.ANNOTATION_SERVED] for group in made] == ["2", "2"]
    made[0]["metadata"]["annotations"][naming.ANNOTATION_SERVED] = str(served)
    for group in made:
        for pod in pods_of(group):
            pod["metadata"]["creationTimestamp"] = "2026-03-01T01:00:00Z"
            pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
            pod["status"] = {"phase": "Pending"}
            pods.append(pod)
    found = make.plan(new, observed(make, new, [*before, *made], pods), make.settings)
    assert len([ref for ref in found.deletions if ref.kind == "StatefulSet"]) == leaves
    said = next(one["message"] for one in found.status["conditions"] if one["type"] == "Progressing")
    assert ("an old worker leaves before each new one" if leaves else "no room for another worker: free some") in said


@pytest.mark.parametrize("stuck", [False, True], ids=["all is well", "a pod never ends"])
def test_a_pod_that_never_ends_holds_no_rollout_up(make: Any, stuck: bool) -> None:
    """Its node is dead: it stays Terminating for good, and no room comes of it."""
    old = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2})
    before = make.plan(old, observed(make, old), make.settings).desired
    new = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2, "image": "registry.example/worker:2"})
    pods = [pod for found in sets_of(before) for pod in pods_of(found)]
    made = sets_of(make.plan(new, observed(make, new, before, pods), make.settings).writes)[0]
    dead = copy.deepcopy(pods[0])
    dead["metadata"] |= {"name": "gone-0", "deletionTimestamp": "2026-03-01T01:00:00Z"}
    dead["metadata"]["labels"][naming.LABEL_GROUP] = "reach-line-000000-0"
    new_pods = pods_of(made)
    for pod in new_pods:
        short = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes: 4 Insufficient nvidia.com/gpu."}
        pod["metadata"]["creationTimestamp"] = "2026-03-01T01:00:00Z"
        pod["status"] = {"phase": "Pending", "conditions": [short]}
    seen = [*pods, *new_pods, *([dead] if stuck else [])]
    found = make.plan(new, observed(make, new, [*before, made], seen), make.settings)
    assert len([ref for ref in found.deletions if ref.kind == "StatefulSet"]) == 1


def test_pods_of_a_group_that_was_just_taken_away_let_no_other_go(make: Any) -> None:
    """For a moment they are ready and nobody owns them: taken for workers of another kind, they cost the last one."""
    old = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2})
    before = make.plan(old, observed(make, old), make.settings).desired
    kept, gone = sets_of(before)
    new = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2, "image": "registry.example/worker:2"})
    first = make.plan(new, observed(make, new, before, [*pods_of(kept), *pods_of(gone)]), make.settings)
    (made, *_) = sets_of(first.writes)
    waits = pods_of(made, ready=0)
    for pod in waits:
        pod["metadata"]["creationTimestamp"] = "2026-03-01T07:59:30Z"
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    both = [*pods_of(kept), *pods_of(gone), *waits]
    one_goes = make.plan(new, observed(make, new, [*before, made], both), make.settings)
    assert len([ref for ref in one_goes.deletions if ref.kind == "StatefulSet"]) == 1
    children = [found for found in before if found is not gone]
    orphans = make.plan(new, observed(make, new, [*children, made], both), make.settings)
    assert not [ref for ref in orphans.deletions if ref.kind == "StatefulSet"]


def test_a_mesh_that_outgrows_its_node_keeps_the_old_workers_until_the_group_serves(make: Any) -> None:
    small = planner(make, search=8, pool={"gpusPerNode": 8})
    before = make.plan(small, observed(make, small), make.settings).desired
    (deployment,) = [found for found in before if found["kind"] == "Deployment"]
    pod = make.pod("reach-line-x", owner=small, pool="line")
    large = planner(make, search=16, pool={"gpusPerNode": 8})
    first = make.plan(large, observed(make, large, before, [pod]), make.settings)
    (group,) = sets_of(first.writes)
    assert not [ref for ref in first.deletions if ref.kind == "Deployment"]
    children = [*before, group]
    done = make.plan(large, observed(make, large, children, [pod, *pods_of(group)]), make.settings)
    assert [ref.name for ref in done.deletions if ref.kind == "Deployment"] == [deployment["metadata"]["name"]]
    # And back.
    back = make.plan(small, observed(make, small, children, [pod, *pods_of(group)]), make.settings)
    assert group["metadata"]["name"] in [ref.name for ref in back.deletions]


def test_a_steady_group_is_written_no_second_time(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2})
    desired = make.plan(policy, observed(make, policy), make.settings).desired
    pods = [pod for group in sets_of(desired) for pod in pods_of(group)]
    once = make.plan(policy, observed(make, policy, desired, pods), make.settings)
    again = make.plan(policy, observed(make, policy, desired, pods, once.status), make.settings)
    assert not again.writes
    assert not again.deletions
    assert not again.status_changed


@pytest.mark.parametrize(
    ("parts", "reason", "words"),
    [
        (
            {"pools": [{"name": "line", "accelerator": "h100", "resources": {"limits": {"nvidia.com/gpu": 4}}}]},
            "TooFewGpus",
            "gives each pod 4 of NVIDIA's resources, and engine.parallel puts 16 ranks in it; raise",
        ),
        (
            {"pools": [{"name": "mig", "accelerator": "h100", "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}]},
            "TooFewGpus",
            "pool mig gives each pod 1",
        ),
        (
            {
                "model": {"family": "pi05", "source": {"path": "/srv/x"}},
                "engine": {"parallel": {"dp": 16}},
                "pools": [{"name": "line", "accelerator": "h100", "gpusPerNode": 8}],
            },
            "MeshTooLarge",
            "replicas need no common pod: lower engine.parallel.dp and raise the number of workers",
        ),
    ],
)
def test_a_pod_with_fewer_gpus_than_its_ranks_is_refused(make: Any, parts: Json, reason: str, words: str) -> None:
    model = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}}
    policy = make.policy(**{"model": model, "engine": {"parallel": {"search": 16}}, **parts})
    result = make.plan(policy, observed(make, policy), make.settings)
    (accepted,) = [found for found in result.status["conditions"] if found["type"] == "Accepted"]
    assert (accepted["status"], accepted["reason"]) == ("False", reason)
    assert words in accepted["message"]
    assert not result.writes


def test_rolling_never_leaves_fewer_groups_than_serve_and_never_makes_two_extra() -> None:
    """Every state of up to three groups: as many serve as before, one more than wanted exists, and it ends."""
    for wanted, olds, news in itertools.product(range(4), range(4), range(4)):
        old = {f"old-{index}": True for index in range(olds)}
        for ready in itertools.product([True, False], repeat=min(news, wanted)):
            current = dict(enumerate(ready))
            chosen = gangs.roll(wanted, current, old)
            serving = sum(current[number] for number in chosen.numbers if number in current) + len(chosen.kept)
            assert serving >= min(wanted, sum(ready) + olds)
            assert len(chosen.numbers) + len(chosen.kept) <= max(wanted + 1, len(current) + len(chosen.kept))
    current, old, turns = {}, {f"old-{index}": True for index in range(3)}, 0
    while old or len(current) < 3:
        chosen = gangs.roll(3, current, old)
        current = dict.fromkeys(chosen.numbers, True)
        old = dict.fromkeys(chosen.kept, True)
        turns += 1
        assert turns < 10
    assert len(current) == 3


def test_groups_are_put_together_one_at_a_time_where_room_is_short() -> None:
    """Two groups that hold half of their pods each would wait for each other for ever."""
    short = gangs.roll(3, {0: False, 1: False, 2: False}, {}, starved=True)
    assert short.numbers == (0,)
    later = gangs.roll(3, {0: True, 1: False, 2: False}, {}, starved=True)
    assert later.numbers == (0, 1)
    # An old group makes room for a new one, but never the only one.
    assert len(gangs.roll(2, {0: False}, {"a": True, "b": True}, starved=True, held=True).kept) == 1
    assert gangs.roll(1, {0: False}, {"a": True}, starved=True, held=True).kept == {"a"}
    # A queue admits a group as a whole: nothing is half placed, and none loses its turn.
    assert gangs.roll(3, {0: False, 1: False, 2: False}, {}, held=True).numbers == (0, 1, 2)
    assert len(gangs.roll(2, {0: False}, {"a": True, "b": True}, held=True).kept) == 1
    assert gangs.roll(1, {0: False}, {"a": True}, held=True).kept == {"a"}
    # What has all its room stays beside it.
    assert gangs.roll(4, {0: False, 1: False, 2: False, 3: False}, {}, starved=True, placed={0, 2}).numbers == (0, 1, 2)
    # An old group that does not serve goes at once.
    assert gangs.roll(1, {0: False}, {"a": False}).kept == frozenset()


def test_a_group_leaves_a_failing_node_as_a_whole(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8, "minReplicas": 2})
    one, two = sets_of(make.plan(policy, observed(make, policy), make.settings).desired)
    pods = [*pods_of(one), *pods_of(two)]
    for pod, node in zip(pods, ("a", "b", "c", "d"), strict=True):
        pod["spec"]["nodeName"] = node
    fault = healing.NodeFault("b", False, "node b says GpuError=True")
    assert [found.pod for found in healing.removals(pods, {"b": fault})] == [
        pod["metadata"]["name"] for pod in pods[:2]
    ]


@pytest.mark.parametrize("policy", ["p", "a-policy-with-the-longest-name-there-can-b"[:40]])
def test_names_of_groups_fit_into_labels(make: Any, policy: str) -> None:
    """A pod's name is its host name, and a StatefulSet's name with a hash is a label: 63 characters each."""
    body = make.body(name=policy)
    body["spec"] = {
        "model": {"family": "vjepa2-ac", "source": {"path": "/srv/x"}},
        "engine": {"parallel": {"search": 16}},
        "pools": [{"name": "a-pool-named-at-full"[:20], "accelerator": "h100", "gpusPerNode": 1, "minReplicas": 100}],
        "slo": {"controlBudgetMs": 100},
    }
    found = spec.parse(body)
    sets = sets_of(make.plan(found, observed(make, found), make.settings).desired)
    assert len(sets) == 100
    assert all(len(f"{group['metadata']['name']}-15") <= 63 and len(group["metadata"]["name"]) <= 52 for group in sets)
    assert len({group["metadata"]["name"] for group in sets}) == 100
    # The StatefulSet of a LeaderWorkerSet's other pods is named after the first pod, and its revision is a label.
    of_lws = sets_of_lws(make.plan(found, observed(make, found, kinds=WITH_LWS), make.settings).desired)
    assert len(of_lws) == 100
    assert all(len(f"{group['metadata']['name']}-0-0123456789") <= 63 for group in of_lws)


def test_a_group_is_drift_corrected_like_any_child(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8})
    desired = make.plan(policy, observed(make, policy), make.settings).desired
    (group,) = sets_of(desired)
    edited = copy.deepcopy(group)
    edited["spec"]["replicas"] = 1
    assert diff.needs_apply(group, edited)
    children = [*[found for found in desired if found["kind"] != "StatefulSet"], edited]
    assert sets_of(make.plan(policy, observed(make, policy, children), make.settings).writes)


def test_plain_workers_are_units_by_themselves(make: Any) -> None:
    pods = [make.pod("b"), make.pod("a")]
    assert group_pods.leaders(pods) == pods
    assert list(group_pods.units(pods)) == ["a", "b"]
    assert group_pods.index_of(pods[0]) is None


def test_groups_of_a_revision_that_is_stored_no_more_are_left_alone(make: Any) -> None:
    rollout = {"strategy": "Progressive"}
    old = planner(make, pool={"gpusPerNode": 8}, rollout=rollout)
    before = make.plan(old, observed(make, old), make.settings)
    (group,) = sets_of(before.desired)
    pods = pods_of(group)
    first = make.plan(old, observed(make, old, before.desired, pods, before.status), make.settings)
    new = planner(make, pool={"gpusPerNode": 8, "image": "registry.example/worker:2"}, rollout=rollout)
    lost = [found for found in before.desired if found["kind"] != "ControllerRevision"]
    later = make.plan(new, observed(make, new, lost, pods, first.status), make.settings)
    gone = {(ref.kind, ref.name) for ref in later.deletions}
    assert ("StatefulSet", group["metadata"]["name"]) not in gone
    assert ("Service", naming.ranks_name("reach")) not in gone, "its pods find each other by it"
    assert len(later.route.targets) == 1


def test_a_group_whose_controller_does_not_run_is_no_silence(make: Any) -> None:
    policy = planner(make, pool={"gpusPerNode": 8})
    (group,) = sets_of_lws(make.plan(policy, observed(make, policy, kinds=WITH_LWS), make.settings).desired)

    def told(seconds: float, **more: Any) -> tuple[Json, float | None]:
        since = datetime.fromisoformat(make.now) - timedelta(seconds=seconds)
        live = copy.deepcopy(group) | more
        live["metadata"]["creationTimestamp"] = since.strftime("%Y-%m-%dT%H:%M:%SZ")
        result = make.plan(policy, observed(make, policy, [live], kinds=WITH_LWS), make.settings)
        (found,) = [one for one in result.status["conditions"] if one["type"] == "Degraded"]
        return found, result.again_s

    young, again_s = told(30)
    assert (young["status"], again_s) == ("False", 90.0)
    old, again_s = told(120)
    assert (old["status"], old["reason"], again_s) == ("True", "ControllerAbsent", None)
    assert "LeaderWorkerSet's controller has not looked at it" in old["message"]
    # The same words an hour later: they are no new status.
    assert told(3600)[0]["message"] == old["message"]
    assert told(3600, status={"conditions": []})[0]["status"] == "False"
