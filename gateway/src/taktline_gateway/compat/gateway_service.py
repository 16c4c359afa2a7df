"""The client protocols' door into the gateway: the same admission, queue and books as POST /act, without the HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from taktline_protocol import ActionChunk, Observation, PolicyInfo, TaktlineError
from taktline_protocol.checks import check_observation, check_policy_fit
from taktline_protocol.deployment import ClientMapping, ClientProtocol
from taktline_protocol.limits import Limits

from taktline_gateway.access.control import Credential
from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.act import ActEndpoint, deadline_of
from taktline_gateway.compat.service import Caller
from taktline_gateway.connections import ConnectionCounts
from taktline_gateway.demand import Way
from taktline_gateway.http_io import Exchange
from taktline_gateway.logs import log
from taktline_gateway.pending import ClientGone, Pending, Served
from taktline_gateway.refusals import internal_error
from taktline_gateway.service import Gateway

_logger = logging.getLogger(__name__)
_NO_MAPPING = ClientMapping()

Withdraw = Callable[[TaktlineError | None], bool]
"""Takes an observation out of the queue, answering it with the error, or with nothing; False where a batch has it."""
UnderWay = Callable[[], bool]
"""Whether a worker has an observation."""


@dataclasses.dataclass(slots=True, eq=False)
class _Asked:
    """An observation that waits for its chunk, or was told it; `reason` is why it was withdrawn."""

    policy: str
    observation: Observation
    exchange: Exchange
    credential: Credential
    robot: str
    lane: Way
    info: PolicyInfo
    pending: Pending
    received_at: float
    reason: TaktlineError | None = None
    chunk: ActionChunk | None = None

    def withdraw(self, reason: TaktlineError | None) -> bool:
        """See `Withdraw`."""
        self.reason = reason
        self.lane.leave(self.pending)
        return self.pending.result.done()

    def under_way(self) -> bool:
        """See `UnderWay`."""
        return self.pending.flights > 0


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
    def connections(self) -> ConnectionCounts:
        """The connections that this gateway holds."""
        return self._gateway.connections

    @property
    def draining(self) -> bool:
        """True once this gateway is going away."""
        return self._gateway.draining

    async def identify(self, caller: Caller) -> Caller:
        """The caller with its principal. Raises TaktlineError `unauthenticated`."""
        principal = await self._gateway.access.authenticate(_credential(caller))
        return caller if principal is caller.principal else dataclasses.replace(caller, principal=principal)

    def check_may_act(self, caller: Caller, policy: str) -> None:
        """Raises TaktlineError `forbidden` where an identified caller may not ask this policy."""
        self._gateway.access.authorise(caller.principal, _credential(caller), "act", policy, robot=caller.robot_id)

    def policies(self, caller: Caller | None = None) -> list[str]:
        """Names of the policies served, sorted; with a caller those that it may ask."""
        served = sorted(self._gateway.lanes)
        return served if caller is None else [policy for policy in served if caller.principal.may("act", policy)]

    def info(self, policy: str) -> PolicyInfo:
        """Facts of one policy. Raises TaktlineError `unknown_policy`."""
        return self._gateway.lane(policy).info()

    def mapping(self, policy: str, protocol: ClientProtocol) -> ClientMapping:
        """How a protocol's observations are read for a policy. Raises TaktlineError `unknown_policy`."""
        return self._gateway.lane(policy).route.clients.get(protocol, _NO_MAPPING)

    async def submit(
        self, caller: Caller, policy: str, observation: Observation, *, checked: bool = False
    ) -> ActionChunk:
        """Serves one observation. Raises TaktlineError; cancelling the call takes the observation out of the queue."""
        exchange = Exchange({"headers": ()})
        access = self._gateway.access
        credential = _credential(caller)
        principal = OPEN
        if not access.open:
            try:
                # Again for each observation: a key may have been revoked while its connection lives.
                principal = await access.authenticate(credential)
                about = {"robot": observation.robot_id, "request_id": exchange.request_id}
                access.authorise(principal, credential, "act", policy, **about)
            except TaktlineError as error:
                self._books.refused(policy, exchange, observation, error)
                raise
        return await self.serve(
            policy, observation, exchange, credential=credential, principal=principal, checked=checked
        )

    def serve(
        self,
        policy: str,
        observation: Observation,
        exchange: Exchange,
        *,
        credential: Credential,
        principal: Principal = OPEN,
        received_at: float | None = None,
        checked: bool = False,
        admitted: Callable[[Withdraw, UnderWay], None] | None = None,
        tell: Callable[[ActionChunk], None] | None = None,
    ) -> Coroutine[Any, Any, ActionChunk]:
        """Queues one observation, whichever protocol brought it; what it gives waits for the chunk.

        Args:
            exchange: carries the request id.
            credential: what was presented, and over which protocol.
            principal: who asks; it has the right to act on this policy, and pays for the observation.
            received_at: monotonic instant from which the budget runs, s; now where None.
            checked: `check_observation` has been called, or would find nothing.
            admitted: hears when the observation is in the queue, and gets what takes it out again and what says
                whether a worker has it.
            tell: hears of the chunk first, where that comes while nobody else waits for a worker.

        Raises:
            TaktlineError: every refusal, now or while it waits; counted and logged.
            ClientGone: while it waits: it was withdrawn without a reason.
        """
        received_at = time.monotonic() if received_at is None else received_at
        gateway = self._gateway
        gateway.requests += 1
        try:
            gateway.check_open()
            if not gateway.access.open:
                size = sum(len(image.data) for image in observation.images.values())
                about = {"robot": observation.robot_id, "request_id": exchange.request_id}
                gateway.access.admit(principal, credential, "act", policy, size, **about)
            gateway.lane(policy, principal)
            if not checked:
                check_observation(observation, self.limits)
            robot = principal.robot(observation.robot_id)
            lane = gateway.trials.way(policy, observation, robot)
            info = lane.info()
            if info.cameras:  # unknown until a first worker has told; without one, the lane refuses
                check_policy_fit(observation, info)
            gateway.robots.arrive(robot, observation.session_id, observation.seq, time.monotonic())
            pending = lane.submit(exchange.request_id, observation, deadline_of(observation, received_at), principal)
            gateway.books.queued(policy, exchange, observation, pending)
            asked = _Asked(policy, observation, exchange, credential, robot, lane, info, pending, received_at)
            if tell is not None:
                pending.tell = partial(self._tell, asked, tell)
            if admitted is not None:
                admitted(asked.withdraw, asked.under_way)
        except Exception as error:
            gateway.requests -= 1
            refusal = self._refusal(error, policy, observation, exchange, credential)
            raise refusal from (None if refusal is error else error)
        return self._chunk(asked)

    def _tell(self, asked: _Asked, tell: Callable[[ActionChunk], None], served: Served) -> None:
        try:
            asked.chunk = self._made(asked, served)
            tell(asked.chunk)
        except Exception:  # what waits for the result tries it again, and answers
            log(_logger, logging.ERROR, "internal", exc_info=True, policy=asked.policy)

    def _made(self, asked: _Asked, served: Served) -> ActionChunk:
        self._gateway.robots.touch(asked.robot, time.monotonic())
        return self._books.chunk(
            asked.exchange.request_id, asked.observation, asked.info, served, asked.pending, asked.received_at
        )

    async def _chunk(self, asked: _Asked) -> ActionChunk:
        gateway, about = self._gateway, (asked.policy, asked.observation, asked.exchange, asked.credential)
        try:
            try:
                served = await asked.pending.result
            finally:
                # Where this wait was cancelled it may still be queued; elsewhere this finds nothing to do.
                asked.lane.leave(asked.pending)
                asked.pending.tell = None  # else they hold each other, and the frames, until the collector comes
            return asked.chunk or self._made(asked, served)
        except asyncio.CancelledError:
            if asked.chunk is None:  # else it was told, and is in the books as answered
                gateway.books.gone(asked.policy, asked.exchange, asked.observation)
            raise
        except ClientGone:
            if asked.reason is None:
                gateway.books.gone(asked.policy, asked.exchange, asked.observation)
                raise
            raise self._refusal(asked.reason, *about) from None
        except Exception as error:
            refusal = self._refusal(error, *about)
            raise refusal from (None if refusal is error else error)
        finally:
            gateway.requests -= 1

    def _refusal(
        self, error: Exception, policy: str, observation: Observation, exchange: Exchange, credential: Credential
    ) -> TaktlineError:
        """The error as its robot is told of it, counted and logged; a fault of ours is one of ours."""
        if not isinstance(error, TaktlineError):
            log(
                _logger,
                logging.ERROR,
                "internal",
                exc_info=True,
                request_id=exchange.request_id,
                policy=policy,
                robot=observation.robot_id,
                protocol=credential.protocol,
            )
            error = internal_error()
        self._books.refused(policy, exchange, observation, error)
        return error

    def refuse(self, policy: str, exchange: Exchange, observation: Observation | None, error: TaktlineError) -> None:
        """Counts and logs a request that its protocol had to refuse before it could be served."""
        self._books.refused(policy, exchange, observation, error)

    def leave(self, caller: Caller) -> None:
        """The caller's connection has closed; its robot id is free."""
        self._gateway.robots.leave(caller.principal.robot(caller.robot_id), caller.session_id)


def _credential(caller: Caller) -> Credential:
    return Credential(caller.protocol, caller.peer, caller.api_key)
