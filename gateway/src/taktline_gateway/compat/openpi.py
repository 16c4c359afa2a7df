"""openpi's WebSocket policy protocol: metadata first, then one observation and one action chunk at a time.

`openpi-client` ends the robot program on any HTTP error and on a closed socket, and waits without limit for the
metadata frame and for answers. So a cold start withholds the metadata (pings are answered meanwhile), a refused
observation is a text frame after which the connection goes on, and only an answer that would be taken for another
one's closes it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from taktline_protocol import ActionChunk, ErrorCode, PolicyInfo, TaktlineError
from websockets.frames import CloseCode

from taktline_gateway.compat.fenced_connection import FencedConnection
from taktline_gateway.compat.frame_layout import FrameLayouts
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.ports import Listen
from taktline_gateway.compat.service import Conversation, PolicyService, degraded_of, policy_of, until_ready
from taktline_gateway.compat.websocket_listener import Arrival, WebSocketListener, unless_closed
from taktline_gateway.compat.wire_arrays import encode_openpi, packed_openpi, rebuild, unpack
from taktline_gateway.logs import log
from taktline_gateway.refusals import internal_error
from taktline_gateway.tls import ServerTls

HEALTH = ("/healthz", "OK\n", "text/plain; charset=utf-8")
KEEPALIVE_S = 20.0
OVERTAKEN = TaktlineError(
    ErrorCode.SUPERSEDED,
    "an observation arrived before the last one's answer was read",
    "wait for each answer, or connect again after giving up on one: this protocol has no request ids",
)
_logger = logging.getLogger(__name__)


def openpi_listener(listen: Listen, service: PolicyService, tls: ServerTls | None = None) -> WebSocketListener:
    """A listener that speaks openpi's protocol."""
    return WebSocketListener(
        "openpi", listen, service, OpenpiServer(service).converse, health=HEALTH, keepalive_s=KEEPALIVE_S, tls=tls
    )


class OpenpiServer:
    """Speaks the protocol on any number of connections."""

    def __init__(self, service: PolicyService) -> None:
        self._service = service

    async def converse(self, connection: FencedConnection, arrival: Arrival) -> None:
        """Serves one client until it leaves. Raises ConnectionClosed."""
        policy: str = await unless_closed(connection, policy_of(self._service, arrival.caller, arrival.policy))
        info: PolicyInfo = await unless_closed(connection, until_ready(self._service, policy))
        await connection.send(encode_openpi(self._metadata(info)))
        conversation = Conversation(self._service, arrival.caller, policy)
        layouts = FrameLayouts()
        closed = asyncio.ensure_future(connection.wait_closed())
        previous_ms: float | None = None
        conversing = asyncio.current_task()
        assert conversing is not None
        answering = gave_up = False
        answer: bytes | str | None

        def give_up(_: asyncio.Future[Any]) -> None:
            nonlocal gave_up
            if answering and not gave_up:
                gave_up = conversing.cancel()

        # Whichever comes first, nobody waits for this answer any more.
        closed.add_done_callback(give_up)
        connection.overtaken.add_done_callback(give_up)
        try:
            while True:
                frame = await connection.next_message()
                received_at = time.monotonic()
                answering = True
                try:
                    answer = await self._answer(conversation, layouts, frame, received_at, previous_ms)
                except asyncio.CancelledError:
                    if not gave_up or conversing.uncancel():
                        raise  # it is this conversation that ends
                    answer = None
                finally:
                    answering = gave_up = False
                if answer is not None and not connection.overtaken.done():
                    await connection.answer(answer)
                if connection.overtaken.done():
                    await connection.send(str(OVERTAKEN))
                    await connection.close(CloseCode.POLICY_VIOLATION, "answer overtaken")
                    log(_logger, logging.WARNING, "answer_overtaken", policy=policy, robot=arrival.caller.robot_id)
                    return
                if self._service.draining:
                    await connection.close(CloseCode.GOING_AWAY, "draining")
                    return
                previous_ms = 1e3 * (time.monotonic() - received_at)
        finally:
            closed.cancel()

    def _metadata(self, info: PolicyInfo) -> dict[str, Any]:
        facts = {
            "policy": info.policy,
            "revision": info.revision,
            "action_horizon": info.horizon,
            "action_dim": info.action_dim,
            "control_dt_s": info.dt_s,
            "cameras": list(info.cameras),
        }
        return facts | self._service.mapping(info.policy, "openpi").metadata

    async def _answer(
        self,
        conversation: Conversation,
        layouts: FrameLayouts,
        frame: bytes | str,
        received_at: float,
        previous_ms: float | None,
    ) -> bytes | str:
        """The frame to send back: binary is a result, text an error."""
        try:
            if isinstance(frame, str):
                raise TaktlineError(
                    ErrorCode.INVALID_BODY, "the frame is text", "send the observation as a binary msgpack frame"
                )
            chunk = await self._act(conversation, layouts, frame)
        except TaktlineError as error:
            return str(error)
        except Exception:
            log(
                _logger,
                logging.ERROR,
                "internal",
                exc_info=True,
                protocol="openpi",
                policy=conversation.policy,
                robot=conversation.caller.robot_id,
            )
            return str(internal_error())
        return encode_openpi(result_of(chunk, 1e3 * (time.monotonic() - received_at), previous_ms))

    async def _act(self, conversation: Conversation, layouts: FrameLayouts, frame: bytes) -> ActionChunk:
        service, policy = self._service, conversation.policy
        mapping, info = service.mapping(policy, "openpi"), service.info(policy)
        known = layouts.read(frame, info, mapping)
        if known is not None:
            return await conversation.act(known, checked=True, info=info, mapping=mapping)
        value = unpack(frame, service.limits)
        read = read_observation(rebuild(value), mapping, info, "openpi")
        chunk = await conversation.act(read, info=info, mapping=mapping)
        layouts.study(frame, value, read, info, mapping, service.limits)
        return chunk


def result_of(chunk: ActionChunk, infer_ms: float, previous_ms: float | None) -> dict[str, Any]:
    """openpi's result map.

    Numbers only in the timing maps (clients record every value), and no array but `actions`: openpi's chunk broker
    indexes every array of the result by step.

    Args:
        infer_ms: from the observation's arrival to this result.
        previous_ms: from arrival to sent of the connection's previous observation, None for the first.
    """
    timings = chunk.timings
    server_timing = {"infer_ms": infer_ms, "queue_ms": timings.queue_ms, "margin_ms": chunk.margin_ms}
    if previous_ms is not None:
        server_timing["prev_total_ms"] = previous_ms
    about: dict[str, Any] = {
        "request_id": chunk.request_id,
        "revision": chunk.revision,
        "batch_size": chunk.batch_size,
    }
    if chunk.degraded is not None:
        about["degraded"] = degraded_of(chunk)
    return {
        "actions": packed_openpi(chunk.actions),
        "server_timing": server_timing,
        "policy_timing": {"infer_ms": timings.inference_ms},
        "taktline": about,
    }
