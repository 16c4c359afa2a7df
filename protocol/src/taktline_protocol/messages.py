"""Typed messages between robot and gateway: one schema, encoded as JSON (bytes in base64) or msgpack."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from taktline_protocol.search_work import SearchWork

Name = Annotated[str, Meta(min_length=1, max_length=128)]
DType = Literal["uint8", "int32", "int64", "float32", "float64"]
PriorityName = Literal["safety", "production", "background", "rollout"]
"""Classes of traffic, the first served first."""
SafeAction = Literal["continue", "hold"]


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A C-contiguous little-endian array: `data` holds prod(shape) * itemsize(dtype) bytes."""

    dtype: DType
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**32 - 1)], ...], Meta(max_length=4)]
    data: bytes

    @classmethod
    def from_numpy(cls, value: NDArray[np.generic]) -> Array:
        """Copies `value` into its wire form. Raises KeyError for a dtype that is not on the wire."""
        array = np.ascontiguousarray(value)
        dtype = _DTYPES[array.dtype.newbyteorder("=").name]
        return cls(dtype, array.shape, array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())

    def to_numpy(self) -> NDArray[np.generic]:
        """A read-only view on the bytes. Raises ValueError where shape, dtype and byte count disagree."""
        return np.frombuffer(self.data, dtype=_NUMPY[self.dtype]).reshape(self.shape)


_DTYPES: dict[str, DType] = {
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
    "float32": "float32",
    "float64": "float64",
}
_NUMPY: dict[DType, np.dtype[np.generic]] = {name: np.dtype(name).newbyteorder("<") for name in _DTYPES.values()}


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One camera frame. JPEG and PNG stay encoded until the worker; `raw` is uint8 RGB of `shape` (H, W, 3)."""

    encoding: Literal["jpeg", "png", "raw"]
    data: bytes
    shape: tuple[int, int, int] | None = None


class Search(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one request asks of a planner's search; what is left out is the deployment's own setting.

    Attributes:
        candidates: action sequences a round; likewise rounds, elites and horizon, all within the deployment's limits.
        budget_ms: time that the search may take; the best plan found by then is the answer.
        anytime: whether the hand-off deadline ends the search in the same way.
        previous: the robot's last plan, float Array (n, D): the search begins at its tail.
        pending: actions that the robot will have executed when the answer comes, float Array (n, D), n at most the
            longest horizon: the plan begins where the model expects them to lead, so that planning and moving overlap.
    """

    candidates: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    rounds: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    elites: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    horizon: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    budget_ms: float | None = None
    anytime: bool | None = None
    previous: Array | None = None
    pending: Array | None = None


class Rtc(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Real-time chunking: what the robot still executes of its last chunk while the next one is made.

    Attributes:
        tail: float Array (n, D) in robot units, as they came in the last chunk: the actions not executed yet when the
            cameras were read, the one due at `captured_at` first. Left out for the first chunk and after a reset.
        delay: actions that will be executed before the new chunk is there, ceil(latency / dt); None leaves the
            estimate to the gateway.
        execution_horizon: actions that the robot executes of each chunk (the paper's s); guidance ends at H - s.
        prefix_end: the same stated directly: guidance ends before this action (what LeRobot calls execution_horizon).
            At most one of the two is sent; with neither, guidance ends where the tail does.
    """

    tail: Array | None = None
    delay: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    execution_horizon: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    prefix_end: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class Imagine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Asks a world-action model to show the future that it acts for.

    Attributes:
        format: `mp4` = one H.264 file; `frames` = a JPEG for each frame.
        height: pixels that the frames are scaled down to; None keeps the policy's own.
    """

    format: Literal["mp4", "frames"] = "mp4"
    height: Annotated[int, Meta(ge=16, le=4096)] | None = None


class Observation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One robot request.

    Attributes:
        robot_id: name of the robot, unique in the fleet.
        session_id: drawn once by each client process; two live sessions of one robot_id are a conflict.
        seq: grows by at least one with each observation of a session; a newer one supersedes a queued older one.
        captured_at: robot clock in seconds when the cameras were read. The gateway only echoes it and takes
            differences with `sent_at`, so the clock may be any monotonic one.
        sent_at: same clock, when the request left the robot; L_observe = sent_at - captured_at.
        budget_ms: time left until the hand-off deadline at `sent_at` (relative, so clock skew costs nothing).
        actuate_ms: the robot's own L_actuate, subtracted from the budget.
        network_ms: the robot's estimate of the round trip that the gateway cannot see; reserved in the budget, so that
            an answer leaves early enough. The SDK keeps it from its last round trips.
        images: camera name -> frame.
        state: proprioceptive state in robot units, list of numbers or a float Array of shape (D,).
        instruction: task in words.
        seed: fixes the sampler's noise; None draws fresh noise.
        search: for planners only, whose goal travels as one more image.
        traceparent: W3C trace context of the robot's own trace, where it has one; of the HTTP header and this the
            header counts. What is malformed is ignored.
        rtc: for policies with real-time chunking: the unexecuted rest of the last chunk.
        imagine: for world-action models: the imagined video is wanted with the actions, and may be waited for.
        priority: class of traffic. `rollout` is for simulators that have no deadline: its budget is how long they would
            wait, and it gets what the other classes leave.
    """

    robot_id: Name
    seq: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    captured_at: float
    budget_ms: float
    images: dict[Name, Image]
    state: list[float] | Array
    instruction: str
    session_id: str = ""
    sent_at: float | None = None
    actuate_ms: Annotated[float, Meta(ge=0)] = 0.0
    network_ms: Annotated[float, Meta(ge=0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    search: Search | None = None
    rtc: Rtc | None = None
    imagine: Imagine | None = None
    priority: PriorityName = "production"
    traceparent: Annotated[str, Meta(max_length=256)] = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The five terms of the critical path, in ms; their sum is L_critical.

    `transfer_ms` as sent by the gateway covers the hops it sees (body read, worker RPC); the SDK adds the rest of the
    round trip, which only the robot can measure.
    """

    observe_ms: float
    transfer_ms: float
    queue_ms: float
    inference_ms: float
    actuate_ms: float

    @property
    def critical_ms(self) -> float:
        """L_critical, the sum of the five terms."""
        return self.observe_ms + self.transfer_ms + self.queue_ms + self.inference_ms + self.actuate_ms


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner adds to its actions.

    Attributes:
        predicted_states: float32 Array (H, S), where the model expects the robot after each action; row 0 is the state
            to plan the next action from while the first one is executed.
        energies: float32 Array (rounds run, 2): the lowest energy of each round, and the mean of its elites.
        stopped: why no further round was run.
    """

    predicted_states: Array
    energies: Array
    stopped: Literal["rounds", "converged", "budget"]


class RtcReport(msgspec.Struct, frozen=True, kw_only=True):
    """How the tail of the last chunk shaped this one.

    Attributes:
        mode: `guided` = pulled towards the tail at each solver step; `trained` = the first `delay` actions were fixed
            to it, as the checkpoint was trained to have.
        delay: actions held to the tail with full weight.
        prefix_end: from this action on the tail had no influence.
        schedule: how the weight falls between the two; `hard` in the trained mode.
        path: `batched` = in the same run as the rest of the batch; `apart` = in a run of its own behind it, because the
            engine's captured graphs do not guide.
    """

    mode: Literal["guided", "trained"]
    delay: int
    prefix_end: int
    schedule: Literal["linear", "exp", "ones", "zeros", "hard"]
    path: Literal["batched", "apart"]


class ImaginedVideo(msgspec.Struct, frozen=True, kw_only=True):
    """What a world-action model expects to see while its actions are executed; frame 0 is the observed one.

    Attributes:
        format: as it was asked for.
        fps: frames a second; frame i belongs to captured_at + i / fps.
        parts: the MP4 file alone, or a JPEG for each frame.
    """

    format: Literal["mp4", "frames"]
    fps: float
    parts: tuple[bytes, ...]


class Degraded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an answer differs from the policy's own, where there was no time for that; only what differs is set.

    Attributes:
        solver_steps: steps of the flow solver, fewer than the policy's own.
        action_horizon: actions of the chunk, fewer than the policy's own; all that there are in `actions`.
        policy: the policy that answered in place of the one asked.
    """

    solver_steps: int | None = None
    policy: str | None = None
    action_horizon: int | None = None


class ActionChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to one observation.

    Attributes:
        actions: float32 Array of shape (H, D), robot units.
        dt_s: control period between two rows of `actions`.
        captured_at: echoed; row i is meant for captured_at + i * dt_s.
        valid_until: robot clock, captured_at + H * dt_s; later rows do not exist.
        margin_ms: control margin B_ctrl - L_critical; negative is a deadline miss.
        batch_size: how many observations shared the engine call.
        plan: of planners: `actions` is then the whole plan, of which row 0 is to be executed.
        rtc: what was made of the observation's `rtc`; absent where no tail was sent.
        imagined: of world-action models, where the observation asked for it.
        degraded: what was made cheaper to meet the deadline; absent where nothing was.
        next_observation_at_ms: when to capture the next observation, in ms after this answer left the gateway, so that
            the fleet's observations come in step with the batches. A hint; absent where any moment is as good.
    """

    request_id: str
    policy: str
    revision: str
    robot_id: str
    seq: int
    actions: Array
    dt_s: float
    captured_at: float
    valid_until: float
    timings: Timings
    margin_ms: float
    batch_size: int
    worker: str = ""
    plan: PlanReport | None = None
    rtc: RtcReport | None = None
    imagined: ImaginedVideo | None = None
    degraded: Degraded | None = None
    next_observation_at_ms: float | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A typed error on the wire; `code` is a value of `ErrorCode`.

    Attributes:
        safe_action: what a robot that was shed does now: `continue` with its buffer, or `hold` where it is dry.
        buffer_ms: how long that buffer lasts, as far as the gateway knows; then hold.
    """

    code: str
    message: str
    next_step: str
    request_id: str = ""
    retry_after_ms: float | None = None
    safe_action: SafeAction | None = None
    buffer_ms: float | None = None


class BucketTime(msgspec.Struct, frozen=True, kw_only=True):
    """T_sync of one batch bucket on one worker: median and p99 in ms."""

    batch: int
    median_ms: float
    p99_ms: float


class CheaperLevel(msgspec.Struct, frozen=True, kw_only=True):
    """Fewer solver steps or actions of a chunk than the policy's own (0 where its own), and T_sync with them."""

    solver_steps: int
    t_sync: tuple[BucketTime, ...]
    action_horizon: int = 0


class ImageFit(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a policy's images, and how frames of other sizes come to it (`taktline_protocol.image_fit`).

    Attributes:
        filter: Pillow's, which antialiases.
        letterbox: a frame keeps its ratio, and the rest is black; else it is stretched.
    """

    height: int
    width: int
    filter: Literal["bilinear", "bicubic"]
    letterbox: bool


class PolicyInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client must know to speak to a policy.

    Attributes:
        rtc: how observations with `rtc` are served; empty where they are refused.
        rtc_max_delay: in the trained mode, the largest delay that the checkpoint was trained for.
        replicas: batches that each worker runs at a time.
        cheaper: what workers can do instead of full quality; used where the deployment allows it.
        image_fit: what a robot may do to its frames before it sends them, and gets the same chunk; None where the
            policy resizes them otherwise than in whole 8-bit pixels.
        search: of a planner, what a request's own search is measured against; None of any other policy.
    """

    policy: str
    family: str
    revision: str
    ready: bool
    cameras: tuple[str, ...] = ()
    optional_cameras: tuple[str, ...] = ()
    state_dim: int = 0
    action_dim: int = 0
    horizon: int = 0
    dt_s: float = 0.0
    control_budget_ms: float = 0.0
    workers: int = 0
    t_sync: tuple[BucketTime, ...] = ()
    rtc: Literal["", "guided", "trained"] = ""
    rtc_max_delay: int = 0
    replicas: int = 1
    cheaper: tuple[CheaperLevel, ...] = ()
    image_fit: ImageFit | None = None
    search: SearchWork | None = None


class AdmissionQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a robot will ask for: observations a second, and the budget of each.

    A robot of f actions a second with chunks of H that asks again after k of them has a rate of f / k and a budget of
    (H - k) / f.

    Attributes:
        search: of a planner, what each of them will ask of its search; left out it is the deployment's own.
    """

    robot_id: Name
    rate_hz: Annotated[float, Meta(gt=0, le=10_000)]
    budget_ms: Annotated[float, Meta(gt=0, le=600_000)]
    search: Search | None = None


class AdmissionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the workers can serve one more robot in time, beside those they have.

    Attributes:
        admissible: there is room; the place is kept for 15 s.
        utilisation: share of the workers' time that would be promised.
        batch: size of the batches that this takes; 0 where no size meets the budget.
        worst_ms: what an answer takes at worst then.
        spare: how many more such robots would fit.
    """

    admissible: bool
    reason: str
    utilisation: float
    batch: int
    worst_ms: float
    spare: int


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /v1/policies."""

    policies: tuple[PolicyInfo, ...]
