"""What a Pod asks for, checked against what plain processes can give: refusals, and things that are not enforced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

VOLUME_KINDS = {"configMap", "secret", "emptyDir", "hostPath", "projected", "downwardAPI", "persistentVolumeClaim"}
PROJECTED_KINDS = {"configMap", "secret", "serviceAccountToken", "downwardAPI"}
ENV_SOURCES = {"fieldRef", "configMapKeyRef", "secretKeyRef"}
CONTAINER_REFUSED = {
    "volumeDevices": "block devices",
    "stdin": "standard input",
    "tty": "a terminal",
}
POD_NOT_ENFORCED = (
    "dnsConfig", "hostAliases", "hostNetwork", "hostPID", "hostIPC", "imagePullSecrets",
    "overhead", "runtimeClassName", "shareProcessNamespace", "ephemeralContainers", "activeDeadlineSeconds",
)  # fmt: skip
CONTAINER_NOT_ENFORCED = ("image", "resources", "securityContext")


def all_containers(pod: Object) -> list[Object]:
    """Init containers, then containers."""
    spec = pod["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def volume_kind(volume: Object) -> str:
    """The one key beside `name`; a volume without any is an emptyDir."""
    return next((key for key in volume if key != "name"), "emptyDir")


def refusals(pod: Object) -> list[str]:
    """Reasons why this Pod cannot run here at all, one sentence each; empty when it can."""
    found: list[str] = []
    if pod["spec"].get("resourceClaims"):
        found.append("resource claims (DRA) are not supported")
    for volume in pod["spec"].get("volumes", []):
        kind = volume_kind(volume)
        if kind not in VOLUME_KINDS:
            found.append(f"volume {volume['name']}: kind {kind} is not supported")
        for source in volume.get("projected", {}).get("sources", []):
            unknown = source.keys() - PROJECTED_KINDS
            found += [f"volume {volume['name']}: projected source {kind} is not supported" for kind in unknown]
    for container in all_containers(pod):
        found += [f"container {container['name']}: {reason}" for reason in _container_refusals(container)]
    for container in pod["spec"].get("initContainers", []):
        if container.get("restartPolicy"):
            found.append(f"container {container['name']}: init containers that keep running are not supported")
    found += _mount_clashes(pod)
    return found


def _container_refusals(container: Object) -> Iterator[str]:
    if not container.get("command"):
        yield "no command; images are not read here, so their entry point is unknown: name it in `command`"
    for field, words in CONTAINER_REFUSED.items():
        if container.get(field):
            yield f"{words} ({field}) cannot be given"
    if container.get("lifecycle", {}).get("postStart"):
        yield "postStart hooks are not supported"
    for mount in container.get("volumeMounts", []):
        if mount.get("subPathExpr"):
            yield f"subPathExpr of {mount['mountPath']} is not supported"
        if mount["mountPath"].rstrip("/") == "":
            yield "a volume cannot be mounted at /"
    for variable in container.get("env", []):
        for source in variable.get("valueFrom", {}).keys() - ENV_SOURCES:
            yield f"variable {variable['name']}: source {source} is not supported"


def _mount_clashes(pod: Object) -> Iterator[str]:
    # Mount paths are rewritten for the whole Pod, so one path can mean only one place.
    seen: dict[str, tuple[str, str]] = {}
    for container in all_containers(pod):
        for mount in container.get("volumeMounts", []):
            path, what = mount["mountPath"].rstrip("/"), (mount["name"], mount.get("subPath", ""))
            if seen.setdefault(path, what) != what:
                yield f"containers mount different volumes at {path}, which is not supported"


def not_enforced(pod: Object) -> list[str]:
    """Fields that this Pod sets and that have no effect on plain processes."""
    names = {f"spec.{field}" for field in POD_NOT_ENFORCED if pod["spec"].get(field)}
    if pod["spec"].get("securityContext"):
        names.add("spec.securityContext")
    for container in all_containers(pod):
        names |= {f"containers.{field}" for field in CONTAINER_NOT_ENFORCED if container.get(field)}
    return sorted(names)
