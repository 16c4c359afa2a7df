"""A TCP relay that tests cut, point elsewhere, or ask how many bytes went through."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from urllib.parse import urlsplit


class CutProxy:
    """Relays one port to a gateway; runs on a thread of its own."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.accepting = True
        self.swallow = False
        """Bytes are taken and go nowhere, as in a network that has stalled."""
        self.up = self.down = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = self._run(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Breaks every connection at once."""
        self._run(self._cut())

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(self.target)
        try:
            if not self.accepting:
                raise ConnectionRefusedError
            there, to = await asyncio.open_connection(parts.hostname, parts.port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, to}
        self._writers |= pair
        await asyncio.gather(self._copy(reader, to, "up"), self._copy(there, writer, "down"))
        self._writers -= pair

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                setattr(self, way, getattr(self, way) + len(data))
                if self.swallow:
                    continue
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()
