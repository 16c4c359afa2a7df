"""An action chunk as the robot uses it, its latency terms completed by the round trip that only the robot sees."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
from numpy.typing import NDArray
from taktline_protocol.messages import ActionChunk, Degraded, ImaginedVideo, Observation, PlanReport, RtcReport, Timings


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The answer to one observation.

    Attributes:
        actions: float32 (H, D) in robot units, read-only; row i is meant for captured_at + i * dt_s.
        dt_s: control period between two rows.
        captured_at: the observation's own capture time, robot clock, s.
        valid_until: robot clock, s; there are no rows beyond it.
        timings: the five terms in ms; their sum is L_critical as the robot measured it.
        margin_ms: control margin; negative means that the chunk came after the hand-off deadline.
        rtc: what was made of the unexecuted rows that were sent along.
        imagined: of world-action models, the video that was asked for: `parts` is an MP4 file, or JPEGs.
        degraded: what was made cheaper because there was no time for the policy's own quality; None where nothing was.
        next_observation_at: robot clock, s: when the gateway would like to see the next observation, so that a fleet
            fills its batches evenly; None where any time is as good.
        plan: of planners: predicted states and energies; `actions` is then the whole plan, row 0 is to be executed.
    """

    actions: NDArray[np.float32]
    dt_s: float
    captured_at: float
    valid_until: float
    timings: Timings
    margin_ms: float
    seq: int
    policy: str
    revision: str
    worker: str
    batch_size: int
    request_id: str
    plan: PlanReport | None = None
    rtc: RtcReport | None = None
    imagined: ImaginedVideo | None = None
    degraded: Degraded | None = None
    next_observation_at: float | None = None


def complete(answer: ActionChunk, observation: Observation, round_trip_ms: float) -> tuple[Chunk, float]:
    """The robot's view of `answer`, and the part of the round trip that the gateway could not see, in ms.

    `round_trip_ms` runs from `observation.sent_at` to the decoded answer. What the gateway has not stamped of it is
    network and client time, and goes to L_transfer.
    """
    seen = answer.timings
    unseen_ms = max(0.0, round_trip_ms - seen.transfer_ms - seen.queue_ms - seen.inference_ms)
    timings: Timings = msgspec.structs.replace(seen, transfer_ms=seen.transfer_ms + unseen_ms)
    chunk = Chunk(
        actions=answer.actions.to_numpy().astype(np.float32, copy=False),
        dt_s=answer.dt_s,
        captured_at=answer.captured_at,
        valid_until=answer.valid_until,
        timings=timings,
        margin_ms=observation.budget_ms + timings.observe_ms - timings.critical_ms,
        seq=answer.seq,
        policy=answer.policy,
        revision=answer.revision,
        worker=answer.worker,
        batch_size=answer.batch_size,
        request_id=answer.request_id,
        plan=answer.plan,
        rtc=answer.rtc,
        imagined=answer.imagined,
        degraded=answer.degraded,
        next_observation_at=_when(answer, observation, round_trip_ms),
    )
    return chunk, unseen_ms


def _when(answer: ActionChunk, observation: Observation, round_trip_ms: float) -> float | None:
    hint_ms = answer.next_observation_at_ms
    if hint_ms is None:
        return None
    sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
    return sent_at + (round_trip_ms + hint_ms) / 1e3
