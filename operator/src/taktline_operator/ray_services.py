"""Builds a planner on a Ray cluster: one RayService for each worker, whose head takes the robots' observations.

KubeRay makes the pods, replaces clusters without a gap, and restarts what is lost. A head pod counts as the worker once
KubeRay says that its cluster serves: it must be ready before the application may even be deployed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from typing import Any

from taktline_operator import accelerators, faults, gangs, groups, kueue, naming, workload
from taktline_operator.faults import Fault
from taktline_operator.gangs import Gang
from taktline_operator.lineup import Line
from taktline_operator.meshes import Shape
from taktline_operator.spec import PolicyDeployment, Pool

Json = dict[str, Any]

API_VERSION = "ray.io/v1"
KIND = "RayService"
APPLICATION = "planner"
IMPORT_PATH = "taktline_worker.ray:app"
RAY_FOLDER = "/tmp/ray"  # noqa: S108 - where Ray keeps sockets and logs; a mount of the pod
# Nothing but the Planner runs on the head, and it needs no core of Ray's accounts.
HEAD_PARAMETERS = {"num-cpus": "0"}
STARTING_LOOK_S = 5.0
UPGRADE_LOOK_S = 1.0
SERVING_LOOK_S = 30.0
# Ports that KubeRay looks for by name on the head: it takes its own only where a container names none. It deploys the
# application by `dashboard`: without that port a cluster never serves.
_HEAD_PORTS = {"dashboard": 8265, "gcs-server": 6379, "client": 10001, "serve": 8000}
_FIRST_FORM = "f0acc139cc"
"""`_form` of the clusters of earlier versions, whose groups are named by the templates alone: a name that changed with
the operator would start every Ray cluster anew."""
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def of(line: Line, image: str, children: Sequence[Json]) -> Gang:
    """The RayServices of a line: one for each worker, and what they take the place of.

    One that waits in a queue as a whole would never run: it goes, and comes again as one whose pods wait.
    """
    head = _template(line, image, head=True)
    own = [child for child in children if gangs.is_of(line, child)]
    before = {child["metadata"]["name"] for child in own if _is_from_before(child, line)}
    made = tuple(_service(line, image, head, number) for number in range(line.replicas))
    made = tuple(found for found in made if found["metadata"]["name"] not in before)
    names = {found["metadata"]["name"] for found in made}
    services = {child["metadata"]["name"]: child for child in own if child["kind"] == KIND}
    serving = sum(is_serving(child) for child in services.values())
    removed = [(KIND, name) for name in services if name not in names]
    if serving >= line.replicas:
        kinds = ("Deployment", "StatefulSet", groups.LWS_KIND)
        removed += [(child["kind"], child["metadata"]["name"]) for child in own if child["kind"] in kinds]
    shape = Shape(1 + line.policy.spec.engine.gpus, 1)
    return Gang(head, shape, KIND, made, frozenset(), tuple(sorted(removed)), serving)


def _is_from_before(child: Json, line: Line) -> bool:
    return child["kind"] == KIND and kueue.is_from_before(child, line.policy)


def is_serving(service: Json) -> bool:
    """Whether the application of a RayService runs."""
    return bool(serving_cluster(service))


def serving_cluster(service: Json) -> str:
    """The Ray cluster that serves for a RayService; empty while none does.

    While KubeRay brings up another one beside it, it says nothing of what runs on the first, which serves on: a cluster
    is the active one only from when its application ran.
    """
    active = service.get("status", {}).get("activeServiceStatus", {})
    applications = active.get("applicationStatuses", {})
    cluster: str = active.get("rayClusterName", "")
    untold = not applications and _is_upgraded(service)
    return cluster if untold or applications.get(APPLICATION, {}).get("status") == "RUNNING" else ""


def _is_upgraded(service: Json) -> bool:
    """Whether another Ray cluster is brought up beside the one that serves."""
    return bool(service.get("status", {}).get("pendingServiceStatus", {}).get("rayClusterName"))


def fault(children: Iterable[Json]) -> Fault | None:
    """The first application that Ray could not deploy, or calls unhealthy, in Ray's words; None where there is none."""
    for service in sorted(
        (child for child in children if child["kind"] == KIND), key=lambda found: str(found["metadata"]["name"])
    ):
        for side in ("activeServiceStatus", "pendingServiceStatus"):
            part = service.get("status", {}).get(side, {})
            application = part.get("applicationStatuses", {}).get(APPLICATION, {})
            if (said := application.get("status", "")) in _FAILED:
                words = faults.trimmed(application.get("message", "")) or "Ray says no more"
                where = f"rayservice/{service['metadata']['name']}: cluster {part.get('rayClusterName', '')}"
                return Fault("ApplicationFailed", f"{where}: its application is {said}: {words}")
    return None


def serving_clusters(children: Iterable[Json]) -> frozenset[str]:
    """The Ray clusters that serve, of all RayServices among `children`."""
    return frozenset(name for child in children if child["kind"] == KIND and (name := serving_cluster(child)))


def look_again_s(policy: PolicyDeployment, children: Iterable[Json]) -> float | None:
    """When to look again, in s; None where nothing runs on Ray.

    RayServices are not watched, for a cluster may have none, and their pods change nothing when the application begins
    or ceases to run.
    """
    services = [child for child in children if child["kind"] == KIND]
    if policy.spec.engine.runtime != "ray" and not services:
        return None
    if not all(map(is_serving, services)):
        return STARTING_LOOK_S
    # No event of a pod tells when another cluster takes over, and then the first is soon gone.
    return UPGRADE_LOOK_S if any(map(_is_upgraded, services)) else SERVING_LOOK_S


def disruption_budget(policy: PolicyDeployment, pool: Pool, pods: int) -> Json:
    """The PodDisruptionBudget of a pool: one pod at a time.

    A count of what must stay: Kubernetes cannot tell from a RayCluster how many pods it wants, which what may go needs.

    Args:
        pods: those of the pool that serve robots, or will, whatever makes them: its selector covers them all.
    """
    made = groups.disruption_budget(policy, pool)
    del made["spec"]["maxUnavailable"]
    made["spec"]["minAvailable"] = max(0, pods - 1)
    return made


def _service(line: Line, image: str, head: Json, number: int) -> Json:
    ranks = line.policy.spec.engine.gpus
    metadata = groups.metadata(line, f"{groups.base_name(line)}-{number}")
    made, rank = copy.deepcopy(head), _template(line, image, head=False)
    cluster = {
        "headGroupSpec": {"rayStartParams": HEAD_PARAMETERS, "template": made},
        "workerGroupSpecs": [
            {
                "groupName": "ranks",
                "replicas": ranks,
                "minReplicas": ranks,
                "maxReplicas": ranks,
                "rayStartParams": {},
                "template": rank,
            }
        ],
    }
    # Any change makes KubeRay bring up another cluster beside the one that serves, whose pods are another group.
    form = _form(cluster)
    told = [made, rank] if form == _FIRST_FORM else [made, rank, form]
    group = f"{metadata['name']}-{naming.content_hash(told)}"
    for template in (made, rank):
        kueue.as_group(template, line.policy, group, 1 + ranks)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "serveConfigV2": _serve_config(line.policy),
            "upgradeStrategy": {"type": "NewCluster"},
            "rayClusterConfig": cluster,
        },
    }


def _form(cluster: Json) -> str:
    """Digest of what a cluster has besides its pods' templates, and how many pods, which they say."""
    left_out = ("template", "replicas", "minReplicas", "maxReplicas")
    parts = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    rest = {name: value for name, value in cluster.items() if name not in ("headGroupSpec", "workerGroupSpecs")}
    return naming.content_hash(
        [rest, [{name: value for name, value in part.items() if name not in left_out} for part in parts]]
    )


def _serve_config(policy: PolicyDeployment) -> str:
    arguments = {
        "config": f"{workload.CONFIG_MOUNT}/{naming.ENGINE_FILE}",
        "listen": f"0.0.0.0:{naming.WORKER_PORT}",
        "metrics_listen": f"0.0.0.0:{naming.METRICS_PORT}",
    } | {f"tls_{name}": path for name, path in workload.tls_files(policy).items()}
    application = {"name": APPLICATION, "import_path": IMPORT_PATH, "route_prefix": None, "args": arguments}
    return json.dumps({"applications": [application]}, indent=1)


def _template(line: Line, image: str, *, head: bool) -> Json:
    """The pod template of the head, which has no GPU, or of a rank, which has one."""
    policy, pool = line.policy, line.pool
    made = workload.pod_template(policy, pool, image, line.track)
    del made["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE]
    made["metadata"]["annotations"][naming.ANNOTATION_GROUP_SIZE] = str(1 + policy.spec.engine.gpus)
    made["metadata"]["labels"] |= kueue.pod_labels(policy)
    spec = made["spec"]
    spec["topologySpreadConstraints"] = spec["topologySpreadConstraints"][:1]
    container = spec["containers"][0]
    # KubeRay writes the command and its own probes.
    for name in ("command", *_PROBES):
        container.pop(name, None)
    container["volumeMounts"].append({"name": "ray", "mountPath": RAY_FOLDER})
    spec["volumes"].append({"name": "ray", "emptyDir": {}})
    container["resources"] = accelerators.resources("cpu", {}, {}) if head else workload.resources(pool, 1)
    if head:
        ports = [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _HEAD_PORTS.items()]
        container["ports"] = [*container["ports"], *ports]
        spec.pop("resourceClaims", None)
        spec["affinity"] = accelerators.node_affinity("cpu")
    made["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE] = naming.content_hash(made)
    return made
