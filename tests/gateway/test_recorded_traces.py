"""Traces of real robots: what the timeline says becomes a file of numbers, and the file a trace at any load."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks.gateway.recorded import FOLDER, Recorder, Recording, read, recordings, write

ENGINE = SimpleNamespace(capacity_hz=10.0)


def test_a_gateways_requests_are_recorded_once_each_and_say_nothing_but_numbers(bare_stack, tmp_path):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:60"))
    stack.start_gateway()
    stack.wait_workers(1)
    recorder = Recorder(stack.url, "scripted")
    stack.act(robot="secret-arm", budget_ms=5_000.0)
    recorder.poll()
    stack.act(robot="secret-arm", budget_ms=4_000.0, priority="background")
    stack.act(robot="another (2)", budget_ms=3_000.0, actuate_ms=500.0)
    stack.act(robot="too-late", budget_ms=10.0)
    recorder.poll()
    recorder.poll()
    file = tmp_path / "deep" / "line.json.gz"
    write(file, recorder, recorder.info(), "a test")
    found = read(file)
    assert (found.name, found.about, found.robots, recorder.gaps) == ("line", "a test", 3, 0)
    assert found.info["horizon"] == 10
    shown = [
        (robot, budget, found.words[priority], found.words[outcome], actions)
        for _, robot, _, budget, priority, outcome, actions in found.requests
    ]
    assert shown == [
        (0, 5_000_000, "production", "ok", 10),
        (0, 4_000_000, "background", "ok", 10),
        (1, 2_500_000, "production", "ok", 10),
        (2, 10_000, "production", "deadline_unreachable", 0),
    ]
    arrivals = [request[0] for request in found.requests]
    assert arrivals[0] == 0
    assert all(later - earlier >= 55_000 for earlier, later in itertools.pairwise(arrivals[:3]))
    assert "secret" not in json.dumps([found.words, found.requests, found.info])
    # Written again, it is the same to the byte.
    first = file.read_bytes()
    write(file, recorder, recorder.info(), "a test")
    assert file.read_bytes() == first


def test_requests_that_the_timeline_has_forgotten_are_a_gap_and_no_file(tmp_path):
    def poll(*names):
        event = {"pid": 1, "tid": 1, "ts": 0.0}
        about = {"robot": "a", "seq": 1, "budget_ms": 1.0, "outcome": "ok"}
        events = [{**event, "args": {**about, "request_id": name}} for name in names]
        recorder._get = lambda path: {"otherData": {"origin_s": 5.0}, "traceEvents": events}
        recorder.poll()

    recorder = Recorder("http://nowhere", "p")
    poll("a", "b")
    poll("b", "c")
    poll()
    assert recorder.gaps == 0
    poll("e")
    assert recorder.gaps == 1
    with pytest.raises(RuntimeError, match="1 gaps"):
        write(tmp_path / "f.json.gz", recorder, {}, "")
    assert not list(tmp_path.iterdir())


def recording(budget_us: int) -> Recording:
    """Two robots in turn, one request every 200 ms."""
    requests = [[1_000_000 + 200_000 * n, n % 2, n // 2, budget_us, 0, 0, 50] for n in range(11)]
    return Recording("line", "", "2026-01-01", {}, ["production"], requests)


def test_a_recording_is_played_as_it_was_or_at_a_load():
    made = recording(300_000)
    assert (made.seconds, made.rate_hz, made.robots) == (2.0, 5.0, 2)
    as_it_was = made.trace(ENGINE)
    assert as_it_was.load == pytest.approx(0.5)
    assert [job.arrival for job in as_it_was.jobs[:3]] == pytest.approx([0.0, 0.2, 0.4])
    assert as_it_was.jobs[1].deadline == pytest.approx(0.5)
    slow = made.trace(ENGINE, 0.4)
    assert slow.jobs[-1].arrival == pytest.approx(2.5)
    assert slow.jobs[1].deadline - slow.jobs[1].arrival == pytest.approx(0.375)
    assert (slow.jobs[3].robot, slow.jobs[3].seq) == (1, 1)


def test_more_load_is_more_robots_who_come_later():
    made = recording(300_000)
    doubled = made.trace(ENGINE, 1.0)
    assert len(doubled.jobs) == 22
    assert {round(job.deadline - job.arrival, 9) for job in doubled.jobs} == {0.3}
    assert doubled.jobs[-1].arrival <= made.seconds
    times = Counter(round(job.arrival, 4) for job in doubled.jobs)
    assert times == Counter([round(0.2 * n, 4) for n in (*range(11), *range(1, 6), *range(5, 11))])
    for whose in {job.robot for job in doubled.jobs}:
        seqs = [job.seq for job in doubled.jobs if job.robot == whose]
        assert seqs == sorted(seqs)
    nearly = made.trace(ENGINE, 0.9)
    assert len(nearly.jobs) == 22
    assert nearly.jobs[-1].arrival == pytest.approx(doubled.jobs[-1].arrival / 0.9)


@pytest.mark.parametrize(("budget_us", "robots"), [(300_000, 2), (400_000, 2), (400_001, 4), (1_300_000, 8)])
def test_no_request_of_a_recording_takes_the_place_of_its_robots_last_one(budget_us, robots):
    jobs = recording(budget_us).trace(ENGINE).jobs
    assert len({job.robot for job in jobs}) == robots
    for whose in {job.robot for job in jobs}:
        own = [job for job in jobs if job.robot == whose]
        assert all(later.arrival >= earlier.deadline for earlier, later in itertools.pairwise(own))


def test_the_committed_recordings_are_small_and_say_where_they_are_from():
    found = list(recordings())
    assert len(found) >= 3
    for recording in found:
        assert (FOLDER / f"{recording.name}.json.gz").stat().st_size < 300_000
        assert recording.about
        assert recording.seconds > 60.0
        assert len(recording.requests) == len({tuple(request[:3]) for request in recording.requests})
        arrivals = [request[0] for request in recording.requests]
        assert arrivals == sorted(arrivals)
        outcomes = Counter(recording.words[request[5]] for request in recording.requests)
        assert outcomes["ok"] > 0.5 * len(recording.requests)
