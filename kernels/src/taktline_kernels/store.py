"""Compiled kernels kept on disk, so that the next start of a machine need not compile them again.

Files are named by a digest of all that decides their content and written beside their place, then moved to it: several
processes may use a folder at once, and may lose it at any time. A folder that cannot be written to costs a warning and
the next start's time, nothing else. What nobody asked for in 30 days goes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "TAKTLINE_KERNEL_CACHE"
"""Environment variable with the folder; unset, it is ~/.cache/taktline/kernels."""
_DIGEST_BYTES = hashlib.sha256().digest_size
_BESIDE = ".tmp-"
_DAY_SECONDS = 24 * 3600.0
_MOST_DAYS = 30
_MOST_FILES = 20_000
"""That a start looks at; 40 kernels of Triton's are 600 files."""


@functools.cache
def folder(part: str = "", *, private: bool = False) -> Path:
    """Where compiled kernels are kept; a folder of this process alone where there is none that can be trusted.

    Whoever can write to it decides what the GPU runs, so that it must be this user's or root's, and no one else's.

    Args:
        part: a folder in it.
        private: in the home, wherever the variable points: for code that the processor runs.
    """
    named = "" if private else os.environ.get(VARIABLE)
    wanted = Path(named or Path(os.environ.get("HOME", os.devnull), ".cache", "taktline", "kernels"))
    try:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(wanted, wanted.stat())
        if part:
            wanted /= part
            wanted.mkdir(mode=0o700, exist_ok=True)
            _check(wanted, wanted.lstat())
    except OSError as error:
        not_kept(error)
        return scratch()
    if part:
        _tidy(wanted)
    return wanted


def _check(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is no folder of its own")
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(f"{path} is another user's, or others may write to it")


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
    path = folder("cuda") / name.hexdigest()
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    if stored and hashlib.sha256(stored[_DIGEST_BYTES:]).digest() == stored[:_DIGEST_BYTES]:
        used(path)
        return stored[_DIGEST_BYTES:]
    made = make()
    try:
        write(path, hashlib.sha256(made).digest() + made)
    except OSError as error:
        not_kept(error)
    return made


def write(path: Path, content: bytes) -> None:
    """Puts a file in its place, whole or not at all. Raises OSError where it cannot be."""
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    number, beside = tempfile.mkstemp(dir=path.parent, prefix=_BESIDE)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def used(path: Path) -> None:
    """Lets a file that was asked for stay."""
    try:
        if time.time() - path.stat().st_mtime > _DAY_SECONDS:
            os.utime(path)
    except OSError as error:
        _warn_once("kept kernels are not marked as used, so they may go after 30 days: %s", error)


def _tidy(within: Path) -> None:
    """Drops what nobody used for long, and what who ended amid writing left."""
    now = time.time()
    emptied = set()
    try:
        for path in itertools.islice(_files(within), _MOST_FILES):
            days = 1 if path.name.startswith(_BESIDE) else _MOST_DAYS
            with suppress(FileNotFoundError):  # others tidy, too
                if now - path.lstat().st_mtime > days * _DAY_SECONDS:
                    path.unlink()
                    emptied.add(path.parent)
        for parent in emptied - {within}:
            with suppress(OSError):  # not empty
                parent.rmdir()
    except OSError as error:
        _warn_once("old kernels are not dropped: %s", error)


def _files(within: Path) -> Iterator[Path]:
    """Of a folder and those in it."""
    with os.scandir(within) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                with suppress(FileNotFoundError), os.scandir(entry) as inner:
                    yield from (Path(one) for one in inner if not one.is_dir(follow_symlinks=False))
            else:
                yield Path(entry)


def not_kept(error: OSError) -> None:
    """One warning a process."""
    _warn_once("compiled kernels are not kept, so the next start compiles them again: %s", error)


def _warn_once(message: str, error: OSError) -> None:
    if message not in _warned:
        _warned.append(message)
        logger.warning(message, error)


_warned: list[str] = []
