"""Opens and closes the ports of the client protocols that do not share the gateway's HTTP port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from taktline_gateway.compat.lerobot import LerobotListener
from taktline_gateway.compat.openpi import openpi_listener
from taktline_gateway.compat.ports import ClientPorts
from taktline_gateway.compat.service import PolicyService
from taktline_gateway.compat.vla_eval import vla_eval_listener


@asynccontextmanager
async def client_listeners(service: PolicyService, ports: ClientPorts) -> AsyncIterator[None]:
    """Keeps the ports open while the context lasts. Raises OSError where an address cannot be had."""
    async with AsyncExitStack() as stack:
        listeners = [openpi_listener(listen, service) for listen in ports.openpi]
        listeners += [vla_eval_listener(listen, service) for listen in ports.vla_eval]
        for listener in listeners:
            await listener.start()
            stack.push_async_callback(listener.close)
        for listen in ports.lerobot:
            lerobot = LerobotListener(listen, service)
            await lerobot.start()
            stack.push_async_callback(lerobot.close)
        for listen in ports.groot:
            # Here, so that a gateway without GR00T clients needs no ZeroMQ.
            from taktline_gateway.compat.groot import GrootListener

            groot = GrootListener(listen, service, ports.groot_api_token)
            stack.push_async_callback(groot.close)
            await groot.start()
        yield
