"""The address of a gateway, and why one that was tried did not answer."""

from __future__ import annotations

from urllib.parse import urlsplit

from taktline_protocol import ErrorCode, TaktlineError

_HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
_WEBSOCKET = {"http": "ws", "https": "wss"}
REASON_CHARS = 160
_NEXT_STEP = "check the URL and that the gateway runs: GET /healthz"
_TLS_STEPS = {
    "CERTIFICATE_VERIFY_FAILED": (
        "name the file with the issuer of the gateway's certificate (TAKTLINE_CA_FILE or Access's ca_file), and the"
        " gateway by a host that its certificate is for"
    ),
    "WRONG_VERSION_NUMBER": "use http:// in place of https://: what answers at this port speaks no TLS",
}
"""What OpenSSL says -> what to do about it."""
_HUNG_UP = ("broke the connection", "valid HTTP response")
_HUNG_UP_STEPS = {
    "http": "; where it speaks TLS use https://",
    "https": "; where it asks robots for a certificate show one (TAKTLINE_CLIENT_CERT or Access's client_cert)",
}


def gateway_url(url: str) -> str:
    """The URL of a gateway as http or https, without a slash at its end. Raises TaktlineError `config_invalid`."""
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in _HTTP and bool(parts.hostname) and parts.port != 0 and not parts.query
    except (ValueError, AttributeError):  # a port that is none; no text at all
        usable = False
    if not usable:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"{str(url)[:200]!r} is not the address of a gateway",
            "give its scheme, host and port, as in http://gateway:8080",
        )
    return f"{_HTTP[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}"


def websocket(url: str) -> str:
    """The WebSocket form of a gateway's URL. Raises as `gateway_url`."""
    scheme, separator, rest = gateway_url(url).partition("://")
    return _WEBSOCKET[scheme] + separator + rest


def unreachable(url: str, what: str, error: BaseException | None = None) -> TaktlineError:
    """The error of a gateway that does not answer; `error` is what the attempt ended with."""
    reason = ""
    if error is not None:
        said = " ".join(str(error).split())[:REASON_CHARS]
        reason = f": {said}" if said else f" ({type(error).__name__})"
    return TaktlineError(
        ErrorCode.GATEWAY_UNREACHABLE, f"the gateway at {url} {what}{reason}", _step(url, what + reason)
    )


def _step(url: str, said: str) -> str:
    for sign, step in _TLS_STEPS.items():
        if sign in said:
            return step
    hung_up = any(sign in said for sign in _HUNG_UP)
    return _NEXT_STEP + (_HUNG_UP_STEPS[_HTTP[urlsplit(url).scheme]] if hung_up else "")
