"""What the client protocols need of the gateway: a policy's facts, and one observation in, one chunk out."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections import deque
from typing import Any, Protocol

import msgspec
from taktline_protocol import ActionChunk, ErrorCode, Observation, PolicyInfo, TaktlineError
from taktline_protocol.deployment import ClientMapping, ClientProtocol
from taktline_protocol.limits import Limits
from taktline_protocol.messages import Rtc

from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.compat.deadlines import (
    ARRIVALS_KEPT,
    chunk_duration_ms,
    inferred_budget_ms,
    request_period_ms,
)
from taktline_gateway.compat.observations import ClientInput
from taktline_gateway.connections import ConnectionCounts

READY_POLL_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: what an access check needs to decide, and what the log may show (never the key).

    Attributes:
        protocol: client protocol, e.g. `openpi`.
        peer: the client's address, for the log.
        robot_id: its own name where the protocol lets it say one, else made up for the connection.
        session_id: drawn for each connection.
        api_key: the key or token it presented, unchecked; None where it presented none in the protocol's form.
        principal: who that makes it, as `PolicyService.identify` found.
    """

    protocol: ClientProtocol
    peer: str
    robot_id: str
    session_id: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    principal: Principal = OPEN

    @classmethod
    def connecting(
        cls, protocol: ClientProtocol, peer: str, robot: str | None = None, api_key: str | None = None
    ) -> Caller:
        """The caller of a new connection; `robot` is the name it gave, if any."""
        session_id = os.urandom(8).hex()
        name = robot if robot and len(robot) <= 128 and robot.isprintable() else f"{protocol}-{session_id}"
        return cls(protocol, peer, name, session_id, api_key)

    def without_session(self) -> Caller:
        """For protocols whose requests stand alone: two of them under one name are no conflict."""
        return dataclasses.replace(self, session_id="")


class PolicyService(Protocol):
    """The gateway as the client protocols see it."""

    @property
    def limits(self) -> Limits:
        """Limits of one observation."""

    @property
    def connections(self) -> ConnectionCounts:
        """The connections that this gateway holds."""

    @property
    def draining(self) -> bool:
        """True once this gateway is going away."""

    async def identify(self, caller: Caller) -> Caller:
        """The caller with its principal. Raises TaktlineError `unauthenticated`."""

    def check_may_act(self, caller: Caller, policy: str) -> None:
        """Raises TaktlineError `forbidden` where an identified caller may not ask this policy."""

    def policies(self, caller: Caller | None = None) -> list[str]:
        """Names of the policies served, sorted; with a caller those that it may ask."""

    def info(self, policy: str) -> PolicyInfo:
        """Facts of one policy. Raises TaktlineError `unknown_policy`."""

    def mapping(self, policy: str, protocol: ClientProtocol) -> ClientMapping:
        """How a protocol's observations are read for a policy; all defaults where the route says nothing."""

    async def submit(
        self, caller: Caller, policy: str, observation: Observation, *, checked: bool = False
    ) -> ActionChunk:
        """Serves one observation. Raises TaktlineError; cancelling the call takes the observation out of the queue.

        Args:
            checked: it would pass `check_observation`.
        """

    def leave(self, caller: Caller) -> None:
        """The caller's connection has closed; its robot id is free."""


class Conversation:
    """One client's requests to one policy: numbers them, and infers the deadlines that it cannot state."""

    def __init__(self, service: PolicyService, caller: Caller, policy: str) -> None:
        self.service = service
        self.caller = caller
        self.policy = policy
        self._seq = 0
        self._arrivals: deque[float] = deque(maxlen=ARRIVALS_KEPT)
        self._rows = 0
        """Actions of the last chunk; 0 before the first."""
        self._known: tuple[PolicyInfo, ClientMapping, int, float, float] | None = None
        """What a budget was last inferred from, the duration of a chunk, and what a batch of one takes."""

    def budget_ms(self, info: PolicyInfo | None = None, mapping: ClientMapping | None = None) -> float:
        """The inferred budget of a request that arrives now; see `deadlines.inferred_budget_ms`.

        Args:
            info, mapping: the policy's, where they are at hand.
        """
        info = self.service.info(self.policy) if info is None else info
        mapping = self.service.mapping(self.policy, self.caller.protocol) if mapping is None else mapping
        known = self._known
        rows = min(self._rows or info.horizon, info.horizon)  # one that was made cheaper may have been shorter
        if known is None or known[0] is not info or known[1] is not mapping or known[2] != rows:
            chunk_ms = chunk_duration_ms(rows, info.dt_s, mapping.control_hz)
            alone_ms = min((time.p99_ms for time in info.t_sync if time.batch == 1), default=0.0)
            known = self._known = (info, mapping, rows, chunk_ms, alone_ms)
        _, _, _, chunk_ms, alone_ms = known
        period_ms = request_period_ms(list(self._arrivals), chunk_ms)
        return inferred_budget_ms(period_ms, chunk_ms, info.control_budget_ms, alone_ms, self.service.limits.budget_ms)

    def begin_episode(self) -> None:
        """The robot starts anew; its rhythm of before says nothing."""
        self._arrivals.clear()
        self._rows = 0

    async def act(
        self,
        read: ClientInput,
        *,
        budget_ms: float | None = None,
        seed: int | None = None,
        rtc: Rtc | None = None,
        checked: bool = False,
        info: PolicyInfo | None = None,
        mapping: ClientMapping | None = None,
    ) -> ActionChunk:
        """Sends one observation through the gateway. Raises TaktlineError.

        Args:
            budget_ms: None infers it.
            rtc: the rest of the robot's last chunk, where its protocol can say it.
            checked: it would pass `check_observation`.
            info, mapping: the policy's, where they are at hand.
        """
        now = time.monotonic()
        self._arrivals.append(now)
        self._seq += 1
        observation = Observation(
            robot_id=self.caller.robot_id,
            session_id=self.caller.session_id,
            seq=self._seq,
            captured_at=now,
            budget_ms=self.budget_ms(info, mapping) if budget_ms is None else budget_ms,
            images=read.images,
            state=read.state,
            instruction=read.instruction,
            seed=seed,
            rtc=rtc,
        )
        chunk = await self.service.submit(self.caller, self.policy, observation, checked=checked)
        self._rows = chunk.actions.shape[0] if chunk.plan is None else 0
        return chunk


async def policy_of(service: PolicyService, caller: Caller, policy: str) -> str:
    """`policy`, or where it is empty the only one that the caller may ask, as soon as there is one.

    Raises:
        TaktlineError: `unknown_policy` where there are several, `forbidden` where the caller may not ask `policy`.
    """
    while not policy:
        served = service.policies(caller)
        if len(served) > 1:
            raise TaktlineError(
                ErrorCode.UNKNOWN_POLICY,
                f"{len(served)} policies are served here",
                f"connect to /v1/policies/POLICY/{caller.protocol}",
            )
        if served:
            policy = served[0]
            break
        await asyncio.sleep(READY_POLL_S)
    service.check_may_act(caller, policy)
    return policy


async def until_ready(service: PolicyService, policy: str) -> PolicyInfo:
    """Waits until a worker of `policy` is ready, for a client that would take a refusal for the end."""
    while True:
        try:
            info = service.info(policy)
        except TaktlineError:
            # Not in the routing table yet; it may be applied while this client waits.
            info = None
        if info is not None and info.ready:
            return info
        await asyncio.sleep(READY_POLL_S)


def degraded_of(chunk: ActionChunk) -> dict[str, Any]:
    """What was made cheaper of a chunk, as numbers and texts by name; empty where nothing was."""
    return {} if chunk.degraded is None else dict(msgspec.to_builtins(chunk.degraded))
