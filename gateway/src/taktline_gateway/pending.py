"""One observation on its way: what waits for its answer, and how a worker's result becomes that answer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec
import numpy as np
from taktline_protocol import ErrorCode, worker_pb2
from taktline_protocol.messages import Array, Degraded, Image, ImaginedVideo, PlanReport, PolicyInfo, RtcReport
from taktline_protocol.rpc import from_error, from_imagined, from_plan, from_rtc, from_tensor

from taktline_gateway.deadline_queue import Ticket
from taktline_gateway.refusals import worker_failed
from taktline_gateway.rtc_delay import delay_within
from taktline_gateway.tracing.requests import RequestTrace
from taktline_gateway.worker_state import Batch

RETRY_S = 0.25
"""When a robot whose worker sent no usable result is told to try again."""


class Served(msgspec.Struct, frozen=True):
    """What a worker made of one observation, with the instants (monotonic, s) and durations around it.

    Attributes:
        inference_s: the worker's own time, without `waited_s`, which the batch waited there for the one before it.
        next_at: when the robot's next observation should arrive.
        phases_ms: preprocess, engine and postprocess of its batch, as the worker measured them.
    """

    actions: Array
    revision: str
    worker: str
    pool: str
    batch_size: int
    sent_at: float
    returned_at: float
    inference_s: float
    phases_ms: tuple[float, float, float]
    waited_s: float = 0.0
    plan: PlanReport | None = None
    rtc: RtcReport | None = None
    imagined: ImaginedVideo | None = None
    degraded: Degraded | None = None
    next_at: float | None = None


class ClientGone(Exception):
    """The robot closed its connection while its observation was queued."""


@dataclasses.dataclass(slots=True, eq=False)
class Pending(Ticket):
    """A ticket with its observation and the future that its request waits for.

    Attributes:
        policy: the policy that was asked.
        lane: the lane that has it.
        flights: batches in flight that it is a member of; two where it was hedged.
        gone: its robot left while it was on a worker.
        hedged: the batch of a silent worker that it was hedged from.
        item, images: what the worker gets, the camera frames apart from the rest.
        outside_s: of a tail without a delay, the part of its way that is not seen here; None where there is none.
        info: what its policy says of itself; None unless such a delay is to be told.
        tell: answers its robot in the turn that brings the result, where nobody waits for the worker; what waits for
            `result` finds that done. Raises nothing.
    """

    policy: str = ""
    lane: object = None
    request_id: str = ""
    trace: RequestTrace | None = None
    flights: int = 0
    gone: bool = False
    hedged: Batch | None = None
    item: worker_pb2.InferItem = dataclasses.field(default_factory=worker_pb2.InferItem)
    images: Mapping[str, Image] = dataclasses.field(default_factory=dict)
    outside_s: float | None = None
    info: PolicyInfo | None = None
    tell: Callable[[Served], None] | None = None
    result: asyncio.Future[Served] = dataclasses.field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def passing(self, ends_at: float) -> int:
        """The delay of real-time chunking: the robot's own word, or what is estimated for one that does not say."""
        if not self.item.rtc.HasField("tail"):
            return 0
        if self.outside_s is None:
            return self.item.rtc.delay
        return delay_within(self.item, self.info, self.outside_s + ends_at - self.arrived_at) or 0

    def traced(self, trace: RequestTrace | None) -> None:
        """Its request is sampled: its batches belong to this trace."""
        self.trace = trace


def read_result(
    result: worker_pb2.InferResult | None, worker: str
) -> tuple[Array, PlanReport | None, RtcReport | None, ImaginedVideo | None]:
    """A worker's actions and what it says of them.

    Raises:
        TaktlineError: the item's own error, or `worker_failed` where there is no result, or one that is no actions.
    """
    if result is None:
        raise worker_failed(worker, "it sent no result for this observation", RETRY_S)
    if result.WhichOneof("outcome") == "error":
        raise from_error(result.error)
    actions = from_tensor("actions", result.actions, ErrorCode.WORKER_FAILED)
    if actions.dtype != "float32" or len(actions.shape) != 2 or not _finite(actions):
        # A robot must never be handed numbers that are not actions.
        raise worker_failed(worker, "its actions are not finite float32 rows", RETRY_S)
    plan = from_plan(result.plan) if result.HasField("plan") else None
    rtc = from_rtc(result.rtc) if result.HasField("rtc") else None
    imagined = from_imagined(result.imagined) if result.HasField("imagined") else None
    return actions, plan, rtc, imagined


def results_of(
    members: Sequence[Pending], results: Sequence[worker_pb2.InferResult]
) -> list[worker_pb2.InferResult | None]:
    """The result of each member, in their order; None where there is none that is certainly its own.

    Robots name their own requests, so two members may have one name. Their results come in the order of the members;
    where there are not as many results as members of a name, nobody can say whose they are.
    """
    names = [member.request_id for member in members]
    if [result.request_id for result in results] == names:
        return list(results)
    found: dict[str, deque[worker_pb2.InferResult]] = {}
    for result in results:
        found.setdefault(result.request_id, deque()).append(result)
    certain = {name for name, count in Counter(names).items() if len(found.get(name, ())) == count}
    return [found[name].popleft() if name in certain else None for name in names]


def outside_s(response: worker_pb2.InferResponse, seconds: float) -> float:
    """How much of a batch's `seconds` its worker's engine was not needed; what it waited for the engine is neither.

    Where the engine is quick, that is no more than its own time: it would not be the engine that others wait for. 0 of
    a worker that does not tell what it waited: nothing is sent ahead to it.
    """
    waited = waited_s(response)
    if waited is None:
        return 0.0
    return max(0.0, min(response.engine_ms / 1e3, seconds - response.engine_ms / 1e3 - waited))


def waited_s(response: worker_pb2.InferResponse) -> float | None:
    """What a batch waited at its worker for the one before it; None of a worker that does not tell."""
    return response.waited_ms / 1e3 if response.HasField("waited_ms") else None


async def failing(error: Exception) -> NoReturn:
    """What stands for an answer that will not come, where it is known at once why."""
    raise error


def is_away(result: worker_pb2.InferResult) -> bool:
    """Whether the worker says that it can serve nobody for some time."""
    return result.error.code == ErrorCode.WORKER_UNAVAILABLE.value and result.error.HasField("retry_after_ms")


def _finite(actions: Array) -> bool:
    """Whether every number is finite: a sum of float32 in float64 cannot overflow, and keeps any inf and nan.

    Sums are needed only where a number is 2**127 or more, or none: NumPy, which has rested since the last answer, takes
    50 us to find it out.
    """
    highest = actions.data[3::4]  # the sign of each number, and all of its exponent but one bit
    if 0x7F not in highest and 0xFF not in highest:
        return True
    return math.isfinite(np.add.reduce(np.frombuffer(actions.data, "<f4"), dtype=np.float64))


def behind_answers(work: Callable[[], object]) -> None:
    """Runs `work` when the answers that are known now have been written: the loop makes them in its next turn, and
    hands them to the kernel at the end of that."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, work)
