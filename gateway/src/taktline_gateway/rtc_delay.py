"""The inference delay of real-time chunking, estimated for robots that do not know it."""

from __future__ import annotations

import math

from taktline_protocol import worker_pb2
from taktline_protocol.messages import Observation, PolicyInfo


def needs_delay(observation: Observation) -> bool:
    """Whether a tail came without a delay."""
    rtc = observation.rtc
    return rtc is not None and rtc.tail is not None and rtc.delay is None


def seconds_outside(observation: Observation) -> float:
    """What is not seen here of the way from capture to answer: L_observe, and the network by the robot's word."""
    sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
    return sent_at - observation.captured_at + observation.network_ms / 1e3


def delay_within(item: worker_pb2.InferItem, info: PolicyInfo | None, latency_s: float) -> int | None:
    """The actions that are executed within `latency_s`, the time from capture to answer; None where nothing says.

    Never more than the tail holds, nor, where the checkpoint was trained with delays, more than the largest of them:
    what was really applied is in the answer.
    """
    if info is None or not info.dt_s > 0:
        return None
    tail = item.rtc.tail.shape[0] if item.rtc.tail.shape else 0
    most = min(tail, info.rtc_max_delay) if info.rtc == "trained" else tail
    return min(most, math.ceil(latency_s / info.dt_s - 1e-9))


def estimate_delay(item: worker_pb2.InferItem, info: PolicyInfo | None, latency_s: float) -> None:
    """Fills in an item's delay where it can be told (`delay_within`)."""
    delay = delay_within(item, info, latency_s)
    if delay is not None:
        item.rtc.delay = delay
