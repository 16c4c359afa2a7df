"""Triton's files in the folder where compiled kernels are kept: see `taktline_kernels.store`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager

from taktline_kernels import store


class KeptFiles(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """The files of one key. What is missing, empty or unreadable is compiled again; what no disk takes goes elsewhere.

    A kernel's files are found beside each other wherever the folder is mounted, not where they were written first.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        if override or dump:
            super().__init__(key, override, dump)
            return
        self.key, self.lock_path = key, None
        self.cache_dir = os.path.join(os.environ.get("TRITON_CACHE_DIR") or store.folder() / "triton", key)
        try:
            os.makedirs(self.cache_dir, mode=0o700, exist_ok=True)
        except OSError as error:
            self._go_elsewhere(error)

    def get_file(self, filename: str) -> str | None:
        """The path of a file that has content."""
        path = self._make_path(filename)
        try:
            return path if os.path.getsize(path) else None
        except OSError:
            return None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by name; None unless all are there."""
        try:
            with open(self._make_path(f"__grp__{filename}"), encoding="utf-8") as file:
                names = json.load(file)["child_paths"]
        except (OSError, ValueError, KeyError):
            return None
        found = {name: self.get_file(name) for name in names}
        whole = {name: path for name, path in found.items() if path is not None}
        return whole if len(whole) == len(found) else None

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Writes a file; where it lies."""
        del binary
        content = data if isinstance(data, bytes) else str(data).encode()
        path = Path(self._make_path(filename))
        try:
            store.write(path, content)
        except OSError as error:
            self._go_elsewhere(error)
            path = Path(self._make_path(filename))
            store.write(path, content)
        return str(path)

    def _go_elsewhere(self, error: OSError) -> None:
        store.not_kept(error)
        self.cache_dir = str(store.scratch() / self.key)
        os.makedirs(self.cache_dir, exist_ok=True)


def use() -> None:
    """Lets Triton keep its files there, unless the environment names a manager of its own."""
    if "TRITON_CACHE_MANAGER" not in os.environ:
        knobs.cache.manager_class = KeptFiles
