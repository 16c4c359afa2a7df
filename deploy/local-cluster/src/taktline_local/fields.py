"""Values a container asks for by reference: downward API fields, ConfigMap and Secret keys, `$(NAME)` expansion."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Protocol

Object = dict[str, Any]

REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_.][A-Za-z0-9_.-]*)\)")
KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class ContainerConfigError(Exception):
    """A container's configuration refers to something absent or unknown; retried until it appears."""


class ObjectSource(Protocol):
    """Where the Pod's ConfigMaps, Secrets, claims and tokens come from: the API server, or a plan in memory."""

    async def config_map(self, namespace: str, name: str) -> Object | None:
        """The ConfigMap, None where there is none."""

    async def secret(self, namespace: str, name: str) -> Object | None:
        """The Secret, None where there is none."""

    async def claim_path(self, namespace: str, name: str) -> str:
        """Local folder behind a bound PersistentVolumeClaim; raises ContainerConfigError."""

    async def token(self, pod: Object, audience: str | None, expiration_s: int) -> str:
        """A service account token bound to the Pod, renewed in good time; raises ContainerConfigError."""


def field_value(pod: Object, pod_ip: str, host_ip: str, path: str) -> str:
    """The downward API's `fieldPath`. Raises ContainerConfigError for one that it does not have."""
    metadata, spec = pod["metadata"], pod["spec"]
    keyed = KEYED_FIELD.fullmatch(path)
    if keyed:
        return str(metadata.get(keyed.group(1), {}).get(keyed.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.removeprefix("metadata."), {})
        return "\n".join(f'{key}="{value}"' for key, value in sorted(entries.items()))
    simple = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
    }
    if path not in simple:
        raise ContainerConfigError(f"field {path} is not available to containers")
    return str(simple[path])


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced by the variable where it exists and left alone where not; `$$` is one dollar sign."""

    def replacement(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return "$"
        return variables.get(name, match.group(0))

    return REFERENCE.sub(replacement, text)


async def container_variables(
    pod: Object, container: Object, source: ObjectSource, pod_ip: str, host_ip: str
) -> dict[str, str]:
    """The container's declared environment, in order, with references resolved. Raises ContainerConfigError."""
    namespace = pod["metadata"]["namespace"]
    variables: dict[str, str] = {}
    for entry in container.get("envFrom", []):
        prefix = entry.get("prefix", "")
        for kind in ("configMapRef", "secretRef"):
            if kind in entry:
                data = await _object_data(source, namespace, kind, entry[kind])
                variables.update({prefix + key: text(value) for key, value in data.items()})
    for entry in container.get("env", []):
        origin = entry.get("valueFrom")
        if origin is None:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
        elif "fieldRef" in origin:
            variables[entry["name"]] = field_value(pod, pod_ip, host_ip, origin["fieldRef"]["fieldPath"])
        else:
            kind = next(kind for kind in ("configMapKeyRef", "secretKeyRef") if kind in origin)
            reference = origin[kind]
            data = await _object_data(source, namespace, kind, reference)
            if reference["key"] in data:
                variables[entry["name"]] = text(data[reference["key"]])
            elif not reference.get("optional"):
                raise ContainerConfigError(f"couldn't find key {reference['key']} in {namespace}/{reference['name']}")
    return variables


async def _object_data(source: ObjectSource, namespace: str, kind: str, reference: Object) -> dict[str, bytes]:
    name = reference["name"]
    if kind.startswith("configMap"):
        item, data = await source.config_map(namespace, name), config_map_files
    else:
        item, data = await source.secret(namespace, name), secret_files
    if item is None:
        if reference.get("optional"):
            return {}
        raise ContainerConfigError(f"{kind.removesuffix('Ref').removesuffix('Key')} {namespace}/{name} not found")
    return data(item)


def config_map_files(item: Object) -> dict[str, bytes]:
    """Key -> content of a ConfigMap."""
    return {key: value.encode() for key, value in (item.get("data") or {}).items()} | {
        key: _decode(value) for key, value in (item.get("binaryData") or {}).items()
    }


def secret_files(item: Object) -> dict[str, bytes]:
    """Key -> content of a Secret, as the API serves it (base64 in `data`) or as a person writes it (`stringData`)."""
    return {key: _decode(value) for key, value in (item.get("data") or {}).items()} | {
        key: value.encode() for key, value in (item.get("stringData") or {}).items()
    }


def _decode(value: str) -> bytes:
    return base64.b64decode(value)


def text(value: bytes) -> str:
    """Bytes as an environment variable holds them."""
    return value.decode("utf-8", "surrogateescape")
