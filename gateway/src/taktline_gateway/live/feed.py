"""GET /live/feed: the live page's one connection, server-sent events whose cost does not grow with traffic.

All pages share one snapshot a tick, made only while somebody looks. A page that is slow to read misses ticks and
never makes the gateway keep anything for it; pages beyond `MAX_PAGES` are refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope
from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.access.http import credential_of, principal_of
from taktline_gateway.live.snapshot import POINTS, POLICIES_SHOWN, past, policy_snapshot
from taktline_gateway.logs import log
from taktline_gateway.service import Gateway

TICK_S = 0.5
MAX_PAGES = 32
PAST_POINTS = 4096
"""Points of the last minute in the first message of a page, over all policies."""
CHECK_EVERY = 4
"""Ticks after which a page's key is looked at again: one that was taken back does not look on."""
_VERSION = version("taktline-gateway")
_logger = logging.getLogger(__name__)


class LiveFeed:
    """The feed of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._pages = 0
        self._pieces: dict[str, bytes] = {}
        self._told: dict[str, int] = {}
        self._before: dict[str, int] = {}
        """Up to which serial number points came before those of the last tick."""
        self._ticked = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    @property
    def pages(self) -> int:
        """Pages that look at this moment."""
        return self._pages

    async def __call__(self, request: Request) -> Response:
        """Serves one page until it goes. Raises TaktlineError `overloaded` or `draining`."""
        self._gateway.check_open()
        if self._pages >= MAX_PAGES:
            raise TaktlineError(
                ErrorCode.OVERLOADED,
                f"{MAX_PAGES} live pages look at this gateway already",
                "close one of them, or look at the dashboards in Grafana",
                retry_after_ms=10_000.0,
            )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(request.scope), media_type="text/event-stream", headers=headers)

    async def _events(self, scope: Scope) -> AsyncIterator[bytes]:
        self._pages += 1
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick(), name="live page")
        try:
            for number in itertools.count(1):
                await self._ticked.wait()
                yield self._event(scope, first=number == 1)
                if self._gateway.draining or (number % CHECK_EVERY == 0 and not await self._may_look(scope)):
                    return
        finally:
            self._pages -= 1
            if not self._pages and self._ticker is not None:
                self._ticker.cancel()
                self._ticker = None
                self._told = {}  # what happens until the next page comes is no news to it but its past

    async def _may_look(self, scope: Scope) -> bool:
        access = self._gateway.access
        if access.open:
            return True
        try:
            principal = await access.authenticate(credential_of(scope))
        except TaktlineError:
            return False
        return principal.may("observe")

    def _event(self, scope: Scope, *, first: bool) -> bytes:
        may = principal_of(scope).may
        seen = [piece for policy, piece in self._pieces.items() if may("observe", policy)]
        head = {
            "version": _VERSION,
            "draining": self._gateway.draining,
            "tick_ms": 1e3 * TICK_S,
            "hidden_policies": max(0, len(self._gateway.lanes) - POLICIES_SHOWN),
        }
        if first:
            head["past"] = self._past([policy for policy in self._pieces if may("observe", policy)])
        return b'data: %s,"policies":[%s]}\n\n' % (msgspec.json.encode(head)[:-1], b",".join(seen))

    def _past(self, policies: list[str]) -> dict[str, Any]:
        points = min(POINTS, max(4, PAST_POINTS // max(1, 2 * len(policies))))
        recent = self._gateway.books.recent
        found = {name: past(recent[name], self._before.get(name, 0), points) for name in policies if name in recent}
        return {name: before for name, before in found.items() if before is not None}

    async def _tick(self) -> None:
        while True:
            try:
                self._pieces = self._snapshot()
            except Exception:
                # Pages say that nothing comes; the next tick tries again, and robots are not concerned.
                log(_logger, logging.ERROR, "live_page_failed", exc_info=True)
            else:
                # Those who wait now are told; who is still busy with the last tick waits for the next.
                self._ticked.set()
                self._ticked = asyncio.Event()
            await asyncio.sleep(TICK_S)

    def _snapshot(self) -> dict[str, bytes]:
        gateway, pieces, told, before = self._gateway, {}, {}, {}
        for policy, lane in sorted(gateway.lanes.items())[:POLICIES_SHOWN]:
            recent = gateway.books.recent[policy]
            after = self._told.get(policy, recent.serial)
            pieces[policy] = msgspec.json.encode(
                policy_snapshot(lane.info(), gateway.trials.levels(policy), recent, after)
            )
            told[policy], before[policy] = recent.serial, after
        self._told, self._before = told, before
        return pieces
