"""Builds the objects that run one policy: ConfigMap, Deployment, disruption budget by pool; one headless Service."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from taktline_protocol import tracing
from taktline_protocol.delivery import DELIVERY_FILE
from taktline_protocol.deployment import EngineConfig

from taktline_operator import accelerators, delivery, naming, revisions
from taktline_operator.spec import PolicyDeployment, Pool

CONFIG_MOUNT = "/etc/taktline"
TLS_MOUNT = "/etc/taktline-tls"
KERNEL_MOUNT = "/kernel-cache"
KERNEL_VARIABLE = "TAKTLINE_KERNEL_CACHE"
SCRATCH_MOUNT = "/scratch"  # not /tmp: a checkpoint folder may lie under /tmp on the node
USER_ID = 10001

# Ranks of one pod exchange tensors through it where their GPUs do not reach each other; a pod's own has 64 MiB.
SHM_MOUNT = "/dev/shm"  # noqa: S108 - a mount of the pod
SHM = {"medium": "Memory", "sizeLimit": "1Gi"}

# The fields of engine.json's model that a PolicyDeployment decides; those of the engine: engine_spec.py.
MODEL_FIELDS = ("family", "path", "revision", "sha256", "cameras", "statistics")

# Loading a checkpoint, warming up and calibrating may take this long before a worker counts as broken.
STARTUP_PERIOD_S = 2
STARTUP_LIMIT_S = 1800
STARTUP_GRACE_S = 60
MIN_READY_S = 5
DRAIN_S = 60  # a worker finishes what it holds after SIGTERM; observations are far shorter than this


def engine_json(policy: PolicyDeployment, pool: Pool) -> str:
    """The engine.json of a pool: resolved, sorted, one line per key so that `kubectl get -o yaml` reads well."""
    config = EngineConfig(
        policy=policy.name,
        model=policy.spec.model_config(),
        engine=policy.spec.engine_options(accelerators.CLASSES[pool.accelerator].device),
    )
    # Exactly what the spec decides, spelled out also where a value is the protocol's default: neither a default that
    # changes there nor a field that is added may change the content, and so restart every worker.
    parts = {
        "policy": config.policy,
        "model": {name: getattr(config.model, name) for name in MODEL_FIELDS},
        "engine": policy.spec.engine.written() | {"device": config.engine.device},
    }
    return json.dumps(parts, indent=1, sort_keys=True)


def owned_metadata(policy: PolicyDeployment, name: str, pool: str | None) -> dict[str, Any]:
    """Metadata of a child: our labels, and the PolicyDeployment as the owner that takes it along when it goes."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": policy.namespace,
        "labels": naming.labels(policy.name, pool),
    }
    if policy.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": "taktline.dev/v1alpha1",
                "kind": "PolicyDeployment",
                "name": policy.name,
                "uid": policy.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return metadata


def _files(policy: PolicyDeployment, pool: Pool) -> dict[str, str]:
    """Content of a pool's ConfigMap by file name."""
    files = {naming.ENGINE_FILE: engine_json(policy, pool)}
    if policy.spec.model.source.fetched:
        wanted = msgspec.to_builtins(policy.spec.delivery_config(policy.name))
        files[DELIVERY_FILE] = json.dumps(wanted, indent=1, sort_keys=True)
    return files


def _config_name(policy: PolicyDeployment, pool: Pool) -> str:
    files = _files(policy, pool)
    # By engine.json alone where that is all there is: the names of those that run must stay.
    content = files if len(files) > 1 else files[naming.ENGINE_FILE]
    return naming.config_name(policy.name, pool.name, naming.content_hash(content))


def config_map(policy: PolicyDeployment, pool: Pool) -> dict[str, Any]:
    """The immutable ConfigMap with a pool's engine.json, and delivery.json where a checkpoint is fetched."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owned_metadata(policy, _config_name(policy, pool), pool.name),
        "immutable": True,
        "data": _files(policy, pool),
    }


def service(policy: PolicyDeployment) -> dict[str, Any]:
    """The headless Service that names the workers of a policy in DNS."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owned_metadata(policy, naming.service_name(policy.name), None),
        "spec": {
            "clusterIP": "None",
            "selector": naming.worker_selector(policy.name),
            "ports": [{"name": "grpc", "port": naming.WORKER_PORT, "protocol": "TCP", "targetPort": "grpc"}],
        },
    }


def disruption_budget(policy: PolicyDeployment, pool: Pool) -> dict[str, Any]:
    """The PodDisruptionBudget of a pool: node drains take one worker at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": owned_metadata(policy, naming.workload_name(policy.name, pool.name), pool.name),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": naming.worker_selector(policy.name, pool.name)},
        },
    }


def pod_template(policy: PolicyDeployment, pool: Pool, image: str, track: str = "") -> dict[str, Any]:
    """The pod template of a pool, with the hash of its own content. `image` holds where the pool names none."""
    template: dict[str, Any] = {
        "metadata": {
            "labels": naming.labels(policy.name, pool.name) | _track_label(track),
            "annotations": {naming.ANNOTATION_REVISION: policy.spec.revision()},
        },
        "spec": _pod_spec(policy, pool, pool.image or image),
    }
    template["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE] = naming.content_hash(template)
    return template


def template_hash(template: dict[str, Any]) -> str:
    """The hash that every pod built from `template` carries."""
    return str(template["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE])


def deployment(
    policy: PolicyDeployment,
    pool: Pool,
    replicas: int,
    image: str,
    rolling_update: dict[str, Any],
    track: str = "",
) -> dict[str, Any]:
    """The Deployment of a pool.

    Args:
        image: the operator's default, where the pool names none.
        track: tells a second Deployment of the pool apart; empty for the plain one.
    """
    metadata = owned_metadata(policy, naming.workload_name(policy.name, pool.name, track), pool.name)
    metadata["labels"] |= _track_label(track)
    metadata["annotations"] = {naming.ANNOTATION_REVISION_HASH: revisions.of_spec(policy.spec).hash}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": naming.worker_selector(policy.name, pool.name) | _track_label(track)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling_update},
            # A gateway needs a moment to hear of a new worker before an old one leaves.
            "minReadySeconds": MIN_READY_S,
            "progressDeadlineSeconds": max(STARTUP_LIMIT_S, startup_limit_s(pool)) + 300 + _delivery_s(policy),
            "revisionHistoryLimit": 2,
            "template": pod_template(policy, pool, image, track),
        },
    }


def startup_limit_s(pool: Pool) -> int:
    """When the kubelet ends a worker that does not become ready: a minute after the operator would (`stuck`)."""
    return pool.startup_seconds + STARTUP_GRACE_S if pool.startup_seconds else STARTUP_LIMIT_S


def _delivery_s(policy: PolicyDeployment) -> int:
    """How long a checkpoint may take to come, in seconds."""
    return policy.spec.delivery.deadline_seconds if policy.spec.model.source.fetched else 0


def _track_label(track: str) -> dict[str, str]:
    return {naming.LABEL_TRACK: track} if track else {}


def _pod_spec(policy: PolicyDeployment, pool: Pool, image: str) -> dict[str, Any]:
    found = accelerators.CLASSES[pool.accelerator]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": DRAIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            # A volume whose root is ours already is taken as it is: else the kubelet would touch each file of a large
            # checkpoint before each start.
            **({"fsGroupChangePolicy": "OnRootMismatch"} if delivery.is_on_claim(policy) else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(policy, pool, image)],
        "volumes": _volumes(policy, pool),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": naming.worker_selector(policy.name, pool.name)},
            }
            for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        ],
    }
    fetching = delivery.init_containers(policy, image, CONFIG_MOUNT, SCRATCH_MOUNT)
    if fetching:
        spec["initContainers"] = fetching
    if secrets := delivery.pull_secrets(policy):
        spec["imagePullSecrets"] = secrets
    if pool.claim_template:
        spec["resourceClaims"] = [
            {"name": accelerators.CLAIM, "resourceClaimTemplateName": pool.claim_template},
        ]
    runtime_class = pool.runtime_class_name or found.runtime_class
    if runtime_class:
        spec["runtimeClassName"] = runtime_class
    if pool.node_selector:
        # The image must still be the architecture's.
        spec["nodeSelector"] = ({accelerators.ARCH_LABEL: found.arch} if found.arch else {}) | pool.node_selector
        spec["affinity"] = accelerators.node_affinity("cpu")
    else:
        spec["affinity"] = accelerators.node_affinity(pool.accelerator)
    spec["tolerations"] = accelerators.tolerations(pool.accelerator, spot=pool.spot) + [
        msgspec.to_builtins(toleration) for toleration in pool.tolerations
    ]
    return spec


def _container(policy: PolicyDeployment, pool: Pool, image: str) -> dict[str, Any]:
    # A kubelet's probes know no TLS.
    probe = {"grpc": {"port": naming.HEALTH_PORT if policy.tls else naming.WORKER_PORT}}
    return {
        "name": "worker",
        "image": image,
        "command": [
            "taktline-worker",
            "serve",
            "--config",
            f"{CONFIG_MOUNT}/{naming.ENGINE_FILE}",
            "--listen",
            f"0.0.0.0:{naming.WORKER_PORT}",
            "--metrics-listen",
            f"0.0.0.0:{naming.METRICS_PORT}",
            *_tls_flags(policy),
        ],
        # Compilers and libraries cache under HOME and TMPDIR; the root file system is read-only.
        "env": [
            {"name": "HOME", "value": SCRATCH_MOUNT},
            {"name": "TMPDIR", "value": SCRATCH_MOUNT},
            *(_tracing_variable(name) for name in tracing.VARIABLES),
            *([{"name": KERNEL_VARIABLE, "value": KERNEL_MOUNT}] if policy.kernel_cache else []),
        ],
        "ports": [
            {"name": "grpc", "containerPort": naming.WORKER_PORT, "protocol": "TCP"},
            {"name": naming.METRICS_PORT_NAME, "containerPort": naming.METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": resources(pool, policy.spec.engine.gpus),
        "startupProbe": probe
        | {"periodSeconds": STARTUP_PERIOD_S, "failureThreshold": startup_limit_s(pool) // STARTUP_PERIOD_S},
        "readinessProbe": probe | {"periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": probe | {"periodSeconds": 10, "failureThreshold": 3, "timeoutSeconds": 5},
        # The last words of a worker that refuses to start become the condition's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": delivery.RESTRICTED,
        "volumeMounts": [
            {"name": "engine", "mountPath": CONFIG_MOUNT, "readOnly": True},
            {"name": "model", "mountPath": delivery.model_mount(policy), "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH_MOUNT},
            *([{"name": "tls", "mountPath": TLS_MOUNT, "readOnly": True}] if policy.tls else []),
            *([{"name": "shm", "mountPath": SHM_MOUNT}] if policy.spec.engine.has_collectives else []),
            *([{"name": "kernels", "mountPath": KERNEL_MOUNT}] if policy.kernel_cache else []),
        ],
    }


def resources(pool: Pool, gpus: int) -> dict[str, Any]:
    """Resources of a worker container with `gpus` ranks."""
    claimed = bool(pool.claim_template)
    return accelerators.resources(pool.accelerator, pool.resources.requests, pool.limits, gpus, claimed=claimed)


def tls_files(policy: PolicyDeployment) -> dict[str, str]:
    """Path in the pod by what it is for: cert, key, and client_ca where workers ask gateways for a certificate."""
    if policy.tls is None:
        return {}
    files = {"cert": f"{TLS_MOUNT}/tls.crt", "key": f"{TLS_MOUNT}/tls.key"}
    return files | ({"client_ca": f"{TLS_MOUNT}/ca.crt"} if policy.tls.client_auth else {})


def _tls_flags(policy: PolicyDeployment) -> list[str]:
    files = tls_files(policy)
    if not files:
        return []
    flags = [word for name, path in files.items() for word in (f"--tls-{name.replace('_', '-')}", path)]
    return [*flags, "--health-listen", f"0.0.0.0:{naming.HEALTH_PORT}"]


def _tracing_variable(name: str) -> dict[str, Any]:
    reference = {"name": tracing.CONFIG_MAP, "key": name, "optional": True}
    return {"name": name, "valueFrom": {"configMapKeyRef": reference}}


def _volumes(policy: PolicyDeployment, pool: Pool) -> list[dict[str, Any]]:
    return [
        {"name": "engine", "configMap": {"name": _config_name(policy, pool)}},
        {"name": "model", **delivery.model_volume(policy)},
        {"name": "scratch", "emptyDir": {}},
        *([{"name": "tls", "secret": {"secretName": policy.tls.secret, "defaultMode": 0o440}}] if policy.tls else []),
        *([{"name": "shm", "emptyDir": SHM}] if policy.spec.engine.has_collectives else []),
        *delivery.more_volumes(policy),
        *([{"name": "kernels", "hostPath": _kernel_folder(policy)}] if policy.kernel_cache else []),
    ]


def _kernel_folder(policy: PolicyDeployment) -> dict[str, Any]:
    # Who writes there decides what GPUs run: a namespace does so for itself alone. What a kubelet makes is root's, so
    # that a namespace for which nobody made a folder keeps nothing.
    return {"path": f"{policy.kernel_cache.rstrip('/')}/{policy.namespace}", "type": "DirectoryOrCreate"}
