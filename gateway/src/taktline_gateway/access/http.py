"""The gate in front of every HTTP and WebSocket path: nothing behind it is reached without the right that it needs."""

from __future__ import annotations

import base64
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.codecs import encode, error_body

from taktline_gateway.access.access_file import Protocol
from taktline_gateway.access.control import AccessControl, Credential
from taktline_gateway.access.rights import OPEN, Principal, Right
from taktline_gateway.http_io import exchange_of, send_error

_PRINCIPAL = "taktline.principal"
_CREDENTIAL = "taktline.credential"
PROBES = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
_CHALLENGE = (b"www-authenticate", b'Bearer realm="taktline"')
_BROWSER_CHALLENGE = (b"www-authenticate", b'Basic realm="taktline: any name, the API key as password"')


class Need(NamedTuple):
    """What a path needs: a right, and on which policy; no right means any known caller."""

    right: Right | None
    policy: str | None = None
    counted: bool = True
    """Whether the gate takes it from the caller's rate; what carries observations counts them itself."""


def need_of(path: str) -> Need:
    """The right that a path needs. What is not listed here needs `observe`, so that a new path is closed at first."""
    if path in ("/v1/policies", "/openapi.json", "/v2"):
        return Need(None)
    parts = path.split("/")[1:]
    if parts[:2] == ["v1", "policies"] and len(parts) >= 3:
        rest = parts[3:]
        if rest in (["act"], ["stream"]):
            return Need("act", parts[2], counted=False)
        if rest == ["admission"]:
            return Need("act", parts[2])
        return Need("read", parts[2]) if not rest else Need("observe", parts[2])
    if parts[:2] == ["v2", "models"] and len(parts) >= 3:
        rest = parts[5:] if parts[3:4] == ["versions"] else parts[3:]
        if rest == ["infer"]:
            return Need("act", parts[2], counted=False)
        return Need("read", parts[2])
    return Need("observe")


def principal_of(scope: Scope) -> Principal:
    """Who asks; set by the gate before anything behind it runs."""
    principal: Principal = scope.get(_PRINCIPAL, OPEN)
    return principal


def credential_of(scope: Scope) -> Credential:
    """What the caller presented, and from where."""
    credential: Credential | None = scope.get(_CREDENTIAL)
    if credential is None:
        credential = scope[_CREDENTIAL] = _credential(scope)
    return credential


class AccessGate:
    """ASGI middleware: authenticates, authorises by path, refuses with the error in its usual form."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request or connection."""
        access = self._access
        if scope["type"] == "lifespan" or access.open:
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if scope["type"] == "http" and (path in PROBES or (path == "/metrics" and access.public_metrics)):
            await self._app(scope, receive, send)
            return
        credential = credential_of(scope)
        exchange = exchange_of(scope)
        try:
            _check_origin(scope)
            principal = await access.authenticate(credential)
            need = need_of(path)
            if need.right is not None:
                access.authorise(principal, credential, need.right, need.policy, request_id=exchange.request_id)
            if need.counted:
                size = exchange.content_length or 0
                access.admit(principal, credential, need.right, need.policy, size, request_id=exchange.request_id)
        except TaktlineError as error:
            await _refuse(scope, receive, send, error)
            return
        scope[_PRINCIPAL] = principal
        await self._app(scope, receive, send)


def _credential(scope: Scope) -> Credential:
    client = scope.get("client")
    peer = f"{client[0]}:{client[1]}" if client else ""
    protocol: Protocol = "stream" if scope["type"] == "websocket" else "rest"
    if scope["path"].startswith("/v2"):
        protocol = "kserve"
    secret: str | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            secret = secret_in(value.decode("latin-1"))
    return Credential(protocol, peer, secret)


def secret_in(authorization: str) -> str | None:
    """The key or token in an Authorization header: Bearer, openpi's Api-Key, or the password of Basic (browsers)."""
    scheme, _, rest = authorization.partition(" ")
    match scheme.lower():
        case "bearer" | "api-key":
            return rest.strip() or None
        case "basic":
            try:
                _, _, password = base64.b64decode(rest, validate=True).decode().partition(":")
            except ValueError:  # not base64, or not UTF-8
                return ""
            return password
    return None


def _check_origin(scope: Scope) -> None:
    """A page of another site must not use the credential that a browser remembers for this one."""
    headers = {name: value for name, value in scope["headers"] if name in (b"origin", b"host", b"authorization")}
    basic = headers.get(b"authorization", b"").lower().startswith(b"basic ")
    origin = headers.get(b"origin")
    if origin is None or not (basic or scope["type"] == "websocket"):
        return
    try:
        own = urlsplit(origin.decode("latin-1")).netloc.lower() == headers.get(b"host", b"").decode("latin-1").lower()
    except ValueError:  # no address
        own = False
    if not own:
        raise TaktlineError(
            ErrorCode.FORBIDDEN, "the request comes from a page of another site", "open the gateway's own page"
        )


async def _refuse(scope: Scope, receive: Receive, send: Send, error: TaktlineError) -> None:
    exchange = exchange_of(scope)
    if scope["type"] == "http":
        wants_page = exchange.accept.startswith("text/html")
        challenge = [_BROWSER_CHALLENGE if wants_page else _CHALLENGE] if error.http_status == 401 else []
        # The body was not read: what is left of it must not be taken for the next request.
        await send_error(
            send, exchange, error, unread=receive if scope["method"] == "POST" else None, headers=challenge
        )
        return
    await receive()  # websocket.connect
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.code.value})
        return
    media = exchange.answer_media()
    headers = [(b"content-type", media.value.encode()), (b"x-request-id", exchange.request_id.encode())]
    if error.http_status == 401:
        headers.append(_CHALLENGE)
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    body: msgspec.Struct = error_body(error, exchange.request_id)
    await send({"type": "websocket.http.response.body", "body": encode(body, media)})
