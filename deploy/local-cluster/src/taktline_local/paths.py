"""Paths, listen addresses and names rewritten to local ones: plain processes share one file system and network."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ANY_ADDRESS = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])|\[::\]")


class LocalPaths:
    """Rewrites container paths in text to the folders that stand for them."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        """`places` maps absolute container paths to local ones; the longest match wins."""
        self._places = {container.rstrip("/"): str(local) for container, local in places.items()}
        longest_first = sorted(self._places, key=len, reverse=True)
        alternatives = "|".join(re.escape(path) for path in longest_first)
        # A path counts only as a whole: neither the tail of a longer path nor the start of a longer name.
        self._pattern = re.compile(rf"(?<![\w./-])({alternatives})(?![\w-]|\.\w)") if longest_first else None

    def rewrite(self, text: str) -> str:
        """`text` with every known container path replaced."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._places[match.group(1)], text)

    def local(self, container_path: str) -> Path:
        """Local path of one absolute container path, itself where nothing is mounted there."""
        return Path(self.rewrite(container_path))


def bind_address(text: str, pod_ip: str) -> str:
    """`text` with "every address" (0.0.0.0 or [::]) replaced by the Pod's own, so that ports never clash."""
    return ANY_ADDRESS.sub(pod_ip, text)


def peer_names(text: str, pod: dict[str, Any], address_of: Callable[[str], str]) -> str:
    """`text` with DNS names of Pods beside `pod` replaced by their addresses, since nobody resolves them here.

    Beside it are Pods of the same headless Service (`spec.subdomain`) in the same namespace:
    `HOSTNAME.SUBDOMAIN.NAMESPACE`, with or without `.svc` and a cluster domain.

    Args:
        address_of: address of the Pod named `HOSTNAME.SUBDOMAIN.NAMESPACE`, which need not run yet.
    """
    subdomain = pod["spec"].get("subdomain")
    if not subdomain:
        return text
    domain = f"{subdomain}.{pod['metadata']['namespace']}"
    name = re.compile(rf"(?<![\w.-])([a-z0-9][a-z0-9-]*)\.{re.escape(domain)}(\.svc[a-z0-9.-]*)?(?![\w.-])")
    return name.sub(lambda match: address_of(f"{match.group(1)}.{domain}"), text)


def peer_name(pod: dict[str, Any]) -> str:
    """The name by which Pods beside this one reach it; empty where it has none."""
    spec = pod["spec"]
    if not spec.get("hostname") or not spec.get("subdomain"):
        return ""
    return f"{spec['hostname']}.{spec['subdomain']}.{pod['metadata']['namespace']}"


def mount_places(pod: dict[str, Any], volumes: Mapping[str, Path]) -> dict[str, Path]:
    """Container path -> local path of every volume mount of a Pod."""
    places: dict[str, Path] = {}
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        for mount in container.get("volumeMounts", []):
            local = volumes[mount["name"]]
            places[mount["mountPath"]] = local / mount["subPath"] if mount.get("subPath") else local
    return places
