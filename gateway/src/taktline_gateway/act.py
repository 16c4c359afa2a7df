"""POST /v1/policies/{policy}/act: one observation in, one action chunk or typed error out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from starlette.types import Receive, Scope, Send
from taktline_protocol import ActionChunk, ErrorCode, Observation, PolicyInfo, TaktlineError, Timings
from taktline_protocol.checks import check_policy_fit
from taktline_protocol.codecs import decode_observation

from taktline_gateway.http_io import (
    Disconnected,
    Exchange,
    exchange_of,
    internal_error,
    read_body,
    send_error,
    send_message,
)
from taktline_gateway.lane import ClientGone, Lane, Pending, Served
from taktline_gateway.logs import log
from taktline_gateway.service import Gateway
from taktline_gateway.telemetry import margin_of, miss_cause

CLIENT_GONE = "client_gone"
"""The outcome of a request whose robot closed the connection; a metric label, never on the wire."""
# Errors that leave a deadline unmet; the others are the request's own fault or have a newer observation behind them.
_MISSED = frozenset(
    {
        ErrorCode.DEADLINE_EXPIRED,
        ErrorCode.DEADLINE_UNREACHABLE,
        ErrorCode.OVERLOADED,
        ErrorCode.DRAINING,
        ErrorCode.WORKER_UNAVAILABLE,
        ErrorCode.WORKER_FAILED,
        ErrorCode.INTERNAL,
    }
)
_logger = logging.getLogger(__name__)


class ActEndpoint:
    """ASGI endpoint of the hot path."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        received_at = time.monotonic()
        exchange = exchange_of(scope)
        policy: str = scope["path_params"]["policy"]
        observation: Observation | None = None
        body_read = False
        self._gateway.requests += 1
        try:
            media = exchange.body_media()
            settings = self._gateway.settings
            body = await read_body(exchange, receive, settings.limits, settings.body_timeout_s)
            body_read = True
            self._gateway.check_open()
            lane = self._gateway.lane(policy)
            observation = decode_observation(body, media, settings.limits)
            info = lane.info()
            if info.cameras:  # unknown until a first worker has told; without one, `submit` refuses
                check_policy_fit(observation, info)
            self._gateway.robots.arrive(observation.robot_id, observation.session_id, observation.seq, time.monotonic())
            reserved_ms = observation.actuate_ms + observation.network_ms
            deadline = received_at + (observation.budget_ms - reserved_ms) / 1e3
            pending = lane.submit(exchange.request_id, observation, deadline)
            served = await self._wait(pending, lane, receive)
            self._gateway.robots.touch(observation.robot_id, time.monotonic())
            chunk = self.chunk(exchange.request_id, observation, info, served, pending, received_at)
            await send_message(send, exchange, chunk)
        except (ClientGone, Disconnected):
            self._gateway.telemetry.refused(policy, CLIENT_GONE, missed=False)
        except TaktlineError as error:
            self.refused(policy, exchange, observation, error)
            await send_error(send, exchange, error, close=not body_read or self._gateway.draining)
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, request_id=exchange.request_id, policy=policy)
            internal = internal_error()
            self.refused(policy, exchange, observation, internal)
            await send_error(send, exchange, internal, close=True)
        finally:
            self._gateway.requests -= 1

    async def _wait(self, pending: Pending, lane: Lane, receive: Receive) -> Served:
        """Waits for the answer while watching the connection; a robot that goes away leaves the queue."""
        watcher = asyncio.ensure_future(receive())
        watcher.add_done_callback(lambda done: None if done.cancelled() else lane.leave(pending))
        try:
            return await pending.result
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    def chunk(
        self,
        request_id: str,
        observation: Observation,
        info: PolicyInfo,
        served: Served,
        pending: Pending,
        received_at: float,
    ) -> ActionChunk:
        """The answer to one observation, counted, and logged where it is late."""
        queue_s = served.sent_at - pending.arrived_at
        seen_s = time.monotonic() - received_at
        sent_at = observation.captured_at if observation.sent_at is None else observation.sent_at
        timings = Timings(
            observe_ms=1e3 * (sent_at - observation.captured_at),
            # The gateway's own time that is neither waiting nor inference: reading, decoding, the RPC's overhead.
            transfer_ms=1e3 * max(0.0, seen_s - queue_s - served.inference_s),
            queue_ms=1e3 * queue_s,
            inference_ms=1e3 * served.inference_s,
            actuate_ms=observation.actuate_ms,
        )
        margin_ms = margin_of(observation.budget_ms, timings)
        cause = miss_cause(observation.budget_ms, timings)
        # Of the answers in time any is as good as another; of the late ones a person wants to see which.
        exemplar = None if cause is None else {"request_id": request_id}
        self._gateway.telemetry.answered(info.policy, served.pool, served.revision, timings, margin_ms, cause, exemplar)
        if cause is not None:
            log(
                _logger,
                logging.INFO,
                "deadline_missed",
                policy=info.policy,
                robot=observation.robot_id,
                request_id=request_id,
                seq=observation.seq,
                cause=cause,
                margin_ms=round(margin_ms, 3),
                worker=served.worker,
            )
        horizon = served.actions.shape[0]
        return ActionChunk(
            request_id=request_id,
            policy=info.policy,
            revision=served.revision,
            robot_id=observation.robot_id,
            seq=observation.seq,
            actions=served.actions,
            dt_s=info.dt_s,
            captured_at=observation.captured_at,
            valid_until=observation.captured_at + horizon * info.dt_s,
            timings=timings,
            margin_ms=margin_ms,
            batch_size=served.batch_size,
            worker=served.worker,
            plan=served.plan,
            rtc=served.rtc,
        )

    def refused(self, policy: str, exchange: Exchange, observation: Observation | None, error: TaktlineError) -> None:
        """Counts and logs one typed error."""
        exemplar = {"request_id": exchange.request_id}
        self._gateway.telemetry.refused(policy, error.code.value, missed=error.code in _MISSED, exemplar=exemplar)
        log(
            _logger,
            logging.INFO,
            "request_refused",
            policy=policy[:128],
            code=error.code.value,
            reason=error.message,
            request_id=exchange.request_id,
            robot=observation.robot_id if observation is not None else None,
            seq=observation.seq if observation is not None else None,
        )
