"""Compiled kernels kept on disk, so that the next start of a machine need not compile them again.

Files are named by a digest of all that decides their content and written beside their place, then moved to it: several
processes may use a folder at once, and may lose it at any time. A folder that cannot be written to costs a warning and
the next start's time, nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "TAKTLINE_KERNEL_CACHE"
"""Environment variable with the folder; unset, it is ~/.cache/taktline/kernels."""
_DIGEST_BYTES = hashlib.sha256().digest_size


@functools.cache
def folder() -> Path:
    """Where compiled kernels are kept; a folder of this process alone where there is none that can be trusted.

    Whoever can write to it decides what the GPU runs, so that it must be this user's or root's, and no one else's.
    """
    wanted = Path(os.environ.get(VARIABLE) or Path(os.environ.get("HOME", os.devnull), ".cache", "taktline", "kernels"))
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = wanted.stat()
    except OSError as error:
        not_kept(error)
        return scratch()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o002:
        not_kept(PermissionError(f"{wanted} is another user's, or anyone may write to it"))
        return scratch()
    return wanted


@functools.cache
def scratch() -> Path:
    """A folder that goes with this process."""
    made = tempfile.TemporaryDirectory(prefix="taktline-kernels-")
    _made.append(made)
    return Path(made.name)


_made: list[tempfile.TemporaryDirectory[str]] = []


def kept(parts: Iterable[bytes], make: Callable[[], bytes]) -> bytes:
    """What is kept under these parts, or what `make` gives, which is kept from now on.

    Args:
        parts: all that decides the content: sources, options, the compiler's version.
    """
    name = hashlib.sha256()
    for part in parts:
        name.update(len(part).to_bytes(8, "little") + part)
    path = folder() / "cuda" / name.hexdigest()
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    if stored and hashlib.sha256(stored[_DIGEST_BYTES:]).digest() == stored[:_DIGEST_BYTES]:
        return stored[_DIGEST_BYTES:]
    made = make()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write(path, hashlib.sha256(made).digest() + made)
    except OSError as error:
        not_kept(error)
    return made


def write(path: Path, content: bytes) -> None:
    """Puts a file in its place, whole or not at all. Raises OSError where it cannot be."""
    number, beside = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def not_kept(error: OSError) -> None:
    """One warning a process."""
    if not _warned:
        _warned.append(error)
        logger.warning("compiled kernels are not kept, so the next start compiles them again: %s", error)


_warned: list[OSError] = []
