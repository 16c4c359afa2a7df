"""Triton's files in the folder where compiled kernels are kept: see `taktline_kernels.store`."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from taktline_kernels import store


class KeptFiles(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """The files of one key. What is missing or damaged is compiled again; what no disk takes goes elsewhere.

    A kernel's files are found beside each other wherever the folder is mounted, not where they were written first; a
    digest lies beside each. Launchers, which the processor runs, are never taken from a folder that others share.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._launchers = ""
        if override or dump:
            super().__init__(key, override, dump)
            return
        self.key, self.lock_path = key, None
        self.cache_dir = os.path.join(os.environ.get("TRITON_CACHE_DIR") or store.folder("triton"), key)
        self._launchers = os.path.join(store.folder("triton", private=True), key)

    def _make_path(self, filename: str) -> str:
        launcher = self._launchers and filename.endswith(".so")
        return os.path.join(self._launchers if launcher else self.cache_dir, filename)

    def get_file(self, filename: str) -> str | None:
        """The path of a file that is as it was written."""
        path = Path(self._make_path(filename))
        digest = _digest_of(path)
        try:
            if hashlib.sha256(path.read_bytes()).hexdigest() != digest.read_text(encoding="ascii"):
                return None
        except (OSError, ValueError):
            return None
        store.used(path)
        store.used(digest)
        return str(path)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by name; None unless all are there."""
        group = self.get_file(f"__grp__{filename}")
        try:
            names = json.loads(Path(group).read_bytes())["child_paths"] if group else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not isinstance(names, dict):
            return None
        found = {name: self.get_file(name) for name in names}
        whole = {name: path for name, path in found.items() if path is not None}
        return whole if len(whole) == len(found) else None

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Writes a file and its digest; where it lies."""
        del binary
        content = data if isinstance(data, bytes) else str(data).encode()
        try:
            return self._write(content, filename)
        except OSError as error:
            store.not_kept(error)
            self.cache_dir = self._launchers = str(store.scratch() / self.key)
            return self._write(content, filename)

    def _write(self, content: bytes, filename: str) -> str:
        path = Path(self._make_path(filename))
        store.write(path, content)
        store.write(_digest_of(path), hashlib.sha256(content).hexdigest().encode())
        return str(path)


def _digest_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.sha256")


def use() -> None:
    """Lets Triton keep its files there, unless the environment names a manager of its own."""
    if "TRITON_CACHE_MANAGER" not in os.environ:
        knobs.cache.manager_class = KeptFiles
