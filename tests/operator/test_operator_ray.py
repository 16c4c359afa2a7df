"""What a Ray cluster's own ways leave of a pool's fields, and how many of its pods a drain may take."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from taktline_operator import grouping, kueue, naming, ray_services
from taktline_operator.lineup import Line, Lineup
from taktline_protocol.errors import TaktlineError

Json = dict[str, Any]
PLANNER = {"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"}
POOL = {"name": "line", "accelerator": "h100", "image": "registry.example/worker-ray:1"}


def on_ray(make: Any, search: int = 4, **pool: Any) -> Any:
    engine = {"runtime": "ray", "parallel": {"search": search}}
    return make.policy(model=PLANNER, engine=engine, pools=[POOL | pool])


@pytest.mark.parametrize("field", [{"startupSeconds": 300}, {"gpusPerNode": 8}, {"mesh": {"port": 29500}}])
def test_a_field_that_ray_has_no_use_for_is_refused_not_ignored(make: Any, field: Json) -> None:
    with pytest.raises(TaktlineError, match=r"leave pools\[\]\.startupSeconds, gpusPerNode and mesh out"):
        on_ray(make, **field)
    assert on_ray(make).spec.engine.runtime == "ray"
    # Without Ray all of them hold.
    make.policy(model=PLANNER, engine={"parallel": {"search": 4}}, pools=[POOL | field])


def services(line: Line, *, running: int) -> list[Json]:
    """The RayServices of a line, of which the first so many serve."""
    made = ray_services.of(line, "registry.example/worker-ray:1", ()).objects
    active = {"rayClusterName": "c", "applicationStatuses": {"planner": {"status": "RUNNING"}}}
    serving = {"status": {"activeServiceStatus": active}}
    return [found | (serving if number < running else {}) for number, found in enumerate(made)]


def budget(policy: Any, lines: Lineup, children: list[Json]) -> Json:
    gang_of = grouping.of(lines, {}, lambda pool: "registry.example/worker-ray:1", children)
    found: Json = grouping.budget(policy, policy.spec.pools[0], lines, gang_of)
    return dict(found["spec"])


def test_a_drain_takes_one_pod_at_a_time_also_while_a_candidate_runs_beside(make: Any) -> None:
    policy, trying = on_ray(make, 4), on_ray(make, 2)
    stable = Line(policy=policy, pool=policy.spec.pools[0], track="", replicas=2)
    candidate = Line(policy=trying, pool=trying.spec.pools[0], track="b", replicas=1)
    alone = budget(policy, Lineup(stable=(stable,)), services(stable, running=2))
    assert alone["minAvailable"] == 2 * 5 - 1
    lines = Lineup(stable=(stable,), candidate=(candidate,))
    both = services(stable, running=2) + services(candidate, running=1)
    assert budget(policy, lines, both)["minAvailable"] == 2 * 5 + 3 - 1
    # A candidate that never starts must not hold every drain up.
    hung = services(stable, running=2) + services(candidate, running=0)
    assert budget(policy, lines, hung)["minAvailable"] == 2 * 5 - 1
    # It takes over: what leaves is counted as long as it runs.
    finishing = Lineup(stable=(stable,), candidate=(candidate,), finishing=True)
    assert budget(policy, finishing, both)["minAvailable"] == 3 + 2 * 5 - 1


def test_a_pool_that_moves_to_ray_counts_its_plain_workers(make: Any) -> None:
    """Kubernetes cannot say of a RayCluster how many pods it should have: then no maxUnavailable works, for any pod."""
    plain = make.policy(model=PLANNER, pools=[POOL])
    trying = on_ray(make, 2)
    stable = Line(policy=plain, pool=plain.spec.pools[0], track="", replicas=3)
    candidate = Line(policy=trying, pool=trying.spec.pools[0], track="b", replicas=1)
    lines = Lineup(stable=(stable,), candidate=(candidate,))
    found = budget(plain, lines, services(candidate, running=1))
    assert found["minAvailable"] == 3 + 3 - 1
    assert "maxUnavailable" not in found


def test_the_head_names_the_ports_that_kuberay_looks_for(make: Any) -> None:
    """KubeRay takes ports of its own only where a container names none, and deploys by the one called dashboard."""
    policy = on_ray(make)
    line = Line(policy=policy, pool=policy.spec.pools[0], track="", replicas=1)
    (service,) = ray_services.of(line, "registry.example/worker-ray:1", ()).objects
    cluster = service["spec"]["rayClusterConfig"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports["dashboard"] == 8265
    assert {"gcs-server", "serve", "grpc", "metrics"} <= ports.keys()
    (ranks,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert "dashboard" not in {port["name"] for port in ranks["ports"]}


def test_the_cluster_that_serves_goes_on_while_kuberay_brings_up_another(make: Any) -> None:
    """KubeRay takes what it said of the first cluster's application back as soon as a second is under way."""
    policy = on_ray(make)
    line = Line(policy=policy, pool=policy.spec.pools[0], track="", replicas=1)
    (service,) = services(line, running=1)
    assert ray_services.serving_cluster(service) == "c"
    assert ray_services.look_again_s(policy, [service]) == 30.0
    upgrading = service | {
        "status": {"activeServiceStatus": {"rayClusterName": "c"}, "pendingServiceStatus": {"rayClusterName": "d"}}
    }
    assert ray_services.serving_cluster(upgrading) == "c"
    assert ray_services.look_again_s(policy, [upgrading]) == 1.0
    # What it does say is believed, and a first cluster that is not active yet serves nobody.
    failing = {"rayClusterName": "c", "applicationStatuses": {"planner": {"status": "UNHEALTHY"}}}
    pending = {"pendingServiceStatus": {"rayClusterName": "d"}}
    assert ray_services.serving_cluster({"status": pending | {"activeServiceStatus": failing}}) == ""
    assert ray_services.serving_cluster({"status": pending}) == ""
    assert ray_services.serving_cluster({"status": {"activeServiceStatus": {"rayClusterName": "c"}}}) == ""


def test_what_ray_says_of_an_application_that_fails_is_quoted(make: Any) -> None:
    policy = on_ray(make)
    line = Line(policy=policy, pool=policy.spec.pools[0], track="", replicas=1)
    (service,) = services(line, running=1)
    assert ray_services.fault([service]) is None
    failed = {"planner": {"status": "DEPLOY_FAILED", "message": "checkpoint_invalid:\n no sidecar"}}
    pending = {"rayClusterName": "d", "applicationStatuses": failed}
    found = ray_services.fault([service | {"status": service["status"] | {"pendingServiceStatus": pending}}])
    assert found is not None
    assert found.reason == "ApplicationFailed"
    assert found.message.endswith("cluster d: its application is DEPLOY_FAILED: checkpoint_invalid: no sidecar")
    # The cluster that serves goes on meanwhile.
    assert ray_services.is_serving(service)


def queued(make: Any, name: str = "robots") -> Line:
    engine = {"runtime": "ray", "parallel": {"search": 4}}
    policy = make.policy(model=PLANNER, engine=engine, pools=[POOL], queue={"name": name})
    return Line(policy=policy, pool=policy.spec.pools[0], track="", replicas=1)


def test_a_ray_service_that_the_version_before_queued_as_a_whole_is_made_anew(make: Any) -> None:
    """Kueue suspended it, and KubeRay never starts one that was: nothing is lost with it."""
    line = queued(make)
    (now,) = ray_services.of(line, "registry.example/worker-ray:1", ()).objects
    before = copy.deepcopy(now)
    before["metadata"]["labels"] |= {kueue.QUEUE_LABEL: "robots"}
    before["spec"]["rayClusterConfig"] |= {"suspend": True}
    for part in (before["spec"]["rayClusterConfig"]["headGroupSpec"],):
        del part["template"]["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"]
    gang = ray_services.of(line, "registry.example/worker-ray:1", [before])
    assert gang.objects == (), "it is not written before it is gone: what tells it apart would be lost"
    assert gang.removed == ((ray_services.KIND, now["metadata"]["name"]),)
    # Gone, it comes again as one whose pods wait.
    assert ray_services.of(line, "registry.example/worker-ray:1", ()).objects == (now,)
    # One of this version that a site's default queue suspends is that site's: no loop of deletions.
    defaulted = copy.deepcopy(now)
    defaulted["metadata"]["labels"] |= {kueue.QUEUE_LABEL: "robots"}
    defaulted["spec"]["rayClusterConfig"] |= {"suspend": True}
    left = ray_services.of(line, "registry.example/worker-ray:1", [defaulted])
    assert left.removed == ()
    assert left.objects == (now,)


def test_the_operator_of_now_starts_no_ray_cluster_of_earlier_anew(make: Any) -> None:
    """A name of the group that changes with the operator brings up a second cluster, and the quota has no room."""
    line = queued(make)
    (made,) = ray_services.of(line, "registry.example/worker-ray:1", ()).objects
    cluster = made["spec"]["rayClusterConfig"]
    pods = [copy.deepcopy(part["template"]) for part in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:  # as they were named by the versions before: without what makes them a group
        labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
        named = labels.pop("kueue.x-k8s.io/pod-group-name")
        del labels["kueue.x-k8s.io/managed"]
        for key in [key for key in annotations if key.startswith("kueue.x-k8s.io/")]:
            del annotations[key]
    assert named == f"{made['metadata']['name']}-{naming.content_hash(pods)}"


def test_what_makes_another_ray_cluster_makes_another_group(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of a second cluster in the group of the first would be too many for it, and Kueue takes those away."""

    def group(line: Line) -> str:
        (made,) = ray_services.of(line, "registry.example/worker-ray:1", ()).objects
        labels = made["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
        return str(labels["kueue.x-k8s.io/pod-group-name"])

    line = queued(make)
    before = group(line)
    assert group(line) == before
    # A later version of the operator may start ranks otherwise, with the same pods.
    monkeypatch.setattr(ray_services, "HEAD_PARAMETERS", {"num-cpus": "1"})
    assert group(line) != before
