"""GET /v1/policies/{policy}/timeline: the last requests of a policy as a Chrome trace."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.access.http import principal_of
from taktline_gateway.http_io import exchange_of
from taktline_gateway.service import Gateway
from taktline_gateway.tracing.timeline import KEPT, chrome_trace

PATH = "/v1/policies/{policy}/timeline"


def timeline_route(gateway: Gateway) -> Route:
    """The route; `?last=N` asks for fewer requests than the `KEPT` that are remembered."""

    async def timeline(request: Request) -> Response:
        policy = request.path_params["policy"]
        gateway.lane(policy, principal_of(request.scope))
        last = _last(request.query_params.get("last", ""))
        requests = gateway.books.timelines[policy].last(last)
        # Converting hundreds of requests takes milliseconds, which robots would wait: it is not done on the loop.
        body = await asyncio.to_thread(lambda: msgspec.json.encode(chrome_trace(policy, requests)))
        headers = {
            "content-disposition": f'inline; filename="{policy}-timeline.json"',
            "x-request-id": exchange_of(request.scope).request_id,
            "cache-control": "no-store",
        }
        return Response(body, media_type="application/json", headers=headers)

    return Route(PATH, endpoint=timeline, methods=["GET"])


def _last(text: str) -> int:
    if not text:
        return KEPT
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= KEPT:
        raise TaktlineError(
            ErrorCode.INVALID_BODY, f"last={text[:20]!r} is no number of requests", f"ask for 1 to {KEPT}"
        )
    return int(text)
