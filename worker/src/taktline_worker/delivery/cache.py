"""The checkpoints of a node: verified files named by digest, and folders of hard links to them that appear whole.

```
blobs/SHA256         a verified file, read-only
models/KEY/...       a checkpoint; its record file is locked shared by whoever uses it
partial/             what is being fetched, and what an interrupted fetch left for the next one
quarantine/          files whose digest was wrong, with what is known of them
locks/, progress/    one fetch of a key, or of a file, at a time; how far it is
```

Locks are the kernel's (flock), so a process that is killed holds none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.delivery import MODELS_FOLDER, RECORD_FILE

from taktline_worker.delivery.names import checked_name

LOCK_LOOK_S = 0.1
_FOLDERS = ("blobs", MODELS_FOLDER, "partial", "quarantine", "locks", "progress")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a published checkpoint."""

    name: str
    size: int
    sha256: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a published folder says of itself.

    Attributes:
        fetched_at: Unix time, seconds.
        fetched_bytes: bytes that came over the network for it.
    """

    key: str
    policy: str
    revision: str
    source: str
    files: tuple[FileRecord, ...]
    fetched_at: float
    fetched_bytes: int = 0
    fetch_s: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class Cache:
    """The cache in one folder, which many processes of a node use at a time.

    Raises:
        TaktlineError: CONFIG_INVALID where the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            for name in _FOLDERS:
                (folder / name).mkdir(parents=True, exist_ok=True)
            probe = folder / "locks" / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink(missing_ok=True)  # in containers all have one process id: another one's may be ours
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise disk_full(folder, 0, "nothing can be written there") from error
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the model cache {folder} cannot be written to: {error.strerror or error}",
                f"let user {os.getuid()} own it (on a node: install -d -o 10001 -g 10001 FOLDER), or use a claim",
            ) from error

    def model(self, key: str) -> Path:
        """Folder of a checkpoint, there or not."""
        return self.folder / MODELS_FOLDER / key

    def blob(self, sha256: str) -> Path:
        """Path of a verified file, there or not."""
        return self.folder / "blobs" / sha256

    def partial(self, name: str) -> Path:
        """Path of a file that is being fetched."""
        return self.folder / "partial" / name

    def quarantine(self, name: str) -> Path:
        """Path of what is known of a file whose digest was wrong."""
        return self.folder / "quarantine" / name

    def progress_file(self, key: str) -> Path:
        """Where the process that fetches `key` tells the others how far it is."""
        return self.folder / "progress" / f"{key}.json"

    def records(self) -> list[Record]:
        """All published checkpoints, by key."""
        found = (self.record(path.name) for path in sorted((self.folder / MODELS_FOLDER).iterdir()))
        return [record for record in found if record is not None]

    def record(self, key: str) -> Record | None:
        """What is known of a published checkpoint; None where there is none."""
        return read_record(self.model(key))

    def complete(self, key: str) -> Record | None:
        """The record of a checkpoint whose files are all there with their sizes; None where it is to be fetched."""
        record = self.record(key)
        if record is None:
            return None
        folder = self.model(key)
        try:
            whole = all((folder / file.name).stat().st_size == file.size for file in record.files)
        except OSError:
            whole = False
        return record if whole else None

    @contextlib.contextmanager
    def lock(self, name: str, deadline: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Holds the lock `name` against all other processes of the node; waits until `deadline` (monotonic, s).

        Raises:
            TaktlineError: MODEL_UNREACHABLE where another process still holds it at the deadline.
        """
        with (self.folder / "locks" / f"{name}.lock").open("ab") as stream:
            while not _flock(stream.fileno(), fcntl.LOCK_EX):
                waiting()
                if time.monotonic() >= deadline:
                    raise TaktlineError(
                        ErrorCode.MODEL_UNREACHABLE,
                        f"another process of this node fetches the same ({name}) and was not done in time",
                        "look at its progress, or allow more time (spec.delivery.deadlineSeconds)",
                    )
                time.sleep(LOCK_LOOK_S)
            yield

    def try_lock(self, name: str) -> contextlib.AbstractContextManager[bool]:
        """The same without waiting; yields whether it is held."""
        return try_flock(self.folder / "locks" / f"{name}.lock", create=True)

    def free_bytes(self) -> int:
        """Bytes that this user may still write."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def require_room(self, needed: int) -> None:
        """Refuses before anything is fetched.

        Raises:
            TaktlineError: DISK_FULL with the bytes that are needed and those that are free.
        """
        free = self.free_bytes()
        if needed > free:
            raise disk_full(self.folder, needed, f"{free:,} bytes are free")

    def hold(self, key: str) -> Path:
        """Folder with a link to each file that the fetch of `key` has so far: what is held there is not pruned."""
        return self.partial(f"hold-{key}")

    def held(self, sha256: str) -> list[Path]:
        """The links to a file in the folders of fetches that are under way, or were interrupted."""
        return list(self.folder.glob(f"partial/hold-*/{sha256}"))

    def take(self, sha256: str, key: str) -> int | None:
        """Holds a file for `key` if the cache has it; returns its size, None where it has to be fetched."""
        held, blob = self.hold(key) / sha256, self.blob(sha256)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(held, blob)  # a fetch that was interrupted holds what the cache does not have, or not any more
        with contextlib.suppress(FileExistsError):
            try:
                self._link(blob, held)
            except FileNotFoundError:
                return None
        return held.stat().st_size

    def accept(self, path: Path, sha256: str, key: str) -> None:
        """Makes a verified file one of the cache's, held for `key`; it is on the disk when this returns."""
        if self.take(sha256, key) is None:
            sync(path)
            path.chmod(0o444)
            self._link(path, self.hold(key) / sha256)
            path.rename(self.blob(sha256))
            sync(self.folder / "blobs")
        else:
            path.unlink()

    def _link(self, path: Path, held: Path) -> None:
        held.parent.mkdir(exist_ok=True)
        try:
            os.link(path, held)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV):
                raise TaktlineError(
                    ErrorCode.CONFIG_INVALID,
                    f"the model cache {self.folder} takes no hard links: {error.strerror}",
                    "use a local disk or an NFS claim for spec.delivery.cache, not an object-store mount",
                ) from error
            raise

    def publish(self, record: Record) -> Path:
        """Puts a checkpoint together from what is held for it, and lets it appear at one instant."""
        target = self.model(record.key)
        staged = self.partial(f"build-{record.key}")
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        folders = {staged}
        try:
            for file in record.files:
                path = staged / checked_name(file.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                folders |= {parent for parent in path.parents if parent.is_relative_to(staged)}
                os.link(self.hold(record.key) / file.sha256, path)
            (staged / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
            for written in (staged / RECORD_FILE, *folders):
                sync(written)
            if target.exists():  # damaged: files are missing in it
                discard(target, self.partial(f"trash-{record.key}"))
            staged.rename(target)
        except OSError:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        sync(target.parent)
        shutil.rmtree(self.hold(record.key), ignore_errors=True)
        return target


def read_record(folder: Path) -> Record | None:
    """The record of a published folder; None where it is none."""
    try:
        return msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None


def discard(folder: Path, trash: Path) -> None:
    """Takes a folder away at one instant, then deletes it."""
    shutil.rmtree(trash, ignore_errors=True)
    folder.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def sync(path: Path) -> None:
    """Has a file's or a folder's content written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def try_flock(path: Path, *, create: bool = False) -> Iterator[bool]:
    """Holds a file exclusively if nobody else holds it at all; yields whether that is so."""
    with path.open("ab" if create else "r+b") as stream:
        yield _flock(stream.fileno(), fcntl.LOCK_EX)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_no_room(error: OSError) -> bool:
    """Whether the disk, the quota or the limit of a file's size is exhausted."""
    return error.errno in _NO_ROOM


def disk_full(folder: Path, needed: int, found: str) -> TaktlineError:
    """The error of a node without room for a checkpoint."""
    return TaktlineError(
        ErrorCode.DISK_FULL,
        f"{folder} has no room for the checkpoint: {needed:,} bytes more are needed, {found}",
        "free some there (`taktline model prune --limit SIZE`), set spec.delivery.cacheLimit, or use a larger disk",
    )
