"""The FastAPI application: routes, the error of every kind in one typed form, and the document that describes them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route, WebSocketRoute
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import encode, error_body
from taktline_protocol.messages import PolicyInfo, PolicyList

from taktline_gateway.access.http import AccessGate, principal_of
from taktline_gateway.act import ActEndpoint
from taktline_gateway.admission_endpoint import admission_route
from taktline_gateway.compat.gateway_service import GatewayService
from taktline_gateway.compat.kserve import kserve_routes
from taktline_gateway.compat.listeners import client_listeners
from taktline_gateway.http_io import exchange_of
from taktline_gateway.live.routes import live_routes
from taktline_gateway.logs import log
from taktline_gateway.openapi import document
from taktline_gateway.refusals import internal_error
from taktline_gateway.service import Gateway
from taktline_gateway.stream.endpoint import STREAM_PATH, Streams
from taktline_gateway.tracing.endpoint import timeline_route

ACT_PATH = "/v1/policies/{policy}/act"
PROBED = ["GET", "HEAD"]
"""Load balancers and `curl -I` ask by HEAD."""
_logger = logging.getLogger(__name__)


def build_app(gateway: Gateway, streams: Streams) -> FastAPI:
    """The ASGI application of one gateway and its streams; its lifespan starts and closes the gateway."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        listeners = client_listeners(GatewayService(gateway), gateway.settings.client_ports, gateway.tls)
        async with listeners, streams.running():
            yield
        await gateway.close()

    # The interactive pages load scripts from elsewhere, which a factory network does not reach.
    app = FastAPI(
        title="Taktline gateway",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.router.routes.append(Route(ACT_PATH, endpoint=ActEndpoint(gateway), methods=["POST"]))
    app.router.routes.append(WebSocketRoute(STREAM_PATH, endpoint=streams))
    app.router.routes.extend(kserve_routes(GatewayService(gateway), gateway.settings.body_timeout_s))
    app.router.routes.extend([admission_route(gateway), timeline_route(gateway), *live_routes(gateway)])

    def visible(request: Request) -> list[PolicyInfo]:
        may = principal_of(request.scope).may
        return [lane.info() for policy, lane in sorted(gateway.lanes.items()) if may("read", policy)]

    @app.get("/v1/policies")
    async def policies(request: Request) -> Response:
        return _reply(request, PolicyList(policies=tuple(visible(request))))

    @app.get("/v1/policies/{policy}")
    async def policy(request: Request, policy: str) -> Response:
        return _reply(request, gateway.lane(policy, principal_of(request.scope)).info())

    @app.api_route("/healthz", methods=PROBED)
    async def healthz(request: Request) -> Response:
        return _plain(request, "ok\n")

    @app.api_route("/readyz", methods=PROBED)
    async def readyz(request: Request) -> Response:
        gateway.check_open()
        return _plain(request, "ready\n")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        text, media = gateway.telemetry.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": media, "vary": "accept"})

    @app.get("/measurements")
    async def measurements(request: Request) -> Response:
        return Response(msgspec.json.encode(gateway.trials.measured()), media_type="application/json")

    @app.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        return Response(msgspec.json.encode(document(visible(request))), media_type="application/json")

    app.add_middleware(AccessGate, access=gateway.access)
    app.add_exception_handler(TaktlineError, _typed)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _internal)
    return app


def _reply(
    request: Request, message: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    exchange = exchange_of(request.scope)
    media = exchange.answer_media()
    return Response(
        encode(message, media),
        status_code=status,
        media_type=media.value,
        headers={"x-request-id": exchange.request_id, **(headers or {})},
    )


def _plain(request: Request, text: str) -> Response:
    return Response(
        text, media_type="text/plain; charset=utf-8", headers={"x-request-id": exchange_of(request.scope).request_id}
    )


async def _typed(request: Request, error: TaktlineError) -> Response:
    return _reply(request, error_body(error, exchange_of(request.scope).request_id), error.http_status)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Paths and methods that do not exist."""
    if error.status_code == 405:
        typed = TaktlineError(
            ErrorCode.METHOD_NOT_ALLOWED,
            f"{request.method} is not for {request.url.path[:200]}",
            "see /openapi.json for the methods of each path",
        )
    elif error.status_code == 404:
        typed = TaktlineError(
            ErrorCode.NOT_FOUND, f"there is nothing at {request.url.path[:200]}", "see /openapi.json for the paths"
        )
    else:
        typed = TaktlineError(ErrorCode.INVALID_BODY, str(error.detail), "see /openapi.json")
    return _reply(
        request, error_body(typed, exchange_of(request.scope).request_id), error.status_code, dict(error.headers or {})
    )


async def _internal(request: Request, error: Exception) -> Response:
    exchange = exchange_of(request.scope)
    log(_logger, logging.ERROR, "internal", exc_info=True, request_id=exchange.request_id, path=request.url.path)
    return _reply(request, error_body(internal_error(), exchange.request_id), 500)
