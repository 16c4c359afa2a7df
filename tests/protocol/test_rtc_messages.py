"""Real-time chunking on the wire: what is refused before a worker sees it, and that nothing is lost on the way."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from taktline_protocol import Array, ErrorCode, Image, Observation, PolicyInfo, TaktlineError, worker_pb2
from taktline_protocol.checks import check_policy_fit
from taktline_protocol.codecs import MediaType, decode_observation, encode
from taktline_protocol.limits import Limits
from taktline_protocol.messages import Rtc
from taktline_protocol.rpc import from_rtc, from_tensor, policy_info, to_item

TAIL = np.arange(12, dtype=np.float32).reshape(4, 3)
INFO = PolicyInfo(
    policy="p", family="pi05", revision="r", ready=True, cameras=("front",), state_dim=2, action_dim=3, horizon=10,
    rtc="guided",
)  # fmt: skip


def observation(**rtc) -> Observation:
    if isinstance(rtc.get("tail"), np.ndarray):
        rtc["tail"] = Array.from_numpy(rtc["tail"])
    return Observation(
        robot_id="arm", seq=1, captured_at=1.0, budget_ms=50.0, images={"front": Image("raw", bytes(12), (2, 2, 3))},
        state=[0.0, 1.0], instruction="go", rtc=Rtc(**rtc),
    )  # fmt: skip


@pytest.mark.parametrize("media", list(MediaType))
@pytest.mark.parametrize("rtc", [{}, {"tail": TAIL}, {"tail": TAIL, "delay": 2, "prefix_end": 4}, {"delay": 0}])
def test_round_trip_in_both_encodings(media, rtc):
    sent = observation(**rtc)
    assert decode_observation(encode(sent, media), media) == sent
    check_policy_fit(sent, INFO)


def _nan() -> np.ndarray:
    values = TAIL.copy()
    values[2, 1] = np.nan
    return values


@pytest.mark.parametrize(
    ("rtc", "word"),
    [
        ({"tail": _nan()}, "tail[2]"),
        ({"tail": np.array([[1.0, np.inf]])}, "tail[0]"),
        ({"tail": TAIL.astype(np.int64)}, "int64"),
        ({"tail": TAIL.reshape(-1)}, "[12]"),
        ({"tail": TAIL[:0]}, "[0, 3]"),
        ({"tail": Array("float32", (4, 3), TAIL.tobytes()[:-4])}, "44"),
        ({"tail": np.zeros((9, 3))}, "[9, 3]"),
        ({"tail": TAIL, "prefix_end": 3, "execution_horizon": 3}, "both"),
    ],
)
def test_refused_before_any_worker(rtc, word):
    body = encode(observation(**rtc), MediaType.MSGPACK)
    with pytest.raises(TaktlineError) as caught:
        decode_observation(body, MediaType.MSGPACK, Limits(tail_steps=8))
    assert caught.value.code is ErrorCode.RTC_INVALID
    assert word in caught.value.message
    assert caught.value.next_step


@pytest.mark.parametrize("rtc", [{"delay": -1}, {"prefix_end": 0}, {"delay": 2**40}, {"delay": 1.5}])
def test_numbers_that_no_chunk_has_are_no_observation(rtc):
    body = encode(observation(tail=TAIL, **rtc), MediaType.JSON)
    with pytest.raises(TaktlineError) as caught:
        decode_observation(body, MediaType.JSON)
    assert caught.value.code is ErrorCode.INVALID_BODY


@pytest.mark.parametrize(
    ("rtc", "info", "word"),
    [
        ({"tail": TAIL[:, :2]}, {}, "[4, 2]"),
        ({"tail": np.zeros((11, 3))}, {}, "[11, 3]"),
        ({"tail": TAIL, "delay": 11}, {}, "a chunk has 10"),
        ({"tail": TAIL, "delay": 3}, {"rtc": "trained", "rtc_max_delay": 2}, "at most 2"),
        ({"tail": TAIL, "delay": 4, "execution_horizon": 3}, {}, "between 4 and 6"),
        ({"tail": TAIL, "delay": 4, "execution_horizon": 7}, {}, "between 4 and 6"),
        ({"tail": TAIL}, {"rtc": ""}, "without real-time chunking"),
    ],
)
def test_refused_for_this_policy(rtc, info, word):
    with pytest.raises(TaktlineError) as caught:
        check_policy_fit(observation(**rtc), msgspec.structs.replace(INFO, **info))
    assert caught.value.code is ErrorCode.RTC_INVALID
    assert word in caught.value.message


def test_worker_rpc_keeps_what_was_and_was_not_sent():
    whole = to_item("id", observation(tail=TAIL, delay=0, prefix_end=3), 5.0)
    back = worker_pb2.InferItem.FromString(whole.SerializeToString()).rtc
    assert from_tensor("tail", back.tail).to_numpy().tolist() == TAIL.tolist()
    assert (back.HasField("delay"), back.delay) == (True, 0)
    assert (back.HasField("execution_horizon"), back.prefix_end) == (False, 3)
    bare = to_item("id", observation(), 5.0)
    assert bare.HasField("rtc")
    assert not bare.rtc.HasField("tail")
    assert not bare.rtc.HasField("delay")


def test_report_of_the_worker():
    applied = worker_pb2.RtcApplied(mode="guided", delay=2, prefix_end=4, schedule="exp", path="apart")
    report = from_rtc(applied)
    assert (report.mode, report.delay, report.prefix_end, report.schedule, report.path) == (
        "guided", 2, 4, "exp", "apart",
    )  # fmt: skip
    applied.schedule = "cubic"
    with pytest.raises(TaktlineError) as caught:
        from_rtc(applied)
    assert caught.value.code is ErrorCode.WORKER_FAILED


def test_info_tells_the_mode():
    info = policy_info(worker_pb2.InfoResponse(policy="p", rtc="trained", rtc_max_delay=6))
    assert (info.rtc, info.rtc_max_delay) == ("trained", 6)
    assert policy_info(worker_pb2.InfoResponse(policy="p", rtc="of the future")).rtc == ""
