"""The client protocols' door into the gateway: the same admission, queue and books as POST /act, without the HTTP."""

from __future__ import annotations

import asyncio
import logging
import time

from taktline_protocol import ActionChunk, Observation, PolicyInfo, TaktlineError
from taktline_protocol.checks import check_observation, check_policy_fit
from taktline_protocol.deployment import ClientMapping, ClientProtocol
from taktline_protocol.limits import Limits

from taktline_gateway.act import CLIENT_GONE, ActEndpoint
from taktline_gateway.compat.service import Caller
from taktline_gateway.http_io import Exchange, internal_error
from taktline_gateway.lane import Lane, Pending, Served
from taktline_gateway.logs import log
from taktline_gateway.service import Gateway

_logger = logging.getLogger(__name__)
_NO_MAPPING = ClientMapping()


class GatewayService:
    """`PolicyService` over one gateway process."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._books = ActEndpoint(gateway)

    @property
    def limits(self) -> Limits:
        """Limits of one observation."""
        return self._gateway.settings.limits

    @property
    def draining(self) -> bool:
        """True once this gateway is going away."""
        return self._gateway.draining

    def policies(self) -> list[str]:
        """Names of the policies served, sorted."""
        return sorted(self._gateway.lanes)

    def info(self, policy: str) -> PolicyInfo:
        """Facts of one policy. Raises TaktlineError `unknown_policy`."""
        return self._gateway.lane(policy).info()

    def mapping(self, policy: str, protocol: ClientProtocol) -> ClientMapping:
        """How a protocol's observations are read for a policy. Raises TaktlineError `unknown_policy`."""
        return self._gateway.lane(policy).route.clients.get(protocol, _NO_MAPPING)

    async def submit(self, caller: Caller, policy: str, observation: Observation) -> ActionChunk:
        """Serves one observation. Raises TaktlineError; cancelling the call takes the observation out of the queue."""
        received_at = time.monotonic()
        exchange = Exchange({"headers": ()})
        request_id = exchange.request_id
        gateway = self._gateway
        gateway.requests += 1
        try:
            gateway.check_open()
            lane = gateway.lane(policy)
            check_observation(observation, self.limits)
            info = lane.info()
            if info.cameras:  # unknown until a first worker has told; without one, the lane refuses
                check_policy_fit(observation, info)
            gateway.robots.arrive(observation.robot_id, observation.session_id, observation.seq, time.monotonic())
            served, pending = await _through(lane, request_id, observation, received_at)
            gateway.robots.touch(observation.robot_id, time.monotonic())
            return self._books.chunk(request_id, observation, info, served, pending, received_at)
        except asyncio.CancelledError:
            # Only the wait for an answer can be cancelled, so the policy is one that is served.
            gateway.telemetry.refused(policy, CLIENT_GONE, missed=False)
            raise
        except TaktlineError as error:
            self._books.refused(policy, exchange, observation, error)
            raise
        except Exception as error:
            log(
                _logger,
                logging.ERROR,
                "internal",
                exc_info=True,
                request_id=request_id,
                policy=policy,
                robot=caller.robot_id,
                protocol=caller.protocol,
            )
            internal = internal_error()
            self._books.refused(policy, exchange, observation, internal)
            raise internal from error
        finally:
            gateway.requests -= 1

    def leave(self, caller: Caller) -> None:
        """The caller's connection has closed; its robot id is free."""
        self._gateway.robots.leave(caller.robot_id, caller.session_id)


async def _through(lane: Lane, request_id: str, observation: Observation, received_at: float) -> tuple[Served, Pending]:
    """Queue, batch and worker."""
    reserved_ms = observation.actuate_ms + observation.network_ms
    deadline = received_at + (observation.budget_ms - reserved_ms) / 1e3
    pending = lane.submit(request_id, observation, deadline)
    try:
        return await pending.result, pending
    finally:
        # Where this wait was cancelled the observation may still be queued; elsewhere this finds nothing to do.
        lane.leave(pending)
