"""A Pod's volumes as local folders; ConfigMaps, Secrets and tokens are swapped whole, as the kubelet does."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taktline_local.fields import (
    ContainerConfigError,
    ObjectSource,
    config_map_files,
    field_value,
    secret_files,
)
from taktline_local.pod_spec import volume_kind

Object = dict[str, Any]
Rewrite = Callable[[str], str]

HOST_PATH_CHECKS: dict[str, Callable[[Path], bool]] = {
    "": Path.exists,
    "Directory": Path.is_dir,
    "File": Path.is_file,
    "Socket": Path.is_socket,
    "CharDevice": Path.is_char_device,
    "BlockDevice": Path.is_block_device,
}


class Volumes:
    """The volumes of one Pod, below one folder."""

    def __init__(self, folder: Path, pod: Object, source: ObjectSource, *, pod_ip: str, host_ip: str) -> None:
        """`source` answers for ConfigMaps, Secrets, claims and tokens."""
        self._folder = folder
        self._pod = pod
        self._source = source
        self._addresses = (pod_ip, host_ip)
        self._volumes: list[Object] = pod["spec"].get("volumes", [])
        self._written: dict[str, dict[str, tuple[bytes, int]]] = {}

    async def places(self) -> dict[str, Path]:
        """Volume name -> local path, made where missing but still empty of ConfigMap content.

        Raises ContainerConfigError where a host path or a claim is absent.
        """
        return {volume["name"]: await self._place(volume) for volume in self._volumes}

    async def _place(self, volume: Object) -> Path:
        kind = volume_kind(volume)
        if kind == "hostPath":
            return checked_host_path(volume["hostPath"])
        if kind == "persistentVolumeClaim":
            claim = volume["persistentVolumeClaim"]["claimName"]
            return Path(await self._source.claim_path(self._pod["metadata"]["namespace"], claim))
        folder = self._folder / str(volume["name"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    async def refresh(self, rewrite: Rewrite) -> list[str]:
        """Write what changed since the last call; returns the names of the changed volumes.

        `rewrite` maps mount paths inside text files to local ones. Raises ContainerConfigError where an object that
        is not optional is absent.
        """
        changed = []
        for volume in self._volumes:
            if volume_kind(volume) not in ("configMap", "secret", "projected", "downwardAPI"):
                continue
            files = await self._files(volume, rewrite)
            if self._written.get(volume["name"]) != files:
                swap_content(self._folder / volume["name"], files)
                self._written[volume["name"]] = files
                changed.append(volume["name"])
        return changed

    async def _files(self, volume: Object, rewrite: Rewrite) -> dict[str, tuple[bytes, int]]:
        kind = volume_kind(volume)
        body = volume[kind]
        mode = body.get("defaultMode", 0o644)
        if kind != "projected":
            return await self._source_files(kind, body, mode, rewrite)
        files: dict[str, tuple[bytes, int]] = {}
        for source in body.get("sources", []):
            for source_kind, source_body in source.items():
                files |= await self._source_files(source_kind, source_body, mode, rewrite)
        return files

    async def _source_files(self, kind: str, body: Object, mode: int, rewrite: Rewrite) -> dict[str, tuple[bytes, int]]:
        if kind == "serviceAccountToken":
            token = await self._source.token(self._pod, body.get("audience"), body.get("expirationSeconds", 3600))
            return {body["path"]: (token.encode(), 0o600)}
        if kind == "downwardAPI":
            return {
                item["path"]: (field_value(self._pod, *self._addresses, item["fieldRef"]["fieldPath"]).encode(), mode)
                for item in body.get("items", [])
            }
        namespace = self._pod["metadata"]["namespace"]
        name = str(body.get("name") or body.get("secretName"))
        if kind == "configMap":
            item, decode = await self._source.config_map(namespace, name), config_map_files
        else:
            item, decode = await self._source.secret(namespace, name), secret_files
        if item is None:
            if body.get("optional"):
                return {}
            raise ContainerConfigError(f"{kind} {namespace}/{name} not found")
        return select_items(decode(item), body, mode, f"{kind} {namespace}/{name}", rewrite)


def select_items(
    data: dict[str, bytes], body: Object, mode: int, what: str, rewrite: Rewrite
) -> dict[str, tuple[bytes, int]]:
    """Relative path -> (content, mode) of the keys that a volume asks for; all of them where it names none."""
    items = body.get("items") or [{"key": key, "path": key} for key in data]
    files = {}
    for item in items:
        if item["key"] not in data:
            if body.get("optional"):
                continue
            raise ContainerConfigError(f"{what} has no key {item['key']}")
        files[item["path"]] = (_rewrite_text(data[item["key"]], rewrite), item.get("mode", mode))
    return files


def _rewrite_text(content: bytes, rewrite: Rewrite) -> bytes:
    try:
        return rewrite(content.decode()).encode()
    except UnicodeDecodeError:
        return content


def checked_host_path(body: Object) -> Path:
    """The path itself, checked or made as its `type` says. Raises ContainerConfigError."""
    path, kind = Path(body["path"]), body.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif not HOST_PATH_CHECKS[kind](path):
        raise ContainerConfigError(f"hostPath {path} does not exist{f' or is no {kind}' if kind else ''}")
    return path


def swap_content(folder: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Replace the folder's content at one instant: readers see all old files or all new ones.

    Files are links through `..data`, a link to a dated folder; renaming a new `..data` over the old one is the swap.
    """
    folder.mkdir(parents=True, exist_ok=True)
    current = folder / "..data"
    previous = folder / os.readlink(current) if current.is_symlink() else None
    fresh = folder / f"..{secrets.token_hex(8)}"
    for relative, (content, mode) in files.items():
        path = fresh / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    fresh.mkdir(exist_ok=True)
    staged = folder / "..data_staged"
    staged.unlink(missing_ok=True)
    staged.symlink_to(fresh.name)
    staged.rename(current)
    visible = {relative.split("/")[0] for relative in files}
    for name in visible:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(f"..data/{name}")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in visible:
            entry.unlink()
    if previous is not None:
        shutil.rmtree(previous, ignore_errors=True)
