"""One delivery from beginning to end: once per node, checked, published whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeVar

from taktline_protocol.delivery import DeliveryConfig, HubSource, S3Source

from taktline_worker.delivery import archive, catalogue
from taktline_worker.delivery.cache import Cache, FileRecord, Record
from taktline_worker.delivery.names import checked_names, unsafe
from taktline_worker.delivery.progress import Progress, read_shared
from taktline_worker.delivery.prune import make_room, mark_used
from taktline_worker.delivery.remote import Patience, Remote, StoppedError, shown
from taktline_worker.delivery.transfer import RemoteFile, Transfer, remove_quarantined

logger = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")
SPARE_BYTES = 64 << 20  # left free beside the files: folders, notes, what other programs write meanwhile


def fetch(
    config: DeliveryConfig,
    cache: Cache,
    progress: Progress | None = None,
    *,
    patience: Patience | None = None,
    authority: Path | None = None,
    spare_bytes: int = SPARE_BYTES,
) -> Record:
    """Brings a checkpoint into the cache and returns its record; at once where it is there already.

    Args:
        authority: PEM file of a certificate authority that is trusted besides the usual ones.
        spare_bytes: disk space that must stay free.

    Raises:
        TaktlineError: MODEL_UNREACHABLE, MODEL_DENIED, MODEL_ABSENT, MODEL_MISMATCH, MODEL_UNSAFE, DISK_FULL,
            CONFIG_INVALID. What came is kept for the next attempt, except where the disk is full.
    """
    progress = progress or Progress()
    key, begun = config.key, time.monotonic()
    deadline = begun + config.deadline_s

    def waiting() -> None:
        found = read_shared(cache.progress_file(key))
        if found is not None:
            progress.show(found)
        else:
            progress.state("waiting")

    with cache.lock(f"model-{key}", deadline, waiting):
        ready = cache.complete(key)
        if ready is not None:
            mark_used(cache, key)
            progress.begin(files=len(ready.files), total_bytes=ready.size)
            progress.had(ready.size)
            progress.state("published")
            logger.info("the checkpoint is on this node already", extra=_about(config) | {"bytes": ready.size})
            return ready
        progress.share_in(cache.progress_file(key))
        remote = Remote(deadline, patience=patience, authority=authority, trouble=progress.trouble)
        try:
            files = _fetch_files(config, cache, remote, progress, spare_bytes)
        finally:
            remote.close()
            progress.share_no_more()
        record = Record(
            key=key,
            policy=config.policy,
            revision=config.revision,
            source=describe(config),
            files=tuple(sorted(files, key=lambda file: file.name)),
            fetched_at=time.time(),
            fetched_bytes=progress.received_bytes,
            fetch_s=round(time.monotonic() - begun, 3),
        )
        cache.publish(record)
        mark_used(cache, key)
        progress.state("published")
        logger.info(
            "checkpoint published",
            extra=_about(config) | {"bytes": record.size, "fetched": record.fetched_bytes, "seconds": record.fetch_s},
        )
        return record


def _fetch_files(
    config: DeliveryConfig, cache: Cache, remote: Remote, progress: Progress, spare_bytes: int
) -> list[FileRecord]:
    progress.state("preparing")
    wanted = catalogue.files_of(config, remote)
    own = catalogue.statistics_of(config)
    if own is not None:  # it takes the place of one of that name
        wanted = [file for file in wanted if file.name != own.name] + [own]
        checked_names(file.name for file in wanted)
    sized = _with_sizes(wanted, cache, remote, config.parallel)
    total = sum(file.size or 0 for file in sized)
    if total > config.max_bytes:
        raise unsafe(f"the checkpoint has {total:,} bytes, more than the {config.max_bytes:,} that are allowed")
    progress.begin(files=len(sized), total_bytes=total)
    _require_room(config, cache, remote, progress, sized, spare_bytes)
    fetched = _all(config, cache, remote, progress, sized)
    if not catalogue.is_archive(config):
        return fetched
    packed = fetched[0]
    files = archive.unpack(
        cache, cache.hold(config.key) / packed.sha256, config.key, config.sha256, config.max_bytes, progress
    )
    # Its files are there now; it would only take their space once more.
    cache.blob(packed.sha256).unlink(missing_ok=True)
    (cache.hold(config.key) / packed.sha256).unlink(missing_ok=True)
    if own is not None:
        files = [file for file in files if file.name != own.name] + fetched[1:]
    checked_names(file.name for file in files)
    return files


def _with_sizes(files: Sequence[RemoteFile], cache: Cache, remote: Remote, parallel: int) -> list[RemoteFile]:
    def sized(file: RemoteFile) -> RemoteFile:
        if file.sha256 and cache.blob(file.sha256).is_file():
            size: int | None = cache.blob(file.sha256).stat().st_size
        elif file.size is not None:
            return file
        else:
            size = remote.head(file.origin, file.remote).size
        return RemoteFile(file.name, file.origin, file.remote, size, file.sha256, file.git_oid)

    return _each(remote, parallel, "sizes", [partial(sized, file) for file in files])


def _require_room(
    config: DeliveryConfig,
    cache: Cache,
    remote: Remote,
    progress: Progress,
    files: Sequence[RemoteFile],
    spare_bytes: int,
) -> None:
    missing = 0
    for file in {file.sha256 or file.url: file for file in files}.values():
        if file.sha256 and cache.blob(file.sha256).is_file():
            continue
        begun = cache.partial(f"{file.sha256}.part")
        missing += max(0, (file.size or 0) - (begun.stat().st_size if file.sha256 and begun.exists() else 0))
    if catalogue.is_archive(config):
        missing += files[0].size or 0  # what it holds, at least as much again
    if not missing:
        return
    if config.cache_bytes:
        _make_room(config, cache, remote, progress, missing)
    if cache.free_bytes() < missing + spare_bytes:
        remove_quarantined(cache.quarantine("."))
    cache.require_room(missing + spare_bytes)


def _make_room(config: DeliveryConfig, cache: Cache, remote: Remote, progress: Progress, missing: int) -> None:
    """Prunes to the limit; where what may go has only just lost its worker, waits until it surely has none.

    The limit is a wish: where there is no time to wait, the cache grows beyond it as far as the disk goes.
    """
    while True:
        pruned = make_room(cache, config.cache_bytes, missing)
        if pruned.left_bytes + missing <= config.cache_bytes or not pruned.resting:
            return
        rest_s = min(pruned.resting.values())
        if time.monotonic() + rest_s >= remote.deadline:
            return
        progress.trouble(f"room: a checkpoint that may go was in use a moment ago; waits {rest_s:.0f} s")
        logger.info("waits for room in the cache", extra=_about(config) | {"seconds": round(rest_s)})
        remote.stop.wait(rest_s)
        remote.require_go_on()


def _all(
    config: DeliveryConfig, cache: Cache, remote: Remote, progress: Progress, files: Sequence[RemoteFile]
) -> list[FileRecord]:
    """Fetches all files, a few at a time."""
    transfers = [Transfer(cache, remote, progress, config.key, file, config.max_bytes) for file in files]
    return _each(remote, config.parallel, "fetch", [transfer.fetch for transfer in transfers])


def _each(remote: Remote, parallel: int, what: str, work: Sequence[Callable[[], _ResultT]]) -> list[_ResultT]:
    """The results of all, a few at a time; the first failure ends the others, which keep what they have."""
    with ThreadPoolExecutor(parallel, thread_name_prefix=what) as pool:
        running = [pool.submit(one) for one in work]
        done, _ = wait(running, return_when=FIRST_EXCEPTION)
        failed = [error for task in done if (error := task.exception()) is not None]
        if failed:
            remote.stop.set()
            for task in running:
                task.cancel()
    if failed:
        raise next((error for error in failed if not isinstance(error, StoppedError)), failed[0])
    return [task.result() for task in running]


def describe(config: DeliveryConfig) -> str:
    """Where a checkpoint comes from, for people; without credentials."""
    source = config.source
    if isinstance(source, HubSource):
        return f"hub {source.repo}@{source.revision}"
    if isinstance(source, S3Source):
        return f"s3://{source.bucket}/{source.prefix}"
    return shown(source.url)


def _about(config: DeliveryConfig) -> dict[str, str]:
    return {"policy": config.policy, "revision": config.revision, "key": config.key, "source": describe(config)}
