"""The parts of a worker pod that bring its checkpoint: the volume, and the init container that fetches into it."""

from __future__ import annotations

from typing import Any

from taktline_protocol.delivery import DELIVERY_FILE, TOKEN_VARIABLE

from taktline_operator.model_source import CACHE_MOUNT, PVC_MOUNT
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

CONTAINER = "model"
PROGRESS_PORT = 9465
CA_MOUNT = "/etc/taktline-ca"
# What every container of a worker may do: all that the restricted Pod Security standard leaves, and write nowhere.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Hashing and TLS need little; a slow node still gets a core.
RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "2", "memory": "1Gi"}}


def model_volume(policy: PolicyDeployment) -> Json:
    """The volume behind the worker's model mount, without its name."""
    source, cache = policy.spec.model.source, policy.spec.delivery.cache
    if source.path is not None:
        return {"hostPath": {"path": source.path, "type": "Directory"}}
    if source.pvc is not None:
        return {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
    if source.oci is not None:
        return {"image": {"reference": source.oci.reference, "pullPolicy": source.oci.pull_policy}}
    if cache.host_path is not None:
        return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    if cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    return {"emptyDir": {}}


def is_on_claim(policy: PolicyDeployment) -> bool:
    """Whether the worker's model mount is a PersistentVolumeClaim."""
    return "persistentVolumeClaim" in model_volume(policy)


def model_mount(policy: PolicyDeployment) -> str:
    """Where the worker sees that volume."""
    source = policy.spec.model.source
    # A node folder keeps its path inside the pod, so that one engine.json is right with and without mounts.
    if source.path is not None:
        return source.path
    return CACHE_MOUNT if source.fetched else PVC_MOUNT


def more_volumes(policy: PolicyDeployment) -> list[Json]:
    """Volumes that only the fetching needs."""
    authority = policy.spec.delivery.ca_config_map
    if not policy.spec.model.source.fetched or authority is None:
        return []
    items = [{"key": authority.key, "path": "ca.crt"}]
    return [{"name": "model-ca", "configMap": {"name": authority.name, "items": items}}]


def pull_secrets(policy: PolicyDeployment) -> list[Json]:
    """Secrets with which the kubelet pulls the image of an image volume."""
    source = policy.spec.model.source
    return [{"name": source.oci.pull_secret.name}] if source.oci and source.oci.pull_secret else []


def init_containers(policy: PolicyDeployment, image: str, config_mount: str, scratch_mount: str) -> list[Json]:
    """The container that fetches the checkpoint before the worker starts; none where the kubelet mounts it."""
    if not policy.spec.model.source.fetched:
        return []
    volumes = more_volumes(policy)
    command = [
        "taktline-worker",
        "model",
        "fetch",
        "--config",
        f"{config_mount}/{DELIVERY_FILE}",
        "--cache",
        CACHE_MOUNT,
        "--status-listen",
        f"0.0.0.0:{PROGRESS_PORT}",
    ]
    return [
        {
            "name": CONTAINER,
            "image": image,
            "command": command + (["--ca", f"{CA_MOUNT}/ca.crt"] if volumes else []),
            "env": [
                {"name": "HOME", "value": scratch_mount},
                {"name": "TMPDIR", "value": scratch_mount},
                *_credentials(policy),
                *_proxies(policy),
            ],
            "ports": [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}],
            "resources": RESOURCES,
            # What it says last becomes the condition's message.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": RESTRICTED,
            "volumeMounts": [
                {"name": "engine", "mountPath": config_mount, "readOnly": True},
                {"name": "model", "mountPath": CACHE_MOUNT},
                {"name": "scratch", "mountPath": scratch_mount},
                *({"name": found["name"], "mountPath": CA_MOUNT, "readOnly": True} for found in volumes),
            ],
        }
    ]


def _credentials(policy: PolicyDeployment) -> list[Json]:
    source = policy.spec.model.source
    token = (source.http and source.http.token_secret) or (source.hub and source.hub.token_secret)
    if token:
        return [_from_secret(TOKEN_VARIABLE, token.name, token.key)]
    secret = source.s3 and source.s3.credentials_secret
    if not secret:
        return []
    needed = [_from_secret(name, secret.name, name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    return [*needed, _from_secret("AWS_SESSION_TOKEN", secret.name, "AWS_SESSION_TOKEN", optional=True)]


def _from_secret(variable: str, name: str, key: str, *, optional: bool = False) -> Json:
    reference: Json = {"name": name, "key": key} | ({"optional": True} if optional else {})
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _proxies(policy: PolicyDeployment) -> list[Json]:
    wanted = policy.spec.delivery
    names = ("HTTPS_PROXY", "HTTP_PROXY")
    if wanted.proxy_secret is not None:  # whoever may read pods does not read the password
        made = [_from_secret(name, wanted.proxy_secret.name, wanted.proxy_secret.key) for name in names]
    elif wanted.proxy:
        made = [{"name": name, "value": wanted.proxy} for name in names]
    else:
        return []
    return [*made, {"name": "NO_PROXY", "value": wanted.no_proxy}] if wanted.no_proxy else made
