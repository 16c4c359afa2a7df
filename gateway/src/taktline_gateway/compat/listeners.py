"""Opens and closes the ports of the client protocols that do not share the gateway's HTTP port."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.compat.lerobot import LerobotListener
from taktline_gateway.compat.openpi import openpi_listener
from taktline_gateway.compat.ports import ClientPorts, Listen
from taktline_gateway.compat.service import PolicyService
from taktline_gateway.compat.vla_eval import vla_eval_listener
from taktline_gateway.logs import log
from taktline_gateway.tls import ServerTls

_logger = logging.getLogger(__name__)


class _Listener(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def client_listeners(
    service: PolicyService, ports: ClientPorts, tls: ServerTls | None = None
) -> AsyncIterator[None]:
    """Keeps the ports open while the context lasts. Raises TaktlineError `config_invalid` where one cannot be had."""
    async with AsyncExitStack() as stack:
        for protocol, listen, listener in _listeners(service, ports, tls):
            stack.push_async_callback(listener.close)
            try:
                await listener.start()
            except (OSError, RuntimeError) as error:
                # gRPC raises RuntimeError, the others OSError.
                raise TaktlineError(
                    ErrorCode.CONFIG_INVALID,
                    f"cannot listen for {protocol} on {listen.host}:{listen.port}: {str(error)[:200]}",
                    f"give --{protocol}-listen an address that nothing else uses",
                ) from error
        yield


def _listeners(
    service: PolicyService, ports: ClientPorts, tls: ServerTls | None
) -> Iterator[tuple[str, Listen, _Listener]]:
    for listen in ports.openpi:
        yield "openpi", listen, openpi_listener(listen, service, tls)
    for listen in ports.vla_eval:
        yield "vla-eval", listen, vla_eval_listener(listen, service, tls)
    for listen in ports.lerobot:
        yield "lerobot", listen, LerobotListener(listen, service, tls)
    for listen in ports.groot:
        # Here, so that a gateway without GR00T clients needs no ZeroMQ.
        from taktline_gateway.compat.groot import GrootListener

        if tls is not None:
            where = f"{listen.host}:{listen.port}"
            log(_logger, logging.WARNING, "plain_text", protocol="groot", address=where, reason="ZeroMQ has no TLS")
        yield "groot", listen, GrootListener(listen, service, ports.groot_api_token)
