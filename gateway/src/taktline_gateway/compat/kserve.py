"""KServe's Open Inference Protocol v2 over REST: health, metadata, infer; each policy is a model."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from taktline_protocol import ActionChunk, ErrorCode, PolicyInfo, TaktlineError

from taktline_gateway.access.http import credential_of
from taktline_gateway.compat.kserve_tensors import decode_request, wants_binary
from taktline_gateway.compat.observations import read_observation
from taktline_gateway.compat.service import Caller, Conversation, PolicyService, degraded_of
from taktline_gateway.http_io import Disconnected, Exchange, exchange_of, read_body, send_bytes
from taktline_gateway.logs import log
from taktline_gateway.refusals import internal_error

HEADER_LENGTH = "inference-header-content-length"
_JSON = b"application/json"
_BINARY = b"application/octet-stream"
_logger = logging.getLogger(__name__)

Answer = tuple[int, bytes, list[tuple[bytes, bytes]]]
"""Status, body and headers."""


def kserve_routes(service: PolicyService, body_timeout_s: float) -> list[Route]:
    """Routes of the protocol, to be mounted at the root."""
    rest = KserveRest(service, body_timeout_s)
    routes = [
        Route("/v2", _Endpoint(rest.server), methods=["GET"]),
        Route("/v2/health/live", _Endpoint(rest.live), methods=["GET"]),
        Route("/v2/health/ready", _Endpoint(rest.ready), methods=["GET"]),
    ]
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes += [
            Route(model, _Endpoint(rest.model), methods=["GET"]),
            Route(f"{model}/ready", _Endpoint(rest.model_ready), methods=["GET"]),
            Route(f"{model}/infer", _Endpoint(rest.infer), methods=["POST"]),
        ]
    return routes


class _Endpoint:
    """An ASGI endpoint that answers errors in the protocol's form."""

    def __init__(self, handle: Callable[[Scope, Receive, Exchange], Awaitable[Answer]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        exchange = exchange_of(scope)
        try:
            status, body, headers = await self._handle(scope, receive, exchange)
        except Disconnected:
            return
        except TaktlineError as error:
            status, body, headers = _error(error)
        except Exception:
            log(_logger, logging.ERROR, "internal", exc_info=True, request_id=exchange.request_id, protocol="kserve")
            status, body, headers = _error(internal_error())
        content_type = next((value for name, value in headers if name == b"content-type"), _JSON)
        rest = [(name, value) for name, value in headers if name != b"content-type"]
        await send_bytes(send, exchange, body, content_type, status=status, headers=rest)


class KserveRest:
    """The protocol's endpoints over a `PolicyService`."""

    def __init__(self, service: PolicyService, body_timeout_s: float) -> None:
        self._service = service
        self._body_timeout_s = body_timeout_s

    async def server(self, scope: Scope, receive: Receive, exchange: Exchange) -> Answer:
        """GET /v2."""
        about = {"name": "taktline", "version": version("taktline-gateway"), "extensions": ["binary_tensor_data"]}
        return _json(about)

    async def live(self, scope: Scope, receive: Receive, exchange: Exchange) -> Answer:
        """GET /v2/health/live."""
        return _json({"live": True})

    async def ready(self, scope: Scope, receive: Receive, exchange: Exchange) -> Answer:
        """GET /v2/health/ready: 503 once this gateway drains."""
        return _json({"ready": not self._service.draining}, 503 if self._service.draining else 200)

    async def model(self, scope: Scope, receive: Receive, exchange: Exchange) -> Answer:
        """GET /v2/models/{model}."""
        return _json(_metadata(self._info(scope)))

    async def model_ready(self, scope: Scope, receive: Receive, exchange: Exchange) -> Answer:
        """GET /v2/models/{model}/ready: 503 while no worker is ready."""
        info = self._info(scope)
        return _json({"name": info.policy, "ready": info.ready}, 200 if info.ready else 503)

    async def infer(self, scope: Scope, receive: Receive, exchange: Exchange) -> Answer:
        """POST /v2/models/{model}/infer."""
        limits = self._service.limits
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        body = await read_body(exchange, receive, limits, self._body_timeout_s)
        if headers.get(b"content-encoding", "identity") != "identity":
            raise TaktlineError(
                ErrorCode.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not read", "send the body as it is"
            )
        info = self._info(scope)
        request, tensors = decode_request(body, _header_length(headers), limits)
        mapping = self._service.mapping(info.policy, "kserve")
        read = read_observation(tensors, mapping, info, "kserve")
        robot = request.parameters.get("robot_id")
        budget_ms = request.parameters.get("budget_ms")
        seed = request.parameters.get("seed")
        if budget_ms is not None and type(budget_ms) not in (int, float):
            raise TaktlineError(ErrorCode.BUDGET_INVALID, "parameters.budget_ms is no number", "send milliseconds")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise TaktlineError(ErrorCode.INVALID_BODY, "parameters.seed is no seed", "send 0 to 2^63 - 1")
        credential = credential_of(scope)
        named = robot if isinstance(robot, str) else None
        caller = Caller.connecting("kserve", credential.peer, named, credential.secret).without_session()
        conversation = Conversation(self._service, caller, info.policy)
        acting = conversation.act(read, budget_ms=None if budget_ms is None else float(budget_ms), seed=seed)
        chunk = await _unless_disconnected(receive, acting)
        return _answer(request.id, chunk, binary=wants_binary(request, "actions"))

    def _info(self, scope: Scope) -> PolicyInfo:
        info = self._service.info(scope["path_params"]["model"])
        asked = scope["path_params"].get("version")
        if asked is not None and asked != info.revision:
            raise TaktlineError(
                ErrorCode.UNKNOWN_POLICY,
                f"policy {info.policy!r} is served in revision {info.revision!r}, not {asked[:128]!r}",
                "leave the version out, or ask for the revision served",
            )
        return info


def _metadata(info: PolicyInfo) -> dict[str, Any]:
    images = [{"name": camera, "datatype": "UINT8", "shape": [-1, -1, 3]} for camera in info.cameras]
    optional = [
        {"name": camera, "datatype": "UINT8", "shape": [-1, -1, 3], "parameters": {"optional": True}}
        for camera in info.optional_cameras
    ]
    return {
        "name": info.policy,
        "versions": [info.revision],
        "platform": f"taktline_{info.family}",
        "inputs": [
            *images,
            *optional,
            {"name": "state", "datatype": "FP32", "shape": [info.state_dim or -1]},
            {"name": "instruction", "datatype": "BYTES", "shape": [1]},
        ],
        "outputs": [
            {"name": "actions", "datatype": "FP32", "shape": [info.horizon or -1, info.action_dim or -1]},
        ],
    }


def _answer(request_id: str, chunk: ActionChunk, *, binary: bool) -> Answer:
    actions = chunk.actions
    output: dict[str, Any] = {"name": "actions", "shape": actions.shape, "datatype": "FP32"}
    answer: dict[str, Any] = {
        "model_name": chunk.policy,
        "model_version": chunk.revision,
        "id": request_id or chunk.request_id,
        "parameters": {
            "request_id": chunk.request_id,
            "dt_s": chunk.dt_s,
            "margin_ms": chunk.margin_ms,
            "batch_size": chunk.batch_size,
            **{f"{name}_ms": getattr(chunk.timings, f"{name}_ms") for name in ("transfer", "queue", "inference")},
            **{f"degraded_{name}": value for name, value in degraded_of(chunk).items()},
        },
        "outputs": [output],
    }
    if not binary:
        output["data"] = actions.to_numpy().ravel().tolist()
        return _json(answer)
    output["parameters"] = {"binary_data_size": len(actions.data)}
    head = msgspec.json.encode(answer)
    headers = [(b"content-type", _BINARY), (HEADER_LENGTH.encode(), b"%d" % len(head))]
    return 200, head + actions.data, headers


def _header_length(headers: dict[bytes, str]) -> int | None:
    text = headers.get(HEADER_LENGTH.encode())
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise TaktlineError(
            ErrorCode.INVALID_BODY, f"{HEADER_LENGTH} is {text[:32]!r}", "send the length of the JSON part in bytes"
        )
    return int(text)


def _json(answer: dict[str, Any], status: int = 200) -> Answer:
    return status, msgspec.json.encode(answer), []


def _error(error: TaktlineError) -> Answer:
    body: dict[str, object] = {"error": str(error), "code": error.code.value, "next_step": error.next_step}
    if error.safe_action is not None:
        body |= {"safe_action": error.safe_action, "buffer_ms": error.buffer_ms}
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_ms is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_ms / 1e3)))
    return error.http_status, msgspec.json.encode(body), headers


async def _unless_disconnected(receive: Receive, acting: Awaitable[ActionChunk]) -> ActionChunk:
    """The answer, given up when the client leaves (raises Disconnected)."""
    working = asyncio.ensure_future(acting)
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
