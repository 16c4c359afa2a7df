"""Checkpoints leave a node by age, never while they are used, and take only files along that nobody else has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest
from taktline_protocol.delivery import RECORD_FILE, DeliveryConfig, HttpSource
from taktline_protocol.deployment import EngineConfig, ModelConfig
from taktline_protocol.errors import TaktlineError
from taktline_worker.delivery.cache import Cache
from taktline_worker.delivery.fetch import fetch
from taktline_worker.delivery.prune import IDLE_S, prune
from taktline_worker.models.registry import load_adapter

from tests.delivery.conftest import HASTE, content

SHARED = content(10_000, 99)


def three(mirror, cache, ages_s=(3000, 2000, 1000)):
    """Three checkpoints, the first the longest unused, with one file in common."""
    records = []
    for number, age_s in enumerate(ages_s):
        sha256 = mirror.put(f"m{number}", {"own.bin": content(20_000, number), "shared.bin": SHARED})
        config = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m{number}", sha256=sha256))
        records.append(fetch(config, cache, patience=HASTE, spare_bytes=0))
        when = time.time() - age_s
        os.utime(cache.model(records[-1].key) / RECORD_FILE, (when, when))
        idle_for(cache, records[-1].key, age_s)
    return records


def idle_for(cache, key, seconds):
    """An earlier fetch saw so long ago that nobody had the checkpoint open."""
    note = cache.folder / "locks" / f"idle-{key}"
    note.touch()
    when = time.time() - seconds
    os.utime(note, (when, when))


HOLD = (
    "import sys; from pathlib import Path; from taktline_worker.delivery.in_use import hold;"
    "print(hold(Path(sys.argv[1])), flush=True); sys.stdin.read()"
)


@contextlib.contextmanager
def worker_of(cache, key):
    """A process that has a checkpoint open, and is killed at the end."""
    command = [sys.executable, "-c", HOLD, str(cache.model(key))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "True\n"
        yield
        worker.kill()  # the kernel lets go of it


def test_files_that_two_checkpoints_share_are_kept_once(mirror, cache):
    first, second, third = three(mirror, cache)
    assert (second.fetched_bytes, third.fetched_bytes) == (20_000, 20_000)
    assert sum(path.stat().st_size for path in cache.blob("x").parent.iterdir()) == 70_000
    assert first.fetched_bytes == 30_000


def test_the_longest_unused_goes_first_and_only_as_far_as_needed(mirror, cache):
    first, second, third = three(mirror, cache)
    result = prune(cache, 50_000, min_age_s=60, dry_run=True)
    assert [record.key for record in result.removed] == [first.key]
    assert cache.complete(first.key)
    result = prune(cache, 50_000, min_age_s=60)
    assert [record.key for record in result.removed] == [first.key]
    assert (result.freed_bytes, result.left_bytes) == (20_000, 50_000)
    assert cache.complete(first.key) is None
    assert cache.complete(second.key)
    assert cache.complete(third.key)


def test_what_a_worker_has_open_stays_and_what_was_just_asked_for_too(mirror, cache):
    first, second, third = three(mirror, cache, ages_s=(3000, 2000, 0))
    with worker_of(cache, first.key):
        result = prune(cache, 0, min_age_s=60)
        assert result.in_use == [first.key]
        assert [record.key for record in result.removed] == [second.key]
        assert cache.complete(third.key)
    assert prune(cache, 0, min_age_s=60).removed == [], "its container may be about to start again"
    idle_for(cache, first.key, IDLE_S + 1)
    assert [record.key for record in prune(cache, 0, min_age_s=60).removed] == [first.key]


def test_a_checkpoint_stays_while_the_container_that_had_it_open_restarts(mirror, cache):
    """A crashed container is started again without a fetch, after a pause of seconds to minutes."""
    first, second, _ = three(mirror, cache, ages_s=(90_000, 80_000, 70_000))
    with worker_of(cache, first.key):
        prune(cache, 1 << 40)  # any fetch of another policy on the node, while the worker serves
    result = prune(cache, 50_000)
    assert list(result.resting) == [first.key]
    assert IDLE_S - 60 < result.resting[first.key] <= IDLE_S
    assert [record.key for record in result.removed] == [second.key], "another one makes room"
    with worker_of(cache, first.key):  # it is back
        assert prune(cache, 0).in_use == [first.key]
    assert cache.complete(first.key)


def test_what_was_asked_for_since_it_was_seen_idle_counts_from_then(mirror, cache):
    first, *_ = three(mirror, cache, ages_s=(9000, 8000, 7000))
    os.utime(cache.model(first.key) / RECORD_FILE)  # a pod came, and its container crashed at once
    assert first.key in prune(cache, 0, min_age_s=0).resting


def test_a_fetch_waits_for_room_rather_than_take_what_was_in_use_a_moment_ago(mirror, cache, monkeypatch):
    first, second, third = three(mirror, cache, ages_s=(90_000, 80_000, 70_000))
    for record in (first, second, third):
        idle_for(cache, record.key, IDLE_S - 0.2)
    sha256 = mirror.put("m9", {"own.bin": content(20_000, 9)})
    config = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m9", sha256=sha256), cache_bytes=70_000)
    fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert cache.complete(first.key) is None
    # Without the time to wait the limit gives way, not the checkpoint.
    idle_for(cache, second.key, 0)
    idle_for(cache, third.key, 0)
    sha256 = mirror.put("m10", {"own.bin": content(20_000, 10)})
    more = DeliveryConfig(
        source=HttpSource(url=f"{mirror.url}/m10", sha256=sha256), cache_bytes=70_000, deadline_s=IDLE_S / 2
    )
    assert cache.complete(fetch(more, cache, patience=HASTE, spare_bytes=0).key)
    assert cache.complete(second.key)
    assert cache.complete(third.key)


def test_whatever_process_loads_a_checkpoint_holds_it(mirror, cache):
    first, *_ = three(mirror, cache)
    config = EngineConfig(policy="x", model=ModelConfig(family="pi05", path=str(cache.model(first.key)), revision="a"))
    with pytest.raises(TaktlineError):  # it is no policy; but it was opened
        load_adapter(config)
    assert prune(cache, 0, min_age_s=60).in_use == [first.key]


def test_a_fetch_makes_room_within_the_limit_of_the_cache(mirror, cache):
    first, *_ = three(mirror, cache, ages_s=(9000, 8000, 10))
    sha256 = mirror.put("m9", {"own.bin": content(20_000, 9)})
    config = DeliveryConfig(source=HttpSource(url=f"{mirror.url}/m9", sha256=sha256), cache_bytes=70_000)
    record = fetch(config, cache, patience=HASTE, spare_bytes=0)
    assert cache.complete(record.key)
    assert cache.complete(first.key) is None
    assert len(cache.records()) == 3


def test_what_dead_fetches_left_goes_and_what_a_live_one_has_stays(cache):
    old = time.time() - 9000
    for name in ("a" * 64, "b" * 64):
        part = cache.partial(f"{name}.part")
        part.write_bytes(bytes(1000))
        os.utime(part, (old, old))
    cache.blob("c" * 64).write_bytes(bytes(1000))
    with cache.lock("file-" + "b" * 32, time.monotonic() + 5):
        assert prune(cache, 1 << 40).freed_bytes == 2000
    assert [path.name[0] for path in cache.partial(".").glob("*.part")] == ["b"]


def test_links_that_a_killed_prune_or_publish_left_keep_no_file(mirror, cache):
    first, second, third = three(mirror, cache)
    cache.model(first.key).rename(cache.partial(f"trash-{first.key}"))
    cache.model(second.key).rename(cache.partial(f"build-{second.key}"))
    cache.partial(f"unpack-{third.key}").write_bytes(bytes(10))
    with cache.lock(f"model-{second.key}", time.monotonic() + 5):  # it is being built
        assert prune(cache, 1 << 40).freed_bytes == 20_000
    assert prune(cache, 1 << 40).freed_bytes == 20_000
    assert not list(cache.partial(".").iterdir())
    assert cache.complete(third.key)


def test_what_another_prune_takes_meanwhile_is_no_failure(mirror, cache, monkeypatch):
    _, second, third = three(mirror, cache)
    listed = cache.records()
    prune(cache, 50_000, min_age_s=60)
    monkeypatch.setattr(cache, "records", lambda: listed)
    result = prune(cache, 30_000, min_age_s=60)
    assert ([record.key for record in result.removed], result.in_use) == ([second.key], [])
    assert cache.complete(third.key)


@pytest.mark.parametrize("folder", ["blobs", "partial", "quarantine"])
def test_a_file_that_goes_while_it_is_listed_is_no_failure(cache, monkeypatch, folder):
    name = {"blobs": "a" * 64, "partial": "a" * 64 + ".part", "quarantine": "a" * 64 + ".bin"}[folder]
    path = cache.folder / folder / name
    path.write_bytes(bytes(1000))
    os.utime(path, (0, 0))
    stat = type(path).stat

    def gone(asked, **how):
        if asked.name == name:
            path.unlink(missing_ok=True)
        return stat(asked, **how)

    monkeypatch.setattr(type(path), "stat", gone)
    assert prune(cache, 0).freed_bytes == 0


def test_processes_with_one_number_may_open_a_cache_at_the_same_instant(tmp_path, monkeypatch):
    touch = type(tmp_path).touch

    def taken(path, *arguments, **how):
        touch(path, *arguments, **how)
        path.unlink()

    monkeypatch.setattr(type(tmp_path), "touch", taken)
    assert Cache(tmp_path / "cache").records() == []
