"""Subsets of other products' CRDs, for tests: the fields that the operator writes, with the types that they have there.

Not the products' own files: those are hundreds of kilobytes of pod templates. Fields and bounds follow the Go types of
LeaderWorkerSet v1, RayService v1 (KubeRay), ScaledObject v1alpha1 (KEDA) and LocalQueue v1beta1 (Kueue). Unknown fields
are pruned by the API server, so an object that comes back whole has no field that the product does not know.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_NUMBER: Json = {"type": "integer", "format": "int32", "minimum": 0}
_OPEN: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_INT_OR_STRING: Json = {"x-kubernetes-int-or-string": True}


def _object(required: tuple[str, ...] = (), **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _enum(*values: str) -> Json:
    return {"type": "string", "enum": list(values)}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _crd(group: str, version: str, kind: str, plural: str, spec: Json, status: Json | None = None) -> Json:
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    schema = {"type": "object", "properties": {"spec": spec, "status": status or _OPEN}}
    served = {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": names,
            "versions": [served | {"subresources": {"status": {}}}],
        },
    }


_POD_TEMPLATE = _object(metadata=_OPEN, spec=_OPEN)

LEADER_WORKER_SET = _crd(
    "leaderworkerset.x-k8s.io",
    "v1",
    "LeaderWorkerSet",
    "leaderworkersets",
    _object(
        ("leaderWorkerTemplate",),
        replicas=_NUMBER,
        startupPolicy=_enum("LeaderCreated", "LeaderReady"),
        networkConfig=_object(("subdomainPolicy",), subdomainPolicy=_enum("Shared", "UniquePerReplica")),
        rolloutStrategy=_object(
            ("type",),
            type=_enum("RollingUpdate"),
            rollingUpdateConfiguration=_object(
                partition=_NUMBER, maxUnavailable=_INT_OR_STRING, maxSurge=_INT_OR_STRING
            ),
        ),
        leaderWorkerTemplate=_object(
            ("workerTemplate",),
            leaderTemplate=_POD_TEMPLATE,
            workerTemplate=_POD_TEMPLATE,
            size=_NUMBER | {"minimum": 1},
            restartPolicy=_enum("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        ),
    ),
)

RAY_SERVICE = _crd(
    "ray.io",
    "v1",
    "RayService",
    "rayservices",
    _object(
        ("rayClusterConfig",),
        serveConfigV2=_TEXT,
        upgradeStrategy=_object(type=_TEXT),
        rayClusterConfig=_object(
            ("headGroupSpec",),
            suspend={"type": "boolean"},
            rayVersion=_TEXT,
            headGroupSpec=_object(
                ("template",),
                rayStartParams={"type": "object", "additionalProperties": _TEXT},
                template=_POD_TEMPLATE,
            ),
            workerGroupSpecs=_list(
                _object(
                    ("groupName", "maxReplicas", "minReplicas", "template"),
                    groupName=_TEXT,
                    replicas=_NUMBER,
                    minReplicas=_NUMBER,
                    maxReplicas=_NUMBER,
                    rayStartParams={"type": "object", "additionalProperties": _TEXT},
                    template=_POD_TEMPLATE,
                )
            ),
        ),
    ),
)

SCALED_OBJECT = _crd(
    "keda.sh",
    "v1alpha1",
    "ScaledObject",
    "scaledobjects",
    _object(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_object(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        pollingInterval=_NUMBER | {"minimum": 1},
        cooldownPeriod=_NUMBER,
        minReplicaCount=_NUMBER,
        maxReplicaCount=_NUMBER | {"minimum": 1},
        triggers=_list(
            _object(
                ("type", "metadata"),
                type=_TEXT,
                metricType=_TEXT,
                metadata={"type": "object", "additionalProperties": _TEXT},
            )
        )
        | {"minItems": 1},
    ),
)

LOCAL_QUEUE = _crd("kueue.x-k8s.io", "v1beta1", "LocalQueue", "localqueues", _object(clusterQueue=_TEXT))

ALL = (LEADER_WORKER_SET, RAY_SERVICE, SCALED_OBJECT, LOCAL_QUEUE)
