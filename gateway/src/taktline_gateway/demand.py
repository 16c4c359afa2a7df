"""Counts what robots ask for by the time they leave, and what became of it: the operator scales by this."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from typing import Protocol

from taktline_protocol import TaktlineError
from taktline_protocol.measurements import DEADLINE_CLASSES_MS, Demand, Outcomes
from taktline_protocol.messages import Observation, PolicyInfo

from taktline_gateway.access.rights import OPEN, Principal
from taktline_gateway.canary import count
from taktline_gateway.pending import ClientGone, Pending, Served


class Way(Protocol):
    """What takes observations of one policy: a lane, or one of the tracks of a trial."""

    def info(self) -> PolicyInfo:
        """What a client must know."""

    def submit(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal = OPEN
    ) -> Pending:
        """Queues one observation; await `result` of what it returns. Raises TaktlineError."""

    def leave(self, pending: Pending) -> None:
        """The robot is gone."""


class DemandCounts:
    """The outcomes of one policy's observations by deadline class, since the gateway started."""

    def __init__(self) -> None:
        self._classes = [Outcomes() for _ in range(len(DEADLINE_CLASSES_MS) + 1)]

    def of_class(self, left_s: float) -> Outcomes:
        """The counts of observations that leave so much time at arrival."""
        return self._classes[bisect_left(DEADLINE_CLASSES_MS, 1e3 * left_s)]

    def measured(self) -> tuple[Demand, ...]:
        """The classes that have seen anything."""
        edges = (*DEADLINE_CLASSES_MS, 0.0)
        return tuple(
            Demand(up_to_ms=edge, outcomes=outcomes)
            for edge, outcomes in zip(edges, self._classes, strict=True)
            if outcomes.total
        )


class CountedWay:
    """A way whose observations are counted."""

    def __init__(self, way: Way, counts: DemandCounts) -> None:
        self._way = way
        self._counts = counts

    def info(self) -> PolicyInfo:
        """What a client must know."""
        return self._way.info()

    def submit(
        self, request_id: str, observation: Observation, deadline: float, principal: Principal = OPEN
    ) -> Pending:
        """Queues one observation. Raises TaktlineError."""
        outcomes = self._counts.of_class(deadline - time.monotonic())
        try:
            pending = self._way.submit(request_id, observation, deadline, principal)
        except TaktlineError as error:
            count(outcomes, error, late=False)
            raise

        def done(result: asyncio.Future[Served]) -> None:
            error = ClientGone() if result.cancelled() else result.exception()
            count(outcomes, error, late=time.monotonic() > deadline)

        pending.result.add_done_callback(done)
        return pending

    def leave(self, pending: Pending) -> None:
        """The robot is gone."""
        self._way.leave(pending)
