"""A tail without a delay gets the gateway's estimate: from capture to the predicted answer, in actions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_gateway.rtc_delay import estimate_delay
from taktline_protocol import worker_pb2
from taktline_protocol.messages import Array, PolicyInfo, Rtc

TAIL = Array.from_numpy(np.zeros((8, 6), dtype=np.float32))


def described(**changes) -> PolicyInfo:
    values = {"policy": "p", "family": "f", "revision": "r", "ready": True, "dt_s": 0.05, "rtc": "guided"}
    return PolicyInfo(**(values | changes))


def estimated(latency_s: float, tail: int = 8, **changes) -> int | None:
    item = worker_pb2.InferItem(rtc=worker_pb2.Rtc(tail=worker_pb2.Tensor(shape=[tail, 6])))
    estimate_delay(item, described(**changes), latency_s)
    return item.rtc.delay if item.rtc.HasField("delay") else None


@pytest.mark.parametrize(("latency_s", "delay"), [(0.0, 0), (0.001, 1), (0.05, 1), (0.051, 2), (0.16, 4), (9.0, 8)])
def test_actions_within_the_latency(latency_s, delay):
    assert estimated(latency_s) == delay


def test_bounds():
    assert estimated(0.3, tail=3) == 3
    assert estimated(0.3, rtc="trained", rtc_max_delay=4) == 4
    assert estimated(0.3, rtc_max_delay=4) == 6, "only a trained checkpoint has a largest delay"
    assert estimated(0.3, dt_s=0.0) is None, "the worker then says that it needs one"


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 50))
def test_more_latency_never_means_fewer_actions(first, second, tail):
    low, high = sorted((first, second))
    assert estimated(low, tail) <= estimated(high, tail)


def test_through_the_gateway(bare_stack):
    """10 ms of inference, 100 ms of observing and 150 ms of network at 20 actions a second: six actions go by."""
    stack = bare_stack
    stack.write_routes(stack.start_worker(rtc="guided", t_sync="1:10"))
    stack.start_gateway()
    stack.wait_workers(1)
    observation = {"captured_at": 100.0, "sent_at": 100.1, "network_ms": 150.0}
    assert stack.act(robot="a", rtc=Rtc(tail=TAIL), **observation)[0] == 200
    assert stack.act(robot="b", rtc=Rtc(tail=TAIL, delay=2), **observation)[0] == 200
    assert stack.act(robot="c", rtc=Rtc(), **observation)[0] == 200
    assert [batch["delays"] for batch in stack.batches()] == [[6], [2], [None]]


def test_a_policy_without_rtc_is_said_to_have_none(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    status, error = stack.act(robot="a", rtc=Rtc(tail=TAIL))
    assert (status, error.code) == (422, "rtc_invalid")
    assert not stack.batches()
