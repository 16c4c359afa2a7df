"""The worker RPC's messages to and from the typed schema, and the settings that both ends of the channel share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from taktline_protocol import worker_pb2
from taktline_protocol.checks import check_array
from taktline_protocol.errors import ErrorCode, TaktlineError
from taktline_protocol.limits import MIB
from taktline_protocol.messages import (
    Array,
    BucketTime,
    CheaperLevel,
    Image,
    ImageFit,
    ImaginedVideo,
    Observation,
    PlanReport,
    PolicyInfo,
    Rtc,
    RtcReport,
    Search,
)
from taktline_protocol.search_work import SearchWork

SERVICE_NAME = "taktline.worker.v1.Worker"
MAX_MESSAGE_BYTES = 512 * MIB
"""One batch: 32 observations at the body limit of 16 MiB."""

MAX_REPLICAS = 64
"""Batches that one worker may claim to run at a time."""
MAX_FIT = 4096
"""Pixels of a side that a worker may have robots fit their frames to."""

_LARGE_MESSAGES: tuple[tuple[str, int], ...] = (
    # A batch of camera frames in HTTP/2's frames of 16 KiB, within its first window of 64 KiB, is hundreds of frames
    # and several round trips.
    ("grpc.http2.max_frame_size", 8 * MIB),
    ("grpc.http2.lookahead_bytes", 16 * MIB),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LARGE_MESSAGES,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A worker that restarts on the same address must be found again within a second, not after minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
"""For the gateway's channels."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LARGE_MESSAGES,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The gateway's keepalive pings are welcome at their own rate, with or without a call in flight.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
"""For the worker's server."""


def to_item(
    request_id: str, observation: Observation, budget_ms: float, *, images: bool = True
) -> worker_pb2.InferItem:
    """One member of a batch; `budget_ms` is what is left when the batch is sent. Image bytes stay encoded.

    Without `images` they are left to `rpc_encoding.image_chunks`, which spares copies.
    """
    state = observation.state if isinstance(observation.state, Array) else _list_array(observation.state)
    item = worker_pb2.InferItem(
        request_id=request_id,
        robot_id=observation.robot_id,
        seq=observation.seq,
        state=worker_pb2.Tensor(dtype=state.dtype, shape=state.shape, data=state.data),
        instruction=observation.instruction,
        seed=observation.seed,
        budget_ms=budget_ms,
    )
    if observation.search is not None:
        item.search.CopyFrom(to_search(observation.search))
    if observation.rtc is not None:
        item.rtc.CopyFrom(_to_rtc(observation.rtc))
    if observation.imagine is not None:
        asked = observation.imagine
        item.imagine.CopyFrom(worker_pb2.Imagine(format=asked.format, height=asked.height))
    for camera, image in observation.images.items() if images else ():
        wire = item.images[camera]
        wire.encoding = image.encoding
        wire.data = image.data
        if image.shape is not None:
            wire.shape.extend(image.shape)
    return item


def item_images(item: worker_pb2.InferItem) -> dict[str, Image]:
    """Camera name -> frame of one batch member. Raises TaktlineError `image_corrupt` on an unknown encoding."""
    images = {}
    for camera, wire in item.images.items():
        if wire.encoding not in ("jpeg", "png", "raw"):
            raise TaktlineError(
                ErrorCode.IMAGE_CORRUPT,
                f"the image of camera {camera!r} has encoding {wire.encoding[:32]!r}",
                "send jpeg, png or raw",
            )
        shape = None
        if len(wire.shape) == 3:
            shape = (wire.shape[0], wire.shape[1], wire.shape[2])
        images[camera] = Image(wire.encoding, wire.data, shape)  # type: ignore[arg-type]
    return images


def to_tensor(value: NDArray[np.generic]) -> worker_pb2.Tensor:
    """Copies an array of a wire dtype. Raises KeyError for another dtype."""
    array = Array.from_numpy(value)
    return worker_pb2.Tensor(dtype=array.dtype, shape=array.shape, data=array.data)


def from_tensor(name: str, tensor: worker_pb2.Tensor, code: ErrorCode = ErrorCode.INVALID_BODY) -> Array:
    """The Array of a received tensor, byte count checked. Raises TaktlineError with `code`."""
    if tensor.dtype not in ("uint8", "int32", "int64", "float32", "float64"):
        raise TaktlineError(code, f"{name} has dtype {tensor.dtype[:32]!r}", "send one of the wire dtypes")
    array = Array(tensor.dtype, tuple(tensor.shape), tensor.data)  # type: ignore[arg-type]
    check_array(name, array, code)
    return array


def from_plan(plan: worker_pb2.Plan) -> PlanReport:
    """What a planner said besides its actions. Raises TaktlineError `worker_failed` where it does not fit."""
    if plan.stopped not in ("rounds", "converged", "budget"):
        raise TaktlineError(
            ErrorCode.WORKER_FAILED,
            f"the planner stopped for {plan.stopped[:32]!r}, which this gateway does not know",
            "run the gateway and the workers of one release",
        )
    return PlanReport(
        predicted_states=from_tensor("predicted_states", plan.predicted_states, ErrorCode.WORKER_FAILED),
        energies=from_tensor("energies", plan.energies, ErrorCode.WORKER_FAILED),
        stopped=plan.stopped,  # type: ignore[arg-type]
    )


def from_rtc(applied: worker_pb2.RtcApplied) -> RtcReport:
    """What a worker made of an item's tail. Raises TaktlineError `worker_failed` where it does not fit."""
    known = (
        applied.mode in ("guided", "trained")
        and applied.schedule in ("linear", "exp", "ones", "zeros", "hard")
        and applied.path in ("batched", "apart")
    )
    if not known:
        raise TaktlineError(
            ErrorCode.WORKER_FAILED,
            f"the worker reports RTC {applied.mode[:32]!r}, {applied.schedule[:32]!r}, {applied.path[:32]!r},"
            " which this gateway does not know",
            "run the gateway and the workers of one release",
        )
    return RtcReport(
        mode=applied.mode,  # type: ignore[arg-type]
        delay=applied.delay,
        prefix_end=applied.prefix_end,
        schedule=applied.schedule,  # type: ignore[arg-type]
        path=applied.path,  # type: ignore[arg-type]
    )


def from_imagined(video: worker_pb2.ImaginedVideo) -> ImaginedVideo:
    """A worker's imagined video. Raises TaktlineError `worker_failed` where it does not fit."""
    if video.format not in ("mp4", "frames") or not video.parts or not 0 < video.fps <= 1000:
        raise TaktlineError(
            ErrorCode.WORKER_FAILED,
            f"the worker sent a video of format {video.format[:32]!r}, {len(video.parts)} parts, {video.fps} frames/s",
            "run the gateway and the workers of one release",
        )
    return ImaginedVideo(format=video.format, fps=video.fps, parts=tuple(video.parts))  # type: ignore[arg-type]


def to_error(error: TaktlineError) -> worker_pb2.Error:
    """The wire form of a typed error."""
    return worker_pb2.Error(
        code=error.code.value,
        message=error.message,
        next_step=error.next_step,
        retry_after_ms=error.retry_after_ms,
    )


def from_error(error: worker_pb2.Error) -> TaktlineError:
    """The exception of an error that a worker gave one item; an unknown code becomes `worker_failed`."""
    after_ms = error.retry_after_ms if error.HasField("retry_after_ms") else None
    try:
        return TaktlineError(ErrorCode(error.code), error.message, error.next_step, retry_after_ms=after_ms)
    except ValueError:
        return TaktlineError(ErrorCode.WORKER_FAILED, f"{error.code}: {error.message}", error.next_step)


def bucket_times(times: Iterable[worker_pb2.BucketTime]) -> tuple[BucketTime, ...]:
    """T_sync of each bucket, in the order of batch size."""
    found = (BucketTime(batch=time.batch, median_ms=time.median_ms, p99_ms=time.p99_ms) for time in times)
    return tuple(sorted(found, key=lambda time: time.batch))


def policy_info(response: worker_pb2.InfoResponse) -> PolicyInfo:
    """What one worker says of the policy it serves, as a client reads it (`workers` = 1)."""
    return PolicyInfo(
        policy=response.policy,
        family=response.family,
        revision=response.revision,
        ready=True,
        cameras=tuple(response.cameras),
        optional_cameras=tuple(response.optional_cameras),
        state_dim=response.state_dim,
        action_dim=response.action_dim,
        horizon=response.horizon,
        dt_s=response.dt_s,
        workers=1,
        t_sync=bucket_times(response.t_sync),
        # A mode of a later release is no mode that this one can promise to clients.
        rtc=response.rtc if response.rtc in ("guided", "trained") else "",  # type: ignore[arg-type]
        rtc_max_delay=response.rtc_max_delay,
        replicas=min(MAX_REPLICAS, max(1, response.replicas)),
        cheaper=tuple(
            CheaperLevel(
                solver_steps=level.solver_steps,
                action_horizon=level.action_horizon,
                t_sync=bucket_times(level.t_sync),
            )
            for level in response.cheaper
        ),
        image_fit=_image_fit(response.image_fit) if response.HasField("image_fit") else None,
        search=_search_work(response.search) if response.HasField("search") else None,
    )


def _search_work(work: worker_pb2.SearchWork) -> SearchWork | None:
    """None where its numbers cannot be: T_sync then stands for every search."""
    counts = (work.candidates, work.rounds, work.horizon, work.unit)
    if not all(counts) or not 0.0 < work.round_share * work.rounds <= 1.0 + 1e-6:
        return None
    return SearchWork(**{name: getattr(work, name) for name in SearchWork.__struct_fields__})


def to_search_work(work: SearchWork | None) -> worker_pb2.SearchWork | None:
    """The wire form of a planner's own search."""
    return None if work is None else worker_pb2.SearchWork(**msgspec.structs.asdict(work))


def _image_fit(fit: worker_pb2.ImageFit) -> ImageFit | None:
    """None for a rule that this release does not know, or that fits nothing: no client is to be sent to follow it."""
    if fit.filter not in ("bilinear", "bicubic") or not (0 < fit.height <= MAX_FIT and 0 < fit.width <= MAX_FIT):
        return None
    return ImageFit(height=fit.height, width=fit.width, filter=fit.filter, letterbox=fit.letterbox)  # type: ignore[arg-type]


def to_image_fit(fit: ImageFit | None) -> worker_pb2.ImageFit | None:
    """The wire form of a rule."""
    if fit is None:
        return None
    return worker_pb2.ImageFit(height=fit.height, width=fit.width, filter=fit.filter, letterbox=fit.letterbox)


def to_bucket_times(times: Sequence[BucketTime]) -> list[worker_pb2.BucketTime]:
    """The wire form of a T_sync table."""
    return [worker_pb2.BucketTime(batch=time.batch, median_ms=time.median_ms, p99_ms=time.p99_ms) for time in times]


def to_search(search: Search) -> worker_pb2.Search:
    """The wire form of what a request asks of a search."""
    wire = worker_pb2.Search(
        candidates=search.candidates,
        rounds=search.rounds,
        elites=search.elites,
        horizon=search.horizon,
        budget_ms=search.budget_ms,
    )
    if search.anytime is not None:
        wire.anytime = search.anytime
    for name in ("previous", "pending"):
        plan: Array | None = getattr(search, name)
        if plan is not None:
            getattr(wire, name).CopyFrom(worker_pb2.Tensor(dtype=plan.dtype, shape=plan.shape, data=plan.data))
    return wire


def _to_rtc(rtc: Rtc) -> worker_pb2.Rtc:
    wire = worker_pb2.Rtc(delay=rtc.delay, execution_horizon=rtc.execution_horizon, prefix_end=rtc.prefix_end)
    if rtc.tail is not None:
        wire.tail.CopyFrom(worker_pb2.Tensor(dtype=rtc.tail.dtype, shape=rtc.tail.shape, data=rtc.tail.data))
    return wire


def _list_array(values: list[float]) -> Array:
    # float64 keeps every bit of a JSON number; the worker rounds once, to the model's own precision.
    return Array.from_numpy(np.asarray(values, dtype=np.float64))
