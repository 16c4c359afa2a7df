"""Real-time chunking from a robot's JSON to the engine and back: the demo policy behind a real gateway."""

from __future__ import annotations

import httpx
import msgspec
import numpy as np
import pytest
from taktline_gateway.openapi import example_observation
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error
from taktline_protocol.messages import ActionChunk, Array


@pytest.fixture
def ask(running_stack, request):
    info = running_stack.info()
    seq = iter(range(1, 100))

    def made(**changes):
        body = example_observation(info) | {
            "robot_id": request.node.name, "session_id": "rtc", "seq": next(seq), "seed": 5, "budget_ms": 120_000.0,
        } | changes  # fmt: skip
        url = f"{running_stack.url}/v1/policies/{running_stack.policy}/act"
        answer = httpx.post(url, json=body, timeout=120)
        decode = decode_chunk if answer.status_code == 200 else decode_error
        return answer.status_code, decode(answer.content, MediaType.JSON)

    return made


def wire(array: np.ndarray) -> dict:
    return msgspec.json.decode(msgspec.json.encode(Array.from_numpy(array)))


def rows(chunk: ActionChunk) -> np.ndarray:
    return np.asarray(chunk.actions.to_numpy(), np.float32)


def test_the_next_chunk_continues_the_tail(running_stack, ask):
    assert running_stack.info().rtc == "guided"
    status, first = ask()
    assert (status, first.rtc) == (200, None)
    tail = rows(first)[6:] + 0.1  # as if the arm had been on another way
    _, plain = ask()
    _, guided = ask(rtc={"tail": wire(tail), "delay": 3})
    assert (guided.rtc.mode, guided.rtc.delay, guided.rtc.prefix_end) == ("guided", 3, len(tail))
    assert (guided.rtc.schedule, guided.rtc.path) == ("linear", "batched")
    before, after = (np.abs(rows(chunk)[:3] - tail[:3]).mean() for chunk in (plain, guided))
    assert after < 0.3 * before
    assert np.abs(rows(guided)[-1] - rows(plain)[-1]).mean() < before, "the far end is the policy's own"


def test_an_empty_rtc_changes_nothing(ask):
    _, plain = ask()
    status, same = ask(rtc={"delay": 2})
    assert (status, same.rtc) == (200, None)
    assert np.allclose(rows(same), rows(plain))


def test_the_gateway_estimates_a_delay(ask):
    _, first = ask()
    status, chunk = ask(rtc={"tail": wire(rows(first)[4:])})
    assert status == 200
    assert 1 <= chunk.rtc.delay <= len(rows(first)) - 4


@pytest.mark.parametrize(
    ("tail", "delay"),
    [(np.zeros((4, 9), np.float32), 1), (np.full((4, 4), np.nan, np.float32), 1), (np.zeros((4, 4), np.float32), 99)],
    ids=["another robot's", "nan", "delay beyond the chunk"],
)
def test_bad_tails_are_refused(ask, tail, delay):
    status, error = ask(rtc={"tail": wire(tail), "delay": delay})
    assert (status, error.code) == (422, "rtc_invalid")
    assert error.next_step
