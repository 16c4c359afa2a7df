"""Endpoints: /healthz says whether the operator hears the cluster, /readyz whether it has begun; and /metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_operator.telemetry import CONTENT_TYPE

Check = Callable[[], str]  # empty when all is well, else what is wrong


async def serve(listen: str, alive: Check, ready: Check, exposition: Callable[[], bytes]) -> web.AppRunner:
    """Start answering on `host:port`; call `cleanup` of the result to stop.

    Raises:
        TaktlineError: CONFIG_INVALID; the address is not host:port or cannot be bound.
    """
    host, _, port = listen.rpartition(":")
    application = web.Application()

    def answering(check: Check) -> Callable[[web.Request], web.Response]:
        def answer(_: web.Request) -> web.Response:
            problem = check()
            return web.Response(text=(problem or "ok") + "\n", status=503 if problem else 200)

        return answer

    for path, check in (("/healthz", alive), ("/readyz", ready)):
        handler = answering(check)

        async def respond(
            request: web.Request, handler: Callable[[web.Request], web.Response] = handler
        ) -> web.Response:
            return handler(request)

        application.router.add_get(path, respond)

    async def measured(_: web.Request) -> web.Response:
        return web.Response(body=exposition(), headers={"Content-Type": CONTENT_TYPE})

    application.router.add_get("/metrics", measured)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    except (OSError, ValueError) as error:
        await runner.cleanup()
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"cannot listen on {listen!r}: {error}",
            "give a free HOST:PORT to --health-listen",
        ) from error
    return runner
