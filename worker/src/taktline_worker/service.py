"""The worker's gRPC service: batches from the gateway to the engine, and what the gateway must know beforehand."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.batch_frames import VERSION
from taktline_protocol.deployment import EngineConfig
from taktline_protocol.rpc import to_error, to_image_fit, to_search_work

from taktline_worker.adapter import GuidedChunk, ImaginedChunk, Level, PlannedChunk
from taktline_worker.answer_ahead import AnswerAhead
from taktline_worker.batch_port import Answered, BatchPort, CallContext, Frame, Frames, Images
from taktline_worker.engine import FULL, BatchDroppedError, BatchResult, BucketTiming, Engine, Item, Outcome
from taktline_worker.instruments import Instruments
from taktline_worker.jpeg_threads import BegunFrame
from taktline_worker.observation import EncodedImage, ImagineInput, RobotInput, RtcInput, SearchInput
from taktline_worker.tracing import BatchTraces

logger = logging.getLogger(__name__)

# Batches that may wait for the engine; past it the gateway's own queue is the better place.
MAX_WAITING_BATCHES = 8
MOST_BYTES_ON_THE_LOOP = 1280 * 720 * 3
"""Of a frame, decoded. A larger one, or its damaged file, would hold up every other connection."""
_STATE_DTYPES = {"uint8", "int32", "int64", "float32", "float64"}


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves one engine. RPC threads wait; the engine's own thread runs the network.

    Args:
        t_sync: measured before the service was started.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: Engine,
        t_sync: Sequence[BucketTiming],
        instruments: Instruments,
        traces: BatchTraces,
    ) -> None:
        self._config = config
        self._engine = engine
        self._t_sync = tuple(t_sync)
        self._instruments = instruments
        self._traces = traces
        self.batches: BatchPort | None = None
        """Told in Info; None where batches come through gRPC only."""
        self._places: deque[None] = deque([None] * MAX_WAITING_BATCHES)

    def Info(self, request: worker_pb2.InfoRequest, context: grpc.ServicerContext) -> worker_pb2.InfoResponse:  # noqa: D102
        description = self._engine.adapter.description
        return worker_pb2.InfoResponse(
            policy=self._config.policy,
            family=description.family,
            revision=self._config.model.revision,
            precision=description.precision,
            device=description.device,
            cameras=description.cameras,
            optional_cameras=description.optional_cameras,
            state_dim=description.state_dim,
            action_dim=description.action_dim,
            horizon=description.horizon,
            dt_s=description.control_period_s,
            rtc=description.rtc,
            rtc_max_delay=description.rtc_max_delay,
            t_sync=_bucket_times(self._t_sync),
            cheaper=[
                worker_pb2.CheaperLevel(
                    solver_steps=level.solver_steps, action_horizon=level.horizon, t_sync=_bucket_times(times)
                )
                for level, times in self._engine.cheaper.items()
            ],
            batch_port=self.batches.port if self.batches is not None else 0,
            batch_token=self.batches.token if self.batches is not None else b"",
            batch_version=VERSION if self.batches is not None else 0,
            image_fit=to_image_fit(description.image_fit),
            search=to_search_work(self._engine.search_work),
        )

    def coming(self, request: worker_pb2.InferRequest, frames: Frames) -> list[dict[str, EncodedImage]]:
        """A batch's frames by item, as soon as they have come: what can begin to be decoded begins.

        Nothing does of a batch that will be refused.
        """
        named = [(name, frame) for images in frames for name, frame in images.items()]
        taken = self._places and self._refusal(request) is None
        begun = iter(self._engine.begin_frames(named) if taken else [None] * len(named))
        return [{name: _image(frame, next(begun)) for name, frame in images.items()} for images in frames]

    def Infer(self, request: worker_pb2.InferRequest, context: grpc.ServicerContext) -> worker_pb2.InferResponse:  # noqa: D102
        frames = [
            {name: (image.encoding, tuple(image.shape), image.data) for name, image in item.images.items()}
            for item in request.items
        ]
        answers: list[worker_pb2.InferResponse | bytes] = []
        self.infer(request, self.coming(request, frames), context, answers.append)
        (answer,) = answers
        return worker_pb2.InferResponse.FromString(answer) if isinstance(answer, bytes) else answer

    def infer(
        self,
        request: worker_pb2.InferRequest,
        images: Images,
        context: grpc.ServicerContext | CallContext,
        answered: Answered,
    ) -> None:
        """Runs one batch, however it came: `images` are its items' frames, apart from the items.

        `answered` gets the response; what comes after it, the records, delays nobody.
        """
        self._begin(request, images, context)(answered)

    def begin(
        self, request: worker_pb2.InferRequest, images: Images, context: CallContext
    ) -> Callable[[Answered], None] | None:
        """The first half of `infer`, up to the launch, where nothing holds it up, and the other one; else None.

        A single row takes less time than another thread does to wake, where its frames need no decoding here. Rows with
        a tail may be run apart.
        """
        items = request.items
        if len(items) != 1 or not self._engine.launches_at_once or items[0].rtc.HasField("tail"):
            return None
        if not all(_is_soon_there(image) for its in images for image in its.values()):
            return None
        return self._begin(request, images, context)

    def _begin(
        self, request: worker_pb2.InferRequest, images: Images, context: grpc.ServicerContext | CallContext
    ) -> Callable[[Answered], None]:
        now = time.monotonic()
        received = context.received if isinstance(context, CallContext) else now
        refusal = self._refusal(request)
        if refusal is not None:
            return partial(self._answer, request, _refused(refusal, request), received)
        try:
            self._places.pop()
        except IndexError:
            busy = TaktlineError(
                ErrorCode.OVERLOADED,
                f"{MAX_WAITING_BATCHES} batches wait for this worker already",
                "send the batch to another worker, or later",
            )
            return partial(self._answer, request, _refused(busy, request), received)
        try:
            remaining = context.time_remaining()
            deadline = None if remaining is None else now + remaining
            items = [_read_item(item, its, now) for item, its in zip(request.items, images, strict=True)]
            cancelled = partial(_is_gone, context)
            wait = self._engine.begin(items, deadline, cancelled, _level(request), since=received)
        except BaseException as error:
            self._places.append(None)
            if not isinstance(error, BatchDroppedError):
                raise
            self._instruments.dropped()
            logger.warning(
                "a batch was dropped: its deadline was over or its caller gone",
                extra={"policy": self._config.policy, "request_ids": [item.request_id for item in request.items]},
            )
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the batch's deadline passed before the engine was free")
            raise

        def rest(answered: Answered) -> None:
            ahead = None
            try:
                if isinstance(context, CallContext):
                    ahead = self._ahead(request)
                result = wait()
            finally:
                self._places.append(None)
            self._answer(request, result, received, answered, ahead)
            self._traces.batch(context.invocation_metadata(), received, result, self._config.model.revision)

        return rest

    def _refusal(self, request: worker_pb2.InferRequest) -> TaktlineError | None:
        if request.policy != self._config.policy:
            return TaktlineError(
                ErrorCode.UNKNOWN_POLICY,
                f"this worker serves {self._config.policy!r}, not {request.policy!r}",
                "correct the route of the policy",
            )
        if request.revision and request.revision != self._config.model.revision:
            return TaktlineError(
                ErrorCode.WORKER_UNAVAILABLE,
                f"this worker serves revision {self._config.model.revision!r}, not {request.revision!r}",
                "route the batch to a worker of that revision",
            )
        level = _level(request)
        if level != FULL and level not in self._engine.cheaper:
            return TaktlineError(
                ErrorCode.WORKER_UNAVAILABLE,
                f"this worker cannot run with {level}",
                "ask for one of the levels that it reported, or for none",
            )
        return None

    def _ahead(self, request: worker_pb2.InferRequest) -> AnswerAhead | None:
        """What can be said of the answer while the engine runs; None, which is logged, where that fails.

        It never raises: the batch that runs is to be waited for.
        """
        try:
            description = self._engine.adapter.description
            shape = (request.action_horizon or description.horizon, description.action_dim)
            return AnswerAhead([item.request_id for item in request.items], shape, self._config.model.revision)
        except Exception:
            logger.exception("nothing of a batch's answer is written ahead; all of it is when the batch has ended")
            return None

    def _answer(
        self,
        request: worker_pb2.InferRequest,
        result: BatchResult,
        received: float,
        answered: Answered,
        ahead: AnswerAhead | None = None,
    ) -> None:
        total_ms = (time.monotonic() - received) * 1000.0
        serialised = None if ahead is None else ahead.serialised(result, total_ms)
        answered(serialised or self._response(request, result, total_ms))
        self._instruments.batch(result, total_ms)
        for item, outcome in zip(request.items, result.outcomes, strict=True):
            if isinstance(outcome, TaktlineError):
                logger.warning(
                    outcome.message,
                    extra={
                        "code": outcome.code.value,
                        "policy": self._config.policy,
                        "robot": item.robot_id,
                        "request_id": item.request_id,
                    },
                )

    def _response(
        self, request: worker_pb2.InferRequest, result: BatchResult, total_ms: float
    ) -> worker_pb2.InferResponse:
        return worker_pb2.InferResponse(
            results=[
                _write_result(item.request_id, outcome)
                for item, outcome in zip(request.items, result.outcomes, strict=True)
            ],
            preprocess_ms=result.preprocess_ms,
            engine_ms=result.engine_ms,
            postprocess_ms=result.postprocess_ms,
            total_ms=total_ms,
            waited_ms=result.waited_ms,
            bucket=result.bucket,
            revision=self._config.model.revision,
        )


def _is_gone(context: grpc.ServicerContext | CallContext) -> bool:
    return not context.is_active()


def _is_soon_there(image: EncodedImage) -> bool:
    if image.begun is not None:
        return image.begun.pixels.numel() <= MOST_BYTES_ON_THE_LOOP
    return image.encoding == "raw" and len(image.data) <= MOST_BYTES_ON_THE_LOOP


def _refused(error: TaktlineError, request: worker_pb2.InferRequest) -> BatchResult:
    return BatchResult((error,) * len(request.items), 0, 0.0, 0.0, 0.0)


def _level(request: worker_pb2.InferRequest) -> Level:
    return Level(request.solver_steps, request.action_horizon)


def _bucket_times(timings: Sequence[BucketTiming]) -> list[worker_pb2.BucketTime]:
    return [worker_pb2.BucketTime(batch=t.batch, median_ms=t.median_ms, p99_ms=t.p99_ms) for t in timings]


def _image(frame: Frame, begun: BegunFrame | None) -> EncodedImage:
    encoding, shape, data = frame
    # Decoders of JPEG and PNG want bytes; raw pixels are used where they lie.
    return EncodedImage(encoding, data if begun or encoding == "raw" else bytes(data), shape, begun)


def _read_item(item: worker_pb2.InferItem, images: Mapping[str, EncodedImage], received: float) -> Item:
    expires = received + item.budget_ms / 1000.0 if item.budget_ms > 0 else None
    try:
        observation: RobotInput | TaktlineError = RobotInput(
            images=images,
            state=_read_array("the state", item.state, ErrorCode.STATE_INVALID),
            instruction=item.instruction,
            seed=item.seed if item.HasField("seed") else None,
            search=_read_search(item.search) if item.HasField("search") else None,
            rtc=_read_rtc(item.rtc) if item.rtc.HasField("tail") else None,
            imagine=_read_imagine(item.imagine) if item.HasField("imagine") else None,
            expires_at=expires,
        )
    except TaktlineError as error:
        observation = error
    return Item(observation, expires)


def _read_search(search: worker_pb2.Search) -> SearchInput:
    def plan(name: str) -> np.ndarray[Any, np.dtype[np.generic]] | None:
        if not search.HasField(name):
            return None
        return _read_array(f"search.{name}", getattr(search, name), ErrorCode.SEARCH_INVALID)

    return SearchInput(
        candidates=search.candidates if search.HasField("candidates") else None,
        rounds=search.rounds if search.HasField("rounds") else None,
        elites=search.elites if search.HasField("elites") else None,
        horizon=search.horizon if search.HasField("horizon") else None,
        budget_ms=search.budget_ms if search.HasField("budget_ms") else None,
        anytime=search.anytime if search.HasField("anytime") else None,
        previous=plan("previous"),
        pending=plan("pending"),
    )


def _read_rtc(rtc: worker_pb2.Rtc) -> RtcInput:
    return RtcInput(
        tail=_read_array("the tail", rtc.tail, ErrorCode.RTC_INVALID),
        delay=rtc.delay if rtc.HasField("delay") else None,
        execution_horizon=rtc.execution_horizon if rtc.HasField("execution_horizon") else None,
        prefix_end=rtc.prefix_end if rtc.HasField("prefix_end") else None,
    )


def _read_imagine(imagine: worker_pb2.Imagine) -> ImagineInput:
    return ImagineInput(imagine.format, imagine.height if imagine.HasField("height") else None)


def _read_array(name: str, tensor: worker_pb2.Tensor, code: ErrorCode) -> np.ndarray[Any, np.dtype[np.generic]]:
    try:
        if tensor.dtype not in _STATE_DTYPES:
            raise ValueError(f"dtype {tensor.dtype!r} is none of {', '.join(sorted(_STATE_DTYPES))}")
        return np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<")).reshape(tuple(tensor.shape))
    except ValueError as error:
        raise TaktlineError(code, f"{name} is no array: {error}", "send prod(shape) little-endian values") from error


def _write_result(request_id: str, outcome: Outcome) -> worker_pb2.InferResult:
    if isinstance(outcome, TaktlineError):
        return worker_pb2.InferResult(request_id=request_id, error=to_error(outcome))
    if isinstance(outcome, GuidedChunk):
        applied = worker_pb2.RtcApplied(
            mode=outcome.mode,
            delay=outcome.delay,
            prefix_end=outcome.prefix_end,
            schedule=outcome.schedule,
            path=outcome.path,
        )
        return worker_pb2.InferResult(request_id=request_id, actions=_write_array(outcome.actions), rtc=applied)
    if isinstance(outcome, ImaginedChunk):
        video = worker_pb2.ImaginedVideo(format=outcome.format, fps=outcome.fps, parts=outcome.parts)
        return worker_pb2.InferResult(request_id=request_id, actions=_write_array(outcome.actions), imagined=video)
    if not isinstance(outcome, PlannedChunk):
        return worker_pb2.InferResult(request_id=request_id, actions=_write_array(outcome))
    plan = worker_pb2.Plan(
        predicted_states=_write_array(outcome.predicted_states),
        energies=_write_array(outcome.energies),
        stopped=outcome.stopped,
    )
    return worker_pb2.InferResult(request_id=request_id, actions=_write_array(outcome.actions), plan=plan)


def _write_array(value: NDArray[np.float32]) -> worker_pb2.Tensor:
    data = np.ascontiguousarray(value, dtype="<f4").tobytes()
    return worker_pb2.Tensor(dtype="float32", shape=value.shape, data=data)
