"""Batches to replicas: predicted completion, and what the port knows of a request without unfolding it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_protocol import TaktlineError, worker_pb2
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, ParallelOptions
from taktline_worker.lifecycle import ServeOptions
from taktline_worker.replicas.assignment import Assignment
from taktline_worker.replicas.front import Front, _Fleet, launches
from taktline_worker.replicas.metrics import ReplicaMetrics
from taktline_worker.replicas.request import count_items

TABLE = {1: 0.010, 2: 0.012, 4: 0.020}


def fleet(count: int) -> Assignment:
    made = Assignment()
    for replica in range(count):
        made.add(replica, TABLE)
    return made


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.010), (3, 0.020), (4, 0.020), (5, 0.030), (8, 0.040), (11, 0.060)])
def test_duration_of_a_batch(size: int, seconds: float) -> None:
    assert fleet(1).duration(0, size) == pytest.approx(seconds)


def test_nobody_serves() -> None:
    assert Assignment().assign(1, 0.0) is None


def test_batches_alternate_while_all_are_busy_and_follow_who_is_free() -> None:
    made = fleet(2)
    first = made.assign(4, 0.0)
    second = made.assign(1, 0.0)
    assert first is not None
    assert second is not None
    assert (first[0], second[0]) == (0, 1)
    third = made.assign(1, 0.0)  # behind the short one: 20 ms on replica 1, 30 ms on replica 0
    assert third is not None
    assert third[0] == 1
    fourth = made.assign(1, 0.0)  # 30 ms on either: replica 0 has fewer
    assert fourth is not None
    assert fourth[0] == 0
    made.finished(*first, now=0.005)  # sooner than predicted
    assert made.completion(0, 1, 0.005) == pytest.approx(0.005 + 0.010 + 0.010)
    assert made.completion(1, 1, 0.005) == pytest.approx(0.010 + 0.010 + 0.010)


def test_a_late_batch_is_expected_to_be_as_late_again() -> None:
    made = fleet(2)
    made.assign(1, 0.0)
    assert made.completion(0, 1, 0.010) == pytest.approx(0.020)
    assert made.completion(0, 1, 1.010) == pytest.approx(2.010 + 0.010)
    # So nobody is sent to a replica that hangs while another one works.
    assert [made.assign(1, 1.010)[0] for _ in range(5)] == [1] * 5  # type: ignore[index]


def test_a_replica_that_never_ends_its_batch_is_stuck() -> None:
    made = fleet(2)
    ticket = made.assign(1, 0.0)
    second = made.assign(4, 1.0)
    assert ticket is not None
    assert second is not None
    assert made.stuck(10.0) == []
    assert made.stuck(10.5) == [0]
    made.finished(*ticket, now=10.6)
    assert made.stuck(10.9) == []
    made.remove(1)
    assert made.stuck(100.0) == []
    slow = Assignment()
    slow.add(0, {1: 2.0})
    slow.assign(1, 0.0)
    assert (slow.stuck(39.0), slow.stuck(41.0)) == ([], [0]), "20 times its own"


def test_a_replica_that_left_gets_nothing_and_comes_back_empty() -> None:
    made = fleet(2)
    lost = made.assign(1, 0.0)
    assert lost == (0, lost[1] if lost else None)
    made.remove(0)
    assert [made.assign(1, 0.0)[0] for _ in range(3)] == [1, 1, 1]  # type: ignore[index]
    made.finished(*lost, now=1.0)  # its answer was an error; nothing to account
    made.add(0, TABLE)
    assert made.completion(0, 1, 1.0) == pytest.approx(1.010)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 0.02), st.booleans()), min_size=1, max_size=60),
    st.integers(1, 5),
)
def test_no_replica_would_have_been_done_sooner(arrivals: list[tuple[int, float, bool]], count: int) -> None:
    made, now = fleet(count), 0.0
    waiting: list[tuple[int, int]] = []
    for size, gap, answered in arrivals:
        now += gap
        if answered and waiting:
            made.finished(*waiting.pop(0), now=now)
        predicted = {replica: made.completion(replica, size, now) for replica in made.replicas}
        chosen = made.assign(size, now)
        assert chosen is not None
        assert predicted[chosen[0]] == min(predicted.values())
        waiting.append(chosen)
    for ticket in waiting:
        made.finished(*ticket, now=now)
    assert {made.completion(replica, 1, now) for replica in made.replicas} == {now + TABLE[1]}


@given(st.integers(0, 40), st.binary(max_size=300), st.text(max_size=20))
def test_items_are_counted_like_the_parser_does(count: int, image: bytes, policy: str) -> None:
    items = [
        worker_pb2.InferItem(
            request_id=str(number), images={"a": worker_pb2.Image(encoding="raw", data=image, shape=[1, 2, 3])}, seq=7
        )
        for number in range(count)
    ]
    request = worker_pb2.InferRequest(policy=policy, revision="r", items=items)
    assert count_items(request.SerializeToString()) == count


@given(st.binary(max_size=200))
def test_any_bytes_have_a_count(data: bytes) -> None:
    assert count_items(data) >= 0


def test_a_number_without_end_is_read_no_further_than_the_longest() -> None:
    """A number of a message has ten bytes at most; one of a MiB was added up byte by byte for seconds."""
    read: list[int] = []

    class Counted(bytes):
        def __getitem__(self, at: Any) -> Any:
            read.append(at)
            return super().__getitem__(at)

    assert count_items(Counted(b"\xff" * 1_000 + b"\x01")) == 1
    assert read == list(range(10))


def _launches(environment: dict[str, str], dp: int = 2, device: Any = "auto", **each: int) -> list[Any]:
    config = EngineConfig(
        policy="p",
        model=ModelConfig(family="pi05", path="x", revision="r"),
        engine=EngineOptions(device=device, parallel=ParallelOptions(dp=dp, **each)),
    )
    return launches(config, Path("engine.json"), ServeOptions("127.0.0.1:0", grace_s=7.0), Path("/tmp/x"), environment)


def test_each_replica_owns_a_gpu() -> None:
    found = _launches({"PATH": "p", "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"})
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in found] == ["GPU-a", "GPU-b"]
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in _launches({}, dp=3)] == ["0", "1", "2"]
    assert len({launch.socket for launch in found}) == 2
    assert {launch.environment["PATH"] for launch in found} == {"p"}


def test_each_replica_owns_the_gpus_of_its_mesh() -> None:
    found = _launches({"CUDA_VISIBLE_DEVICES": "a,b,c,d,e,f,g,h"}, cfg=2, tp=2)
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in found] == ["a,b,c,d", "e,f,g,h"]
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in _launches({}, cfg=2)] == ["0,1", "2,3"]
    with pytest.raises(TaktlineError, match=r"names 7, where each replica needs 4 \(cfg x tp\)"):
        _launches({"CUDA_VISIBLE_DEVICES": "a,b,c,d,e,f,g"}, cfg=2, tp=2)


def test_fewer_gpus_than_replicas_are_refused() -> None:
    with pytest.raises(TaktlineError, match="names 1"):
        _launches({"CUDA_VISIBLE_DEVICES": "0"})


def test_replicas_on_the_cpu_share_its_cores() -> None:
    found = _launches({"CUDA_VISIBLE_DEVICES": "0"}, device="cpu")
    assert [launch.environment["CUDA_VISIBLE_DEVICES"] for launch in found] == ["0", "0"]
    assert all(int(launch.environment["OMP_NUM_THREADS"]) >= 1 for launch in found)
    assert _launches({"OMP_NUM_THREADS": "3"}, device="cpu")[0].environment["OMP_NUM_THREADS"] == "3"


def test_the_slowest_replica_speaks_for_all() -> None:
    def info(one: float, two: float, cheap: float) -> worker_pb2.InfoResponse:
        times = [worker_pb2.BucketTime(batch=b, median_ms=ms, p99_ms=2 * ms) for b, ms in ((1, one), (2, two))]
        level = worker_pb2.CheaperLevel(
            solver_steps=5, t_sync=[worker_pb2.BucketTime(batch=1, median_ms=cheap, p99_ms=2 * cheap)]
        )
        return worker_pb2.InfoResponse(policy="p", t_sync=times, cheaper=[level])

    front = Front.__new__(Front)
    front._changed = threading.Condition()
    front._fleet = _Fleet(Assignment(), {0: info(3.0, 7.0, 1.0), 1: info(4.0, 6.0, 2.0)})
    front.replicas = [None] * 2  # type: ignore[list-item]  # only counted
    merged = front.info()
    assert [(t.batch, t.median_ms, t.p99_ms) for t in merged.t_sync] == [(1, 4.0, 8.0), (2, 7.0, 14.0)]
    assert [(t.median_ms, t.p99_ms) for level in merged.cheaper for t in level.t_sync] == [(2.0, 4.0)]
    assert (merged.policy, merged.replicas) == ("p", 2)
    assert front._fleet.infos[0].t_sync[0].median_ms == 3.0, "what a replica said is left as it was"


def test_a_replica_that_ends_while_it_is_scraped_hides_no_other() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx_gauge 1"
    addresses = {}
    for replica, answer in enumerate((whole, whole.replace(b": 9", b": 900"), b"no HTTP\r\n")):
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_answer_once, args=(server, answer), daemon=True).start()
        addresses[replica] = f"127.0.0.1:{server.getsockname()[1]}"
    families = {family.name: family for family in ReplicaMetrics("p", lambda: addresses, lambda: 0).collect()}
    assert [sample.labels for sample in families["x_gauge"].samples] == [{"replica": "0"}]


def _answer_once(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with server, connection:
        connection.recv(4096)
        connection.sendall(answer)


def test_the_port_of_the_replicas_needs_no_torch() -> None:
    code = "import sys, taktline_worker.replicas.front; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_replicas_page_is_read_past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
    server = socket.create_server(("127.0.0.1", 0))
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx_gauge 1\n"
    threading.Thread(target=_answer_once, args=(server, answer), daemon=True).start()
    addresses = {0: f"127.0.0.1:{server.getsockname()[1]}"}
    assert "x_gauge" in {family.name for family in ReplicaMetrics("p", lambda: addresses, lambda: 0).collect()}
