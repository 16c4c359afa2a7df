"""Names, labels and annotations of everything the operator writes, and the hash that identifies content."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

MANAGER = "taktline-operator"  # field manager of every write

LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_POLICY = "taktline.dev/policy"
LABEL_POOL = "taktline.dev/pool"
LABEL_TRACK = "taktline.dev/track"  # tells the workers of a second Deployment of one pool apart
LABEL_GROUP = "taktline.dev/group"  # the pods of one worker, where it has several
LABEL_QUARANTINE = "taktline.dev/quarantine"  # a node that has it gets no workers
LABEL_ACCELERATOR = "taktline.dev/accelerator"

ANNOTATION_APPLIED = (
    "taktline.dev/applied-hash"  # content of the last apply, so that an unchanged object costs no write
)
ANNOTATION_TEMPLATE = "taktline.dev/template-hash"  # which spec a pod was built from
ANNOTATION_REVISION = "taktline.dev/revision"
ANNOTATION_ROUTES = "taktline.dev/routes-hash"
ANNOTATION_REVISION_HASH = "taktline.dev/revision-hash"  # which stored revision a Deployment runs
ANNOTATION_GROUP_SIZE = "taktline.dev/group-size"  # pods of the group that a pod belongs to
ANNOTATION_SERVED = "taktline.dev/served"  # most groups that served at a time since the rollout that goes on began
ANNOTATION_ROLLOUT = "taktline.dev/rollout"  # a person's word on a rollout: pause, resume, promote, abort, retry

WORKER_NAME = "taktline-worker"
ROUTES_NAME = "taktline-routes"
ROUTES_FILE = "routes.json"
ENGINE_FILE = "engine.json"
WORKER_PORT = 50051
HEALTH_PORT = 50052  # plain health checks, where the worker's port speaks TLS
METRICS_PORT = 9464  # what OpenTelemetry's Prometheus exporters listen on by default
METRICS_PORT_NAME = "metrics"

GATEWAY_SELECTOR = f"{LABEL_NAME}=taktline-gateway"
CHILD_SELECTOR = f"{LABEL_MANAGED_BY}={MANAGER},{LABEL_POLICY}"


class Ref(NamedTuple):
    """Kind and name of an object in the PolicyDeployment's namespace."""

    kind: str
    name: str


def ref_of(found: dict[str, Any]) -> Ref:
    """Kind and name of an object."""
    return Ref(found["kind"], found["metadata"]["name"])


def worker_selector(policy: str, pool: str | None = None) -> dict[str, str]:
    """Labels that select a policy's worker pods, or those of one pool. They never change: selectors are immutable."""
    selector = {LABEL_NAME: WORKER_NAME, LABEL_POLICY: policy}
    return selector | {LABEL_POOL: pool} if pool is not None else selector


def labels(policy: str, pool: str | None = None) -> dict[str, str]:
    """Labels of an object that belongs to a policy."""
    return worker_selector(policy, pool) | {
        LABEL_INSTANCE: policy,
        LABEL_COMPONENT: "worker",
        LABEL_PART_OF: "taktline",
        LABEL_MANAGED_BY: MANAGER,
    }


def own_selector(policy: str) -> str:
    """A label selector of the objects that the operator makes for a policy."""
    return f"{LABEL_MANAGED_BY}={MANAGER},{LABEL_POLICY}={policy}"


def selector_text(selector: dict[str, str]) -> str:
    """A label selector as kubectl and the scale subresource write it."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))


def workload_name(policy: str, pool: str, track: str = "") -> str:
    """Name of a pool's disruption budget, and of its Deployment; `track` names a second one beside it."""
    return f"{policy}-{pool}-{track}" if track else f"{policy}-{pool}"


def config_name(policy: str, pool: str, content: str) -> str:
    """Name of the ConfigMap of a pool: addressed by content, so that pods of two revisions never share one."""
    return f"{policy}-{pool}-{content}"


def service_name(policy: str) -> str:
    """Name of the headless Service of a policy."""
    return f"{policy}-workers"


def ranks_name(policy: str) -> str:
    """Name of the headless Service by which the pods of a policy's groups find each other."""
    return f"{policy}-ranks"


def content_hash(value: Any) -> str:
    """Ten hex digits that change when the JSON value does."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:10]
