"""A worker with replicas: the gateway keeps as many batches in flight on it as it runs at a time, and no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.conftest import until


@pytest.mark.parametrize(("replicas", "expected"), [(1, 1), (3, 3)])
def test_as_many_batches_in_flight_as_replicas(bare_stack, replicas, expected):
    stack = bare_stack
    stack.write_routes(stack.start_worker(replicas=replicas, t_sync="1:150"), max_batch=1)
    stack.start_gateway()
    stack.wait_workers(1)
    assert stack.policy().get("replicas", 1) == replicas
    observations = [stack.observation(robot=f"arm-{number}") for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(stack.act, observations))
    assert [status for status, _ in answers] == [200] * 6
    assert max(batch["in_flight"] for batch in stack.batches()) == expected
    assert stack.metric("taktline_workers", policy="scripted") == 1


def test_a_worker_that_leaves_takes_all_its_places_along(bare_stack):
    stack = bare_stack
    first = stack.start_worker(replicas=2)
    second = stack.start_worker()
    stack.write_routes(first, second)
    stack.start_gateway()
    stack.wait_workers(2)
    stack.write_routes(second)
    stack.wait_workers(1)
    until(lambda: stack.policy().get("replicas", 1) == 1, "the other worker's description")
    observations = [stack.observation(robot=f"arm-{number}") for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(stack.act, observations))
    assert [status for status, _ in answers] == [200] * 4
    assert {batch["worker"] for batch in stack.batches()} == {second}
