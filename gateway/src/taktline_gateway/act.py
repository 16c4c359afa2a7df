"""POST /v1/policies/{policy}/act: one observation in, one action chunk or typed error out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

from starlette.types import Receive, Scope, Send
from taktline_protocol import ActionChunk, Observation, PolicyInfo, TaktlineError
from taktline_protocol.checks import check_policy_fit
from taktline_protocol.codecs import decode_observation

from taktline_gateway.access.http import credential_of, principal_of
from taktline_gateway.demand import Way
from taktline_gateway.http_io import Disconnected, Exchange, exchange_of, read_body, send_error, send_message
from taktline_gateway.logs import log
from taktline_gateway.pending import ClientGone, Pending, Served
from taktline_gateway.phases import next_observation_at_ms
from taktline_gateway.refusals import advise, internal_error
from taktline_gateway.service import Gateway

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
        principal = principal_of(scope)
        observation: Observation | None = None
        body_read = False
        self._gateway.requests += 1
        try:
            media = exchange.body_media()
            settings = self._gateway.settings
            access = self._gateway.access
            admit = partial(
                access.admit, principal, credential_of(scope), "act", policy, request_id=exchange.request_id
            )
            if exchange.content_length is not None:  # else its size is known only when it has been read
                admit(exchange.content_length)
            body = await read_body(exchange, receive, settings.limits, settings.body_timeout_s)
            body_read = True
            if exchange.content_length is None:
                admit(len(body))
            self._gateway.lane(policy, principal)
            observation = decode_observation(body, media, settings.limits)
            self._gateway.check_open()
            robot = principal.robot(observation.robot_id)
            way = self._gateway.trials.way(policy, observation, robot)
            info = way.info()
            if info.cameras:  # unknown until a first worker has told; without one, `submit` refuses
                check_policy_fit(observation, info)
            self._gateway.robots.arrive(robot, observation.session_id, observation.seq, time.monotonic())
            deadline = deadline_of(observation, received_at)
            pending = way.submit(exchange.request_id, observation, deadline, principal)
            self._gateway.books.queued(policy, exchange, observation, pending)
            served = await self._wait(pending, way, receive)
            self._gateway.robots.touch(robot, time.monotonic())
            chunk = self.chunk(exchange.request_id, observation, info, served, pending, received_at)
            await send_message(send, exchange, chunk)
        except (ClientGone, Disconnected):
            self._gateway.books.gone(policy, exchange, observation)
        except TaktlineError as error:
            self.refused(policy, exchange, observation, error)
            unread = None if body_read else receive
            await send_error(send, exchange, error, close=self._gateway.draining, unread=unread)
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, request_id=exchange.request_id, policy=policy)
            internal = internal_error()
            self.refused(policy, exchange, observation, internal)
            await send_error(send, exchange, internal, close=True)
        finally:
            self._gateway.requests -= 1

    async def _wait(self, pending: Pending, way: Way, receive: Receive) -> Served:
        """Waits for the answer while watching the connection; a robot that goes away leaves the queue."""
        watcher = asyncio.ensure_future(receive())
        watcher.add_done_callback(lambda done: None if done.cancelled() else way.leave(pending))
        try:
            served = await pending.result
            if watcher.done():  # it was on a worker when its robot left: nobody reads this answer
                raise ClientGone
            return served
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
        verdict = self._gateway.books.answered(request_id, info, observation, served, pending, received_at)
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
            timings=verdict.timings,
            margin_ms=verdict.margin_ms,
            batch_size=served.batch_size,
            worker=served.worker,
            plan=served.plan,
            rtc=served.rtc,
            imagined=served.imagined,
            degraded=served.degraded,
            next_observation_at_ms=next_observation_at_ms(observation, served.next_at, time.monotonic()),
        )

    def refused(self, policy: str, exchange: Exchange, observation: Observation | None, error: TaktlineError) -> None:
        """Counts and logs one typed error; where its robot was shed, it says what is safe."""
        if observation is not None:
            lane = self._gateway.lanes.get(policy)
            advise(
                error,
                deadline_of(observation, exchange.received_at),
                time.monotonic(),
                0.0 if lane is None else lane.info().dt_s,
            )
        self._gateway.books.refused(policy, exchange, observation, error)


def deadline_of(observation: Observation, received_at: float) -> float:
    """Monotonic instant by which the answer must leave the gateway, s, for the robot to have it in time."""
    return received_at + (observation.budget_ms - observation.actuate_ms - observation.network_ms) / 1e3
