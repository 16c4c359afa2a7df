"""POST /v1/policies/{policy}/admission: a robot asks, before it begins, whether it can be served in time."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from taktline_protocol import ErrorCode
from taktline_protocol.codecs import decode_admission_question, encode

from taktline_gateway.access.http import principal_of
from taktline_gateway.http_io import Disconnected, exchange_of, read_body
from taktline_gateway.service import Gateway

PATH = "/v1/policies/{policy}/admission"
CODES = (
    ErrorCode.INVALID_BODY,
    ErrorCode.UNSUPPORTED_MEDIA_TYPE,
    ErrorCode.BODY_TOO_LARGE,
    ErrorCode.UNKNOWN_POLICY,
    ErrorCode.WORKER_UNAVAILABLE,
    ErrorCode.DRAINING,
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.FORBIDDEN,
    ErrorCode.RATE_LIMITED,
)
"""What the question can end with."""
EXAMPLE: dict[str, Any] = {"robot_id": "example-arm", "rate_hz": 2.0, "budget_ms": 500.0}


def admission_route(gateway: Gateway) -> Route:
    """The route."""

    async def admission(request: Request) -> Response:
        exchange = exchange_of(request.scope)
        media = exchange.body_media()
        settings = gateway.settings
        try:
            body = await read_body(exchange, request.receive, settings.limits, settings.body_timeout_s)
        except Disconnected:
            return Response(status_code=499)  # nobody reads it
        gateway.check_open()
        principal = principal_of(request.scope)
        lane = gateway.lane(request.path_params["policy"], principal)
        answer = lane.admission(decode_admission_question(body, media, settings.limits), principal.tenant)
        accepted = exchange.answer_media()
        headers = {"x-request-id": exchange.request_id}
        return Response(encode(answer, accepted), media_type=accepted.value, headers=headers)

    return Route(PATH, endpoint=admission, methods=["POST"])
