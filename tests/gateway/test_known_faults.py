"""Faults that users of other robot and model servers report, each as a test that this gateway does not have it.

The names say the fault; the docstrings say of which server it was reported. Faults that belong to a client protocol, to
access or to the engine are tested with those: see the table in docs/scheduling.md.
"""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest
from taktline_gateway.deadline_queue import Priority
from taktline_gateway.scheduler import Refusal
from taktline_gateway.service_times import ServiceTimes
from taktline_protocol.messages import Array, BucketTime, Rtc

from tests.gateway.conftest import until
from tests.gateway.simulated_clock import Simulation, scheduler, ticket
from tests.ports import free_port


@pytest.fixture
def stack(shared_stack):
    """One gateway and one worker for all; what the worker got is told of each test alone."""
    shared_stack.record.unlink(missing_ok=True)
    until(lambda: shared_stack.act(robot="before", budget_ms=5_000.0)[0] == 200, "the worker's rest has ended")
    shared_stack.record.unlink(missing_ok=True)
    return shared_stack


# ----- one robot, or its batch, holds up the others


def test_inference_blocks_nobody_from_connecting(stack):
    """openpi: while the server infers, other robots cannot even connect."""
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(stack.act, robot="a", instruction="slow 500")
        until(stack.batches, "the batch of the first robot")
        assert stack.http.get(f"{stack.url}/healthz").status_code == 200
        assert stack.policy()["ready"] is True
        status, error = stack.act(robot="b", budget_ms=1.0)
        assert (status, error.code) == (503, "deadline_unreachable"), "answered at once, not after the batch"
        assert not slow.done()
        assert slow.result()[0] == 200


def test_robots_share_a_batch(stack):
    """openpi, IsaacLab-Arena: one observation a request, one request at a time."""
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(stack.act, robot="first", instruction="slow 600")
        until(stack.batches, "the first batch")
        rest = [pool.submit(stack.act, robot=f"r{n}") for n in range(8)]
        wait([first, *rest])
    assert {one.result()[0] for one in rest} == {200}
    assert max(len(batch["robots"]) for batch in stack.batches()) >= 4


def test_one_client_that_never_reads_its_turn_blocks_nobody(stack):
    """vla-scratch: a request-reply socket lets one client block all; sleeps were added against it."""
    import socket

    host, port = stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as idle:
        idle.sendall(b"POST /v1/policies/scripted/act HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
        assert stack.act(robot="b")[0] == 200


def test_a_listener_is_on_the_address_it_was_given_and_on_no_other(bare_stack):
    """GR00T: the server ignores its host and binds to every interface of the robot's computer."""
    import socket

    stack = bare_stack
    stack.write_routes(stack.start_worker())
    ports = {protocol: free_port() for protocol in ("openpi", "groot", "vla-eval", "lerobot")}
    flags = [
        word for name, port in ports.items() for word in (f"--{name}-listen", f"scripted=127.0.0.1:{port}")
    ]  # each address of 127.0.0.0/8 is this machine's
    stack.start_gateway(*flags)
    stack.wait_workers(1)
    ports["http"] = int(stack.url.rsplit(":", 1)[1])
    ports["worker"] = int(next(iter(stack.workers)).rsplit(":", 1)[1])
    for protocol, port in ports.items():
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=30)
        assert protocol


def test_a_delay_beyond_the_tail_crashes_nothing(bare_stack):
    """Psi0: the server ends on a delay that breaks its constraint; robots report late data and stall."""
    stack = bare_stack
    stack.write_routes(stack.start_worker(rtc="trained", rtc_max_delay=4))
    stack.start_gateway()
    stack.wait_workers(1)
    tail = Rtc(tail=Array.from_numpy(np.zeros((8, 6), dtype=np.float32)))
    for robot, late_ms in (("a", 0.0), ("b", 3_000.0)):
        assert stack.act(robot=robot, rtc=tail, network_ms=late_ms)[0] == 200
    assert max(delay for batch in stack.batches() for delay in batch["delays"]) == 4, "what the checkpoint was made for"
    assert stack.act(robot="c")[0] == 200


# ----- timeouts


def test_a_queue_timeout_fires_while_a_batch_runs(stack):
    """Triton: the timeout of a queued request fires only when the running batch ends."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stack.act, robot="a", instruction="slow 600")
        until(stack.batches, "the first batch")
        status, error = stack.act(robot="b", budget_ms=80.0)
        assert (status, error.code) == (503, "deadline_unreachable")
        assert not running.done(), "it was told before the running batch ended"
        assert running.result()[0] == 200


def test_expired_work_never_runs(stack):
    """llm-d: queued work that has expired still runs a forward pass that nobody reads."""
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stack.act, robot="a", instruction="slow 600")
        until(stack.batches, "the first batch")
        assert stack.act(robot="expired", budget_ms=80.0)[0] == 503
        running.result()
    stack.act(robot="c")
    assert [batch["robots"] for batch in stack.batches()] == [["a"], ["c"]]


def test_waiting_is_queueing_wherever_it_happens(stack):
    """The wait behind a batch is no inference, whether it is passed at the gateway or, sent ahead, at the worker."""
    for _ in range(12):  # until the gateway knows how far ahead it may send
        assert stack.act(robot="a")[0] == 200
    with ThreadPoolExecutor() as pool:
        running = pool.submit(stack.act, robot="a", instruction="slow 300")
        until(lambda: len(stack.batches()) == 13, "the slow batch")
        status, chunk = stack.act(robot="b")
        assert status == 200
        assert running.result()[0] == 200
    assert chunk.timings.queue_ms > 2 * chunk.timings.inference_ms


def test_throughput_does_not_decay_while_timeouts_fire():
    """Triton: with queue timeouts on, throughput decays over minutes until a reload.

    Five minutes of simulated overload, most of it refused by the timer: the last minute serves what the first one did.
    """
    rng = random.Random(3)
    simulation = Simulation(scheduler())
    at, arrivals = 0.0, []
    while at < 300.0:
        at += rng.expovariate(0.06 / 0.001)
        arrivals.append(at)
    served = [0] * 5
    for number, arrived in enumerate(arrivals):
        simulation.advance(arrived)
        simulation.submit(ticket(number, arrived + rng.uniform(0.011, 0.030), at=arrived))
    simulation.advance(301.0)
    for one in simulation.done:
        served[min(4, int(one.arrived_at // 60))] += 1
    assert sum(reason is Refusal.UNREACHABLE for reason in simulation.refused.values()) > 500
    assert served[4] >= 0.95 * served[0]
    assert len(simulation.scheduler.queue) == 0
    assert simulation.scheduler._in_flight == 0


# ----- abandoned, failed and hung work


def test_abandoned_requests_do_not_poison_later_batches(stack):
    """Ray Serve: requests whose clients have gone stay in the batch queue and spoil later batches."""
    import socket

    from taktline_protocol.codecs import MediaType, encode

    host, port = stack.url.removeprefix("http://").split(":")
    gone = "taktline_requests_total"
    with ThreadPoolExecutor() as pool:
        for attempt in range(10):
            before, batches = stack.metric(gone, policy="scripted", code="client_gone"), len(stack.batches())
            running = pool.submit(stack.act, robot="a", instruction="slow 600")
            until(lambda known=batches: len(stack.batches()) > known, "the slow batch")
            for number in range(5):
                body = encode(stack.observation(robot=f"gone{attempt}-{number}"), MediaType.MSGPACK)
                head = "POST /v1/policies/scripted/act HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\n"
                with socket.create_connection((host, int(port))) as leaving:
                    leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(
                lambda known=before: stack.metric(gone, policy="scripted", code="client_gone") >= known + 5,
                "all five have left",
            )
            left_in_time = not running.done()
            assert running.result()[0] == 200
            if left_in_time:
                break
        else:
            pytest.fail("this machine is too busy: nobody left while the batch ran")
        assert stack.act(robot="b")[0] == 200
    assert [batch["robots"] for batch in stack.batches()[batches:]] == [["a"], ["b"]]


@pytest.mark.parametrize("fault", ["fail", "nan", "item-error"])
def test_a_batch_exception_stops_nothing_after_it(stack, fault):
    """Ray Serve: after an exception in a batch no later request is answered."""
    for _ in range(3):
        assert stack.act(robot="a", instruction=fault)[0] != 200
        assert stack.act(robot="b")[0] == 200


def test_a_hung_batch_stops_nothing_after_it(stack):
    """The same for a batch that never comes back: the next one goes through once it is given up."""
    status, error = stack.act(robot="a", instruction="hang", budget_ms=3_000.0)
    assert (status, error.code) == (502, "worker_failed")
    assert stack.act(robot="b")[0] == 200


def test_a_client_that_gave_up_never_gets_the_old_chunk(stack):
    """openpi clients: after a timeout the next answer is the one to the old observation."""
    import httpx

    observation = stack.observation(robot="a", instruction="slow 300")
    from taktline_protocol.codecs import MediaType, encode

    url = f"{stack.url}/v1/policies/scripted/act"
    headers = {"content-type": "application/msgpack"}
    with httpx.Client(timeout=httpx.Timeout(30.0, read=0.1)) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post(url, content=encode(observation, MediaType.MSGPACK), headers=headers)
        newer = stack.observation(robot="a")
        answer = client.post(url, content=encode(newer, MediaType.MSGPACK), headers=headers, timeout=30.0)
    from taktline_protocol.codecs import decode_chunk

    assert decode_chunk(answer.content, MediaType.MSGPACK).seq == newer.seq


# ----- deadlines that are none


def test_earliest_deadline_is_not_first_come():
    """llm-d: the deadline order degenerates to the order of arrival."""
    simulation = Simulation(scheduler(max_batch=1))
    simulation.submit(ticket("busy", 9.0))
    for robot, deadline in (("late", 3.0), ("middle", 2.0), ("soon", 1.0)):
        simulation.submit(ticket(robot, deadline))
    simulation.advance(9.0)
    assert [batch.tickets[0].robot for batch in simulation.batches[1:]] == ["soon", "middle", "late"]


def test_deadlines_hold_across_tenants():
    """The same: a tight deadline of one tenant waits for another tenant's turn, as fairness picks the flow first."""
    simulation = Simulation(scheduler(max_batch=1))
    simulation.submit(ticket("busy", 9.0, tenant="a"))
    for robot in range(4):
        simulation.submit(ticket(robot, 5.0, tenant="a"))
    tight = ticket("tight", 0.021, tenant="b")
    simulation.submit(tight)
    simulation.advance(9.0)
    assert simulation.done[tight] == pytest.approx(0.020)


def test_what_cannot_be_met_is_shed_at_once():
    """inference gateways: requests whose objective cannot be met should be shed, not queued."""
    made = scheduler()
    made.submit(ticket("busy", 9.0), 0.0)
    made.poll(0.0)
    refused, _ = made.submit(ticket("b", 0.019), 0.0)
    assert refused.reason is Refusal.UNREACHABLE


def test_a_warm_up_outlier_does_not_inflate_the_estimate_for_ever():
    """LeRobot: the delay estimate is a maximum, which the first slow answer holds up."""
    times = ServiceTimes([BucketTime(batch=1, median_ms=10.0, p99_ms=11.0)], 1)
    times.record(1, 3.0)
    for _ in range(40):
        times.record(1, 0.010)
    assert times.median_s(1) == pytest.approx(0.010)
    assert times.tail_s(1) <= 0.011


def test_no_observation_is_dropped_for_being_similar(stack):
    """LeRobot: a similarity filter drops observations that the robot needs answered."""
    chunks = [stack.act(robot="still") for _ in range(5)]
    assert [status for status, _ in chunks] == [200] * 5
    assert [len(batch["robots"]) for batch in stack.batches()] == [1] * 5


def test_a_synchronised_fleet_does_not_wait_tens_of_seconds_for_its_chunks():
    """LeRobot: tens of seconds between chunks. Every robot's gap stays near its own period."""
    arrivals = [ticket(robot, turn * 0.2 + 0.15, at=turn * 0.2, seq=turn) for turn in range(50) for robot in range(16)]
    simulation = Simulation(scheduler())
    simulation.run(arrivals)
    by_robot: dict[str, list[float]] = {}
    for one, end in simulation.done.items():
        by_robot.setdefault(one.robot, []).append(end)
    gaps = [later - earlier for ends in by_robot.values() for earlier, later in itertools.pairwise(sorted(ends))]
    assert max(gaps) <= 0.35


def test_bulk_work_does_not_hold_up_a_robot():
    """RLinf-style rollouts fill the worker with large batches: a robot's observation still makes its deadline."""
    simulation = Simulation(scheduler())
    robot = [ticket("arm", 1.0 + n * 0.1 + 0.040, at=1.0 + n * 0.1, seq=n) for n in range(50)]
    bulk = [ticket(f"sim{n}", 600.0, at=0.0, priority=Priority.ROLLOUT) for n in range(2_000)]
    simulation.run([*robot, *bulk])
    late = [one for one in robot[1:] if simulation.done.get(one, 1e9) > one.deadline]
    assert not late, "only the very first cannot be foreseen"


def test_the_wait_for_a_booting_worker_is_told(bare_stack):
    """IsaacLab-Arena: client timeouts were raised to 300 s because the server was still booting."""
    stack = bare_stack
    stack.write_routes("127.0.0.1:1")
    stack.start_gateway()
    began = time.monotonic()
    status, error = stack.act(robot="a")
    assert (status, error.code) == (503, "worker_unavailable")
    assert error.retry_after_ms is not None
    assert error.safe_action == "continue"
    assert time.monotonic() - began < 10.0, "at once, whatever the budget"
