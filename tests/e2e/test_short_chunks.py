"""A shorter chunk under degradation and real-time chunking: a real engine measures it, a real gateway offers it."""

from __future__ import annotations

import httpx
import msgspec
import numpy as np
import pytest
from taktline_gateway.openapi import example_observation
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error
from taktline_protocol.messages import Array

from tests.e2e.conftest import DEMO, engine_config, started

WHOLE, SHORT = 512, 8


@pytest.fixture
def stack(tmp_path):
    config = engine_config("reach", DEMO)
    options = msgspec.structs.replace(config.engine, action_horizon=WHOLE, shorter_horizons=(SHORT,), buckets=(1,))
    changed = msgspec.structs.replace(config, engine=options)
    with started(tmp_path, changed, degrade={"min_action_horizon": SHORT}) as running:
        yield running


def test_a_robot_whose_delay_outlasts_the_shorter_chunk_is_not_sent_to_its_refusal(stack):
    """The budgets lie between what the two chunks take; of a delay of as many actions nothing is left."""
    info = stack.info()
    (level,) = info.cheaper
    (whole,), (short,) = info.t_sync, level.t_sync
    assert (info.rtc, level.action_horizon) == ("guided", SHORT)
    tail = msgspec.json.decode(msgspec.json.encode(Array.from_numpy(np.zeros((SHORT + 8, info.action_dim), "f4"))))

    def ask(robot, delay):
        body = example_observation(info) | {
            "robot_id": robot, "session_id": "s", "seq": 1, "budget_ms": 0.5 * (whole.median_ms + short.median_ms),
            "rtc": {"tail": tail, "delay": delay},
        }  # fmt: skip
        answer = httpx.post(f"{stack.url}/v1/policies/{stack.policy}/act", json=body, timeout=60)
        decode = decode_chunk if answer.status_code == 200 else decode_error
        return answer.status_code, decode(answer.content, MediaType.JSON)

    status, chunk = ask("a", SHORT - 1)
    assert status == 200, chunk
    assert (chunk.degraded.action_horizon, chunk.actions.shape[0]) == (SHORT, SHORT)
    status, error = ask("b", SHORT)
    assert (status, error.code) == (503, "deadline_unreachable")
