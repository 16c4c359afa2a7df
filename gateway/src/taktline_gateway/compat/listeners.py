"""Opens and closes the ports of the client protocols that do not share the gateway's HTTP port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from taktline_gateway.compat.openpi import openpi_listener
from taktline_gateway.compat.ports import ClientPorts
from taktline_gateway.compat.service import PolicyService


@asynccontextmanager
async def client_listeners(service: PolicyService, ports: ClientPorts) -> AsyncIterator[None]:
    """Keeps the ports open while the context lasts. Raises OSError where an address cannot be had."""
    async with AsyncExitStack() as stack:
        for listen in ports.openpi:
            listener = openpi_listener(listen, service)
            await listener.start()
            stack.push_async_callback(listener.close)
        yield
