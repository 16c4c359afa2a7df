"""Takes checkpoints that nothing uses off a node, the longest unused first, and files that no checkpoint has."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from taktline_protocol.delivery import RECORD_FILE

from taktline_worker.delivery.cache import Cache, Record, discard, try_flock
from taktline_worker.delivery.transfer import remove_quarantined

logger = logging.getLogger(__name__)

MIN_AGE_S = 3600.0
"""A checkpoint that was fetched or asked for this recently stays: its worker may be about to open it."""


IDLE_S = 360.0
"""So long nobody must have had a checkpoint open: a container that crashed comes back after at most five minutes, with
nothing fetched anew, and holds nothing until then."""


class Pruned(msgspec.Struct, kw_only=True):
    """What a prune did.

    Attributes:
        removed: records of checkpoints that went.
        freed_bytes: disk space that became free.
        in_use: keys that stayed though they are old, because a worker has them open or a fetch is at it.
        resting: keys that stayed because they were first seen without a worker only now: seconds until they may go.
        recent: keys that stayed because somebody asked for them lately: seconds since then.
        left_bytes: size of what is left.
    """

    removed: list[Record] = []
    freed_bytes: int = 0
    in_use: list[str] = []
    resting: dict[str, float] = {}
    recent: dict[str, float] = {}
    left_bytes: int = 0


def mark_used(cache: Cache, key: str) -> None:
    """Notes that a checkpoint is wanted now."""
    with contextlib.suppress(OSError):  # one of another user stays as old as it is
        os.utime(cache.model(key) / RECORD_FILE)


def used_at(cache: Cache, key: str) -> float:
    """When a checkpoint was last asked for, Unix time in seconds."""
    try:
        return (cache.model(key) / RECORD_FILE).stat().st_mtime
    except OSError:
        return 0.0


def in_use(cache: Cache, key: str) -> bool:
    """Whether a worker of this node has the checkpoint open."""
    with try_flock(cache.model(key) / RECORD_FILE) as free:
        return not free


def make_room(cache: Cache, limit: int, wanted: int) -> Pruned:
    """Prunes so far that `wanted` bytes more stay within `limit`."""
    return prune(cache, max(0, limit - wanted))


def prune(
    cache: Cache, limit: int, *, min_age_s: float = MIN_AGE_S, idle_s: float = IDLE_S, dry_run: bool = False
) -> Pruned:
    """Removes checkpoints, the longest unused first, until all files together have at most `limit` bytes.

    Never one that a worker has open, that one had open less than `idle_s` ago as far as earlier calls know, that is
    being fetched, or that was asked for less than `min_age_s` ago. Files that belong to no checkpoint, partial files
    that nobody is at, and quarantined ones go in any case.
    """
    result = Pruned()
    idle = {record.key: _note_idle(cache, record.key) for record in cache.records()}
    if not dry_run:
        result.freed_bytes += remove_quarantined(cache.quarantine("."))
        result.freed_bytes += _remove_leftovers(cache, min_age_s)
    size = _size(cache)
    now = time.time()
    for record in sorted(cache.records(), key=lambda found: used_at(cache, found.key)):
        if size <= limit:
            break
        age_s = now - used_at(cache, record.key)
        if age_s < min_age_s:
            result.recent[record.key] = age_s
            continue
        with _claimed(cache, record.key) as free:
            if not free:
                result.in_use += [record.key] if cache.model(record.key).exists() else []
                continue
            rest_s = idle_s - (now - (idle.get(record.key) or now))
            if rest_s > 0:
                result.resting[record.key] = rest_s
                continue
            own = _own_bytes(cache, record)
            if not dry_run:
                _idle_note(cache, record.key).unlink(missing_ok=True)
                discard(cache.model(record.key), cache.partial(f"trash-{record.key}"))
                own = _remove_orphans(cache)
                logger.info("checkpoint removed", extra={"key": record.key, "revision": record.revision, "bytes": own})
        size -= own
        result.freed_bytes += own
        result.removed.append(record)
    result.left_bytes = size
    return result


def _idle_note(cache: Cache, key: str) -> Path:
    """A file that is as old as it is known that nobody has the checkpoint open."""
    return cache.folder / "locks" / f"idle-{key}"


def _note_idle(cache: Cache, key: str) -> float | None:
    """Since when nobody was seen to have a checkpoint open, Unix time in seconds; None while somebody has."""
    note = _idle_note(cache, key)
    with _claimed(cache, key) as free:
        if not free:
            note.unlink(missing_ok=True)
            return None
        found = _stat(note)
        if found is None or found.st_mtime < used_at(cache, key):  # asked for since then
            note.touch()
            found = _stat(note)
        return None if found is None else found.st_mtime


@contextlib.contextmanager
def _claimed(cache: Cache, key: str) -> Iterator[bool]:
    """Whether nobody fetches, looks for, or uses a checkpoint; while this is entered nobody begins to."""
    with cache.try_lock(f"model-{key}") as alone:
        # Another prune may have taken it away since it was listed.
        if not alone or not (cache.model(key) / RECORD_FILE).exists():
            yield False
            return
        with try_flock(cache.model(key) / RECORD_FILE) as free:
            yield free


def _size(cache: Cache) -> int:
    return sum(found.st_size for path in (cache.folder / "blobs").iterdir() if (found := _stat(path)) is not None)


def _own_bytes(cache: Cache, record: Record) -> int:
    """Bytes of files that only this checkpoint has."""
    mine = {file.sha256: file.size for file in record.files}
    return sum(size for sha256, size in mine.items() if _links(cache.blob(sha256)) <= 1 + _times(record, sha256))


def _times(record: Record, sha256: str) -> int:
    return sum(file.sha256 == sha256 for file in record.files)


def _links(path: Path) -> int:
    found = _stat(path)
    return 0 if found is None else found.st_nlink


def _stat(path: Path) -> os.stat_result | None:
    """What is known of a file; None where another process of the node has taken it away since it was listed."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _remove_orphans(cache: Cache) -> int:
    """Deletes files that neither a checkpoint nor a fetch holds."""
    freed = 0
    for path in (cache.folder / "blobs").iterdir():
        found = _stat(path)
        if found is not None and found.st_nlink == 1:
            freed += found.st_size
            path.unlink(missing_ok=True)
    return freed


def _remove_leftovers(cache: Cache, min_age_s: float) -> int:
    """Deletes what fetches that were never taken up again left behind."""
    before = time.time() - min_age_s
    freed = 0
    for held in (cache.folder / "partial").glob("hold-*"):
        with cache.try_lock(f"model-{held.name.removeprefix('hold-')}") as free:
            if free and (found := _stat(held)) is not None and found.st_mtime < before:
                shutil.rmtree(held, ignore_errors=True)
    # Made and gone under one lock: where that is free, its process was killed, and links in there keep files for ever.
    for kind in ("build", "trash", "unpack"):
        for left in (cache.folder / "partial").glob(f"{kind}-*"):
            with cache.try_lock(f"model-{left.name.removeprefix(f'{kind}-')}") as free:
                if free and left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                elif free:
                    left.unlink(missing_ok=True)
    for path in (cache.folder / "partial").glob("*.part"):
        name = path.name.removesuffix(".part")
        with cache.try_lock(f"file-{name[:32]}") as free:
            if free and (found := _stat(path)) is not None and found.st_mtime < before:
                freed += found.st_size
                path.unlink(missing_ok=True)
                cache.partial(f"{name}.json").unlink(missing_ok=True)
    return freed + _remove_orphans(cache)
