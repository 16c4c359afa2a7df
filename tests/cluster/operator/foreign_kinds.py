"""CustomResourceDefinitions of other products as their published types make them: the API server refuses as theirs.

All but one are generated from the products' own Go types (foreign_crds/README.md). LeaderWorkerSet's module is not to
be had from the module proxy: its definition follows the fields, defaults and bounds of its v1 types, and has the pod
template that was generated for a RayService, which is Kubernetes' own in both.
"""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FOLDER = Path(__file__).parent / "foreign_crds"


def published() -> list[Json]:
    """Every generated definition."""
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(FOLDER.glob("*.json.gz"))]


def everything() -> list[Json]:
    """Every definition that the tests install."""
    found = published()
    ray = next(crd for crd in found if crd["spec"]["names"]["kind"] == "RayService")
    cluster = ray["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    head = cluster["rayClusterConfig"]["properties"]["headGroupSpec"]["properties"]
    return [*found, _leader_worker_set(head["template"])]


def _object(required: tuple[str, ...] = (), **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _enum(*values: str, **more: Any) -> Json:
    return {"type": "string", "enum": list(values), **more}


def _leader_worker_set(pod_template: Json) -> Json:
    """LeaderWorkerSet v1, but for claim templates, which nothing here writes."""
    number: Json = {"type": "integer", "format": "int32"}
    share: Json = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    restarts = _enum(
        "Default",
        "RecreateGroupOnPodRestart",
        "RecreateGroupAfterStart",
        "None",
        default="RecreateGroupOnPodRestart",
    )
    rolling = _object(
        partition=number | {"default": 0}, maxUnavailable=share | {"default": 1}, maxSurge=share | {"default": 0}
    )
    sub_groups = _object(
        subGroupPolicyType=_enum("LeaderWorker", "LeaderExcluded", default="LeaderWorker"), subGroupSize=number
    )
    template = _object(
        ("workerTemplate",),
        leaderTemplate=copy.deepcopy(pod_template),
        workerTemplate=copy.deepcopy(pod_template),
        size=number | {"default": 1},
        restartPolicy=restarts,
        subGroupPolicy=sub_groups,
    )
    rollout = _object(
        ("type",), type=_enum("RollingUpdate", default="RollingUpdate"), rollingUpdateConfiguration=rolling
    )
    spec = _object(
        ("leaderWorkerTemplate",),
        replicas=number | {"default": 1},
        startupPolicy=_enum("LeaderCreated", "LeaderReady", default="LeaderCreated"),
        networkConfig=_object(("subdomainPolicy",), subdomainPolicy=_enum("Shared", "UniquePerReplica")),
        rolloutStrategy=rollout,
        leaderWorkerTemplate=template,
    )
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": spec, "status": status}}
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.hpaPodSelector",
    }
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, "scale": scale},
    }
    group, plural = "leaderworkerset.x-k8s.io", "leaderworkersets"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": "LeaderWorkerSet",
                "listKind": "LeaderWorkerSetList",
                "plural": plural,
                "singular": "leaderworkerset",
                "shortNames": ["lws"],
            },
            "versions": [version],
        },
    }
