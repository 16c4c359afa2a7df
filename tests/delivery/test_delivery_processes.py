"""Processes of one node that share a cache: they fetch once, may be killed at any byte, and never see halves."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from taktline_protocol.delivery import DeliveryConfig, HttpSource
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_worker.delivery.cache import Cache
from taktline_worker.delivery.fetch import fetch

from tests.delivery.conftest import HASTE, content
from tests.delivery.mirror import Mirror
from tests.waiting import until

FILES = {"config.json": b"{}", "a.safetensors": content(600_000, 1), "b.safetensors": content(600_000, 2)}
SIZE = sum(map(len, FILES.values()))
FETCH = [str(Path(sys.executable).with_name("taktline-worker")), "model", "fetch"]


@pytest.fixture
def delivery(mirror: Mirror, tmp_path: Path) -> Path:
    sha256 = mirror.put("m", FILES)
    config = DeliveryConfig(policy="reach", source=HttpSource(url=f"{mirror.url}/m", sha256=sha256), parallel=2)
    path = tmp_path / "delivery.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def start(delivery: Path, cache: Path, *more: str, **options: object) -> subprocess.Popen[str]:
    command = [*FETCH, f"--config={delivery}", f"--cache={cache}", "--spare=0", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0, **options
    )


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are gone after the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def whole(folder: Path) -> bool:
    return all((folder / name).read_bytes() == data for name, data in FILES.items())


def test_two_processes_at_once_fetch_once(mirror, delivery, tmp_path, ended):
    mirror.pace_s = 0.01
    ended += [start(delivery, tmp_path / "cache") for _ in range(2)]
    printed = [process.communicate(timeout=120)[0].strip() for process in ended]
    assert [process.returncode for process in ended] == [0, 0]
    assert printed[0] == printed[1]
    assert whole(Path(printed[0]))
    assert mirror.served_bytes == SIZE + len(mirror.files["/m/SHA256SUMS"])


def test_a_process_that_waits_tells_how_far_the_other_one_is(mirror, delivery, tmp_path, ended):
    mirror.fault = lambda asked: (
        {"cut": 300_000, "stall": True} if asked.method == "GET" and "safetensors" in asked.path else None
    )
    cache = tmp_path / "cache"
    ended.append(start(delivery, cache))
    until(lambda: mirror.served_bytes >= 600_000, "both files are on their way")
    ended.append(start(delivery, cache))
    waiting = ended[1]
    assert waiting.stderr is not None
    line = next(line for line in waiting.stderr if line.startswith("waiting") and "%" in line)
    assert "1.2 MB" in line
    mirror.fault = lambda asked: None
    mirror.released.set()  # the stalled connections end; what is missing comes by new ones
    assert [process.wait(timeout=120) for process in ended] == [0, 0]


def test_killed_in_the_middle_it_goes_on_and_nobody_waits_for_the_dead(mirror, delivery, tmp_path, ended):
    mirror.pace_s = 0.02
    ended.append(start(delivery, tmp_path / "cache"))
    until(lambda: mirror.served_bytes > 300_000, "a part has come")
    os.kill(ended[0].pid, signal.SIGKILL)
    ended[0].wait()
    assert not list((tmp_path / "cache" / "models").iterdir()), "no half of it is to be seen"
    mirror.pace_s = 0.0
    before = mirror.served_bytes
    ended.append(start(delivery, tmp_path / "cache", "--json"))
    record = msgspec.json.decode(ended[1].communicate(timeout=120)[0])
    assert ended[1].returncode == 0
    assert record["fetched_bytes"] < SIZE
    assert before + record["fetched_bytes"] >= SIZE
    assert whole(tmp_path / "cache" / "models" / record["key"])


def test_told_to_end_it_ends_at_once_also_as_the_first_process_of_a_container(mirror, delivery, tmp_path, ended):
    mirror.fault = lambda asked: (
        {"cut": 300_000, "stall": True} if asked.method == "GET" and "safetensors" in asked.path else None
    )
    ended.append(start(delivery, tmp_path / "cache"))
    until(lambda: mirror.served_bytes >= 600_000, "both files are on their way")
    os.kill(ended[0].pid, signal.SIGTERM)
    assert ended[0].wait(timeout=60) == 128 + signal.SIGTERM, "a handler of its own; the first process has no other"
    mirror.fault = lambda asked: None
    mirror.released.set()
    ended.append(start(delivery, tmp_path / "cache"))
    assert ended[1].wait(timeout=120) == 0


def test_a_reader_never_sees_a_half(mirror, delivery, cache):
    config = msgspec.json.decode(delivery.read_bytes(), type=DeliveryConfig)
    mirror.pace_s = 0.002
    folder, seen, done = cache.model(config.key), [], threading.Event()

    def look() -> None:
        while not done.is_set():
            if folder.exists():
                seen.append(whole(folder))

    reader = threading.Thread(target=look)
    reader.start()
    try:
        fetch(config, cache, patience=HASTE)
        until(lambda: seen, "the reader has seen it")
    finally:
        done.set()
        reader.join()
    assert all(seen)


def test_a_published_folder_that_lost_a_file_is_made_whole(mirror, delivery, cache):
    config = msgspec.json.decode(delivery.read_bytes(), type=DeliveryConfig)
    record = fetch(config, cache, patience=HASTE)
    (cache.model(record.key) / "a.safetensors").unlink()
    fetch(config, cache, patience=HASTE)
    assert whole(cache.model(record.key))


def limited(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_full_disk_frees_only_our_own_partial_files_and_says_how_much_is_needed(mirror, delivery, tmp_path, ended):
    cache = Cache(tmp_path / "cache")
    other = DeliveryConfig(
        source=HttpSource(url=f"{mirror.url}/other", sha256=mirror.put("other", {"x.bin": content(5000, 9)}))
    )
    kept = fetch(other, cache, patience=HASTE)
    foreign = cache.partial("0" * 64 + ".part")
    foreign.write_bytes(b"another fetch's")
    # The limit of a file's size stands for the end of the disk: the kernel refuses the write in the same place.
    ended.append(start(delivery, cache.folder, preexec_fn=limited(200_000)))
    _, errors = ended[0].communicate(timeout=120)
    assert ended[0].returncode == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("taktline-worker: disk_full: ")
    assert "600,000 bytes more are needed" in last
    assert "prune" in last
    left = {path.name for path in cache.partial(".").glob("*.part")}
    assert foreign.name in left
    assert hashlib.sha256(FILES["a.safetensors"]).hexdigest() + ".part" not in left
    assert cache.complete(kept.key) is not None, "what others use stays"
    ended.append(start(delivery, cache.folder))
    assert ended[1].wait(timeout=120) == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small tmpfs takes the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(mirror, delivery, small_disk):
    config = msgspec.json.decode(delivery.read_bytes(), type=DeliveryConfig)
    with pytest.raises(TaktlineError) as caught:
        fetch(config, Cache(small_disk), patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert "1,200,002 bytes more are needed" in caught.value.message
    assert not mirror.gets("/m/a.safetensors")


def test_a_disk_that_fills_up_meanwhile(mirror, delivery, small_disk):
    config = msgspec.json.decode(delivery.read_bytes(), type=DeliveryConfig)
    # The server keeps the size to itself, so the room cannot be checked before.
    mirror.fault = lambda asked: {"status": 405} if asked.method == "HEAD" else None
    with pytest.raises(TaktlineError) as caught:
        fetch(config, Cache(small_disk), patience=HASTE, spare_bytes=0)
    assert caught.value.code is ErrorCode.DISK_FULL
    assert not list(small_disk.glob("models/*"))
    statistics = os.statvfs(small_disk)
    assert statistics.f_bavail * statistics.f_frsize > 200_000, "the node is not left full"
