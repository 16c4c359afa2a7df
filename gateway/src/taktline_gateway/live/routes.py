"""The live page's routes: its files, with nothing from elsewhere, and its feed."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taktline_gateway.live.feed import LiveFeed
from taktline_gateway.service import Gateway

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",
    # Everything the page needs is beside it; what a policy or worker is called can never become script.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def live_routes(gateway: Gateway) -> list[Route]:
    """`/`, the page's files under `/live/`, and `/live/feed`."""
    files = {
        file.name: file.read_bytes()
        for file in resources.files("taktline_gateway.live").joinpath("page").iterdir()
        if file.name[file.name.rfind(".") :] in _TYPES
    }

    def route(path: str, name: str) -> Route:
        async def serve(_: Request) -> Response:
            media = _TYPES[name[name.rfind(".") :]]
            return Response(files[name], media_type=media, headers=_HEADERS)

        return Route(path, endpoint=serve, methods=["GET"])

    feed = LiveFeed(gateway)

    async def events(request: Request) -> Response:
        return await feed(request)

    page = [route("/", "index.html"), *(route(f"/live/{name}", name) for name in files if name != "index.html")]
    return [*page, Route("/live/feed", endpoint=events, methods=["GET"])]
