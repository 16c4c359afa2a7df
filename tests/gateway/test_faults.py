"""Workers that die, hang and move, robots that leave, a gateway that drains: every request gets its answer."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from taktline_gateway.lane import Lane
from taktline_gateway.telemetry import Telemetry
from taktline_protocol.codecs import MediaType, encode
from taktline_protocol.deployment import Route, Target

from tests.waiting import until

WAIT = "slow 600"


def test_a_worker_killed_in_a_batch_fails_only_that_batch(bare_stack):
    stack = bare_stack
    worker = stack.start_worker()
    stack.write_routes(worker)
    stack.start_gateway()
    stack.wait_workers(1)
    status, error = stack.act(instruction="exit")
    assert (status, error.code) == (502, "worker_failed")
    down, error = stack.act(budget_ms=500.0)
    assert (down, error.code) == (503, "worker_unavailable")
    stack.start_worker(worker)
    stack.wait_workers(1)
    assert stack.act()[0] == 200


def test_a_batch_is_sent_elsewhere_when_its_worker_dies_and_time_is_left(bare_stack):
    stack = bare_stack
    workers = [stack.start_worker(), stack.start_worker()]
    stack.write_routes(*workers)
    stack.start_gateway()
    stack.wait_workers(2)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(stack.act, robot="a", instruction=WAIT)
        first = until(lambda: stack.batches(), "a batch at the worker")[0]["worker"]
        stack.workers[first].kill()
        status, chunk = slow.result()
    assert status == 200
    assert chunk.worker != first
    assert [batch["worker"] for batch in stack.batches()] == [first, chunk.worker]


def test_a_hung_worker_costs_its_batch_and_the_next_goes_through(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    status, error = stack.act(robot="a", instruction="hang", budget_ms=900.0)
    assert (status, error.code) == (502, "worker_failed")
    assert "DEADLINE_EXCEEDED" in error.message
    assert stack.act(robot="b")[0] == 200


def test_a_failing_batch_opens_the_circuit_and_closes_it_again(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    assert stack.act(instruction="fail")[1].code == "worker_failed"
    status, error = stack.act(budget_ms=50.0)
    assert (status, error.code) == (503, "deadline_unreachable"), "the worker rests for longer than this budget"
    assert stack.act()[0] == 200, "a longer budget waits for the worker's rest to end"


def test_batches_carry_the_deadline(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    stack.act(budget_ms=20_000.0, actuate_ms=100.0, network_ms=20.0)
    batch = stack.batches()[0]
    assert 15_000 < batch["budgets_ms"][0] < 19_880
    assert 0 < batch["rpc_deadline_s"] < 20


def test_newer_observation_supersedes_the_queued_one(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(stack.act, robot="busy", instruction=WAIT)
        until(lambda: stack.batches(), "a batch at the worker")
        old = pool.submit(stack.act, stack.observation(robot="a"))
        until(lambda: stack.metric("taktline_queue_depth") == 1, "a change of the queue's depth")
        new = pool.submit(stack.act, stack.observation(robot="a"))
        assert old.result()[1].code == "superseded"
        assert old.result()[0] == 409
        assert new.result()[0] == 200
        assert busy.result()[0] == 200
    assert stack.metric("taktline_superseded_total") == 1
    sent = [robot for batch in stack.batches() for robot in batch["robots"]]
    assert sent == ["busy", "a"]


def test_a_robot_that_leaves_the_queue_never_reaches_a_worker(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(stack.act, robot="busy", instruction=WAIT)
        until(lambda: stack.batches(), "a batch at the worker")
        body = encode(stack.observation(robot="gone"), MediaType.MSGPACK)
        connection = _post_raw(stack.url, body)
        until(lambda: stack.metric("taktline_queue_depth") == 1, "a change of the queue's depth")
        connection.close()
        until(lambda: stack.metric("taktline_queue_depth") == 0, "a change of the queue's depth")
        assert busy.result()[0] == 200
    assert stack.act(robot="next")[0] == 200
    assert [batch["robots"] for batch in stack.batches()] == [["busy"], ["next"]]
    assert stack.metric("taktline_requests_total", code="client_gone") == 1


def test_a_queued_request_times_out_by_the_timer_not_by_the_next_batch(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:300,8:400"))
    stack.start_gateway()
    stack.wait_workers(1)
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(stack.act, robot="busy", instruction="slow 1100")
        until(lambda: stack.batches(), "a batch at the worker")
        # Predicted to be free after 300 ms, so this one is admitted; the worker takes 1400 ms.
        status, error = stack.act(robot="a", budget_ms=750.0)
        assert not busy.done()
        assert (status, error.code) == (503, "deadline_unreachable")
        assert busy.result()[0] == 200
    assert stack.metric("taktline_deadline_misses_total", cause="refused") == 1


def test_a_late_answer_is_sent_and_counted_with_one_cause(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    status, chunk = stack.act(budget_ms=150.0, instruction="slow 300")
    assert status == 200
    assert chunk.margin_ms < 0
    assert stack.metric("taktline_deadline_misses_total", cause="inference") == 1
    assert stack.metric("taktline_deadline_misses_total") == 1
    assert stack.metric("taktline_control_margin_ms_bucket", le="0.0") == 1


def test_drain_answers_what_it_has_and_refuses_the_rest(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:1500"))
    stack.start_gateway("--drain-settle-s", "0.3")
    stack.wait_workers(1)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stack.act, robot="a")
        until(lambda: stack.batches(), "a batch at the worker")
        queued = pool.submit(stack.act, robot="b")
        until(lambda: stack.metric("taktline_queue_depth") == 1, "a change of the queue's depth")
        stack.gateway.send_signal(signal.SIGTERM)
        ready = until(
            lambda: (answer := stack.http.get(f"{stack.url}/readyz")).status_code == 503 and answer,
            "a gateway that is not ready",
        )
        assert ready.json()["code"] == "draining"
        assert stack.http.get(f"{stack.url}/healthz").status_code == 200
        status, error = stack.act(robot="c")
        assert (status, error.code) == (503, "draining")
        assert running.result()[0] == 200
        assert queued.result()[0] == 200
    assert stack.gateway.wait(timeout=30) == 0


def test_routes_are_read_again_through_a_symlink_swap(bare_stack):
    """As kubelet updates a mounted ConfigMap: the file is a link into a folder that is replaced as a whole."""
    stack = bare_stack
    first, second = stack.start_worker(), stack.start_worker()
    one, two = stack.folder / "v1", stack.folder / "v2"
    for folder, worker in ((one, first), (two, second)):
        folder.mkdir()
        stack.write_routes(worker)
        shutil.move(stack.routes, folder / "routes.json")
    link = stack.folder / "data"
    link.symlink_to(one)
    stack.routes.symlink_to(Path("data") / "routes.json")
    stack.start_gateway()
    stack.wait_workers(1)
    assert stack.act(robot="a")[1].worker == first
    fresh = stack.folder / "data.new"
    fresh.symlink_to(two)
    os.replace(fresh, link)
    # The removed worker goes on until the new one is reached: no observation finds none.
    answers = []
    until(
        lambda: answers.append(stack.act(robot="a")) or answers[-1][1].worker == second,
        "an answer of the second worker",
    )
    assert {status for status, _ in answers} == {200}
    assert {chunk.worker for _, chunk in answers} <= {first, second}


def test_each_removed_worker_has_its_own_time_to_stand_in(monkeypatch):
    """Two swaps in a row: the end of the first one's time takes away the first worker, and not the second."""
    monkeypatch.setattr("taktline_gateway.lane.SWAP_S", 1000.0)
    first, second, third = (Target(address=f"127.0.0.1:{port}") for port in (1, 2, 3))
    route = Route(policy="scripted", targets=(first,))

    async def run():
        lane = Lane(route, Telemetry(), max_queued=1)
        for target in (second, third):
            lane.apply(msgspec.structs.replace(route, targets=(target,)))
        assert set(lane._leaving) == {first, second}
        lane._let_go(first)
        assert set(lane._links) == {second, third}
        lane.apply(msgspec.structs.replace(route, targets=(second, third)))
        assert not lane._leaving, "the route names it again"
        lane.apply(msgspec.structs.replace(route, targets=(third,)))
        timer = lane._leaving[second]
        await lane.close()
        assert timer.cancelled()

    asyncio.run(run())


def test_a_removed_worker_stands_in_for_one_that_does_not_serve_yet(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    stack.write_routes("127.0.0.1:9")
    assert stack.act(robot="a")[0] == 200
    # A policy that is left without any target lets its workers go at once.
    stack.write_routes()
    until(lambda: stack.act(robot="a")[0] == 503, "a refusal")


def test_a_broken_routing_table_keeps_the_last_good_one(bare_stack):
    stack = bare_stack
    worker = stack.start_worker()
    stack.write_routes(worker)
    stack.start_gateway()
    stack.wait_workers(1)
    stack.routes.write_text('{"routes": [')
    until(lambda: "routes_refused" in stack.log.read_text(), "a line about refused routes")
    assert stack.act()[0] == 200
    stack.write_routes(worker, policy="renamed")
    until(lambda: stack.http.get(f"{stack.url}/v1/policies/renamed").status_code == 200, "a route of another name")
    assert stack.http.get(f"{stack.url}/v1/policies/scripted").json()["code"] == "unknown_policy"


def test_a_worker_of_another_policy_is_not_used(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(policy="other"))
    stack.start_gateway()
    until(lambda: "worker_refused" in stack.log.read_text(), "a line about a refused worker")
    assert stack.policy()["ready"] is False
    status, error = stack.act()
    assert (status, error.code) == (503, "worker_unavailable")


def test_a_gateway_without_a_valid_table_says_why_and_exits(bare_stack):
    command = ["taktline-gateway", "serve", "--routes", str(bare_stack.routes), "--listen", "127.0.0.1:1"]
    path = Path(os.sys.executable).parent
    done = subprocess.run([str(path / command[0]), *command[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "config_invalid" in done.stderr


def test_two_workers_share_the_load(bare_stack):
    stack = bare_stack
    workers = {stack.start_worker(), stack.start_worker()}
    stack.write_routes(*workers)
    stack.start_gateway()
    stack.wait_workers(2)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: stack.act(robot=f"r{n % 8}"), range(32)))
    assert {status for status, _ in answers} == {200}
    assert {chunk.worker for _, chunk in answers} == workers


def test_a_burst_shares_batches(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:1500,8:1500"))
    stack.start_gateway()
    stack.wait_workers(1)
    with ThreadPoolExecutor(9) as pool:
        busy = pool.submit(stack.act, robot="busy")
        until(lambda: stack.batches(), "a batch at the worker")
        others = [pool.submit(stack.act, robot=f"r{n}") for n in range(8)]
        until(lambda: stack.metric("taktline_queue_depth") == 8, "a change of the queue's depth")
        sizes = {other.result()[1].batch_size for other in others}
        assert busy.result()[1].batch_size == 1
    assert sizes == {8}


def test_logs_are_json_lines_with_the_request(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    _, error = stack.act(robot="arm-7", instruction="")
    lines = [json.loads(line) for line in stack.log.read_text().splitlines()]
    refused = next(line for line in lines if line["message"] == "request_refused")
    assert refused["code"] == "instruction_invalid"
    assert refused["request_id"] == error.request_id
    assert refused["policy"] == "scripted"


def test_a_slow_body_does_not_hold_the_others_up(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    body = encode(stack.observation(robot="slow"), MediaType.MSGPACK)
    connection = _post_raw(stack.url, body[:10], length=len(body))
    assert stack.act(robot="fast")[0] == 200
    connection.sendall(body[10:])
    assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    connection.close()


def test_many_threads_of_robots_all_get_exactly_one_answer(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker(t_sync="1:2,2:2,4:3,8:4"), max_wait_ms=5)
    stack.start_gateway()
    stack.wait_workers(1)
    outcomes = []

    def robot(name):
        for _ in range(20):
            outcomes.append(stack.act(robot=name, budget_ms=2_000.0)[0])

    threads = [threading.Thread(target=robot, args=(f"r{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 120
    assert stack.metric("taktline_requests_total") == 120
    assert stack.metric("taktline_requests_total", code="ok") == outcomes.count(200)
    assert stack.metric("taktline_control_margin_ms_count") == outcomes.count(200)


def _post_raw(url, body, length=None):
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        "POST /v1/policies/scripted/act HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection
