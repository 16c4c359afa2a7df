"""The node's own HTTPS endpoint, which the API server asks for `kubectl logs`; everything else is a clear refusal."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from taktline_local.container import ContainerRunner
from taktline_local.pod import PodRunner

logger = logging.getLogger(__name__)

FOLLOW_POLL_S = 0.2


@dataclass(frozen=True)
class EndpointTls:
    """Certificate and key to serve with, and the authority that signed the API server's client certificate."""

    certificate: Path
    key: Path
    client_authority: Path

    def context(self) -> ssl.SSLContext:
        """Server-side TLS that demands a client certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.client_authority)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


class NodeEndpoint:
    """Serves container logs over HTTP/1.1, one request a connection."""

    def __init__(
        self,
        listener: socket.socket,
        find_pod: Callable[[str, str], PodRunner | None],
        tls: EndpointTls | None,
    ) -> None:
        """`listener` is bound already; without `tls` nothing is served."""
        self._listener = listener
        self._find_pod = find_pod
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to listen."""
        if self._tls is not None:
            self._server = await asyncio.start_server(self._serve, sock=self._listener, ssl=self._tls.context())

    async def close(self) -> None:
        """Stop listening; streams that follow a log end with their connection."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ", 2)
            await self._answer(method, target, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ValueError, OSError) as error:
            logger.debug("node endpoint: %s", error)
        finally:
            writer.close()

    async def _answer(self, method: str, target: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(target)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        options = {key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        if method != "GET" or parts[0] != "containerLogs" or len(parts) != 4:
            await send_text(writer, 501, f"the process node serves logs only, not {method} {url.path}\n")
            return
        pod = self._find_pod(parts[1], parts[2])
        containers = [*pod.init, *pod.main] if pod else []
        container = next((item for item in containers if item.name == parts[3]), None)
        if container is None:
            await send_text(writer, 404, f"container {parts[3]} of pod {parts[1]}/{parts[2]} does not run here\n")
            return
        run = container.run_number - (1 if options.get("previous") == "true" else 0)
        if not container.log_of(run).exists():
            await send_text(writer, 404, f"container {container.name} has no such log\n")
            return
        await send_head(writer, 200)
        async for chunk in read_log(container, run, options):
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def send_head(writer: asyncio.StreamWriter, status: int) -> None:
    """Status line and headers of a chunked text answer."""
    writer.write(
        f"HTTP/1.1 {status} {'OK' if status == 200 else 'Refused'}\r\nContent-Type: text/plain\r\n"
        "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    )
    await writer.drain()


async def send_text(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    """A whole short answer."""
    await send_head(writer, status)
    body = text.encode()
    writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
    await writer.drain()


async def read_log(container: ContainerRunner, run: int, options: dict[str, str]) -> AsyncIterator[bytes]:
    """The log of one run, from `tailLines` before its end, and on as it grows where `follow` asks for it."""
    with container.log_of(run).open("rb") as handle:
        content = handle.read()
        if "tailLines" in options:
            count = int(options["tailLines"])
            content = b"".join(content.splitlines(keepends=True)[-count:]) if count else b""
        if "limitBytes" in options:
            content = content[: int(options["limitBytes"])]
        if content:
            yield content
        while options.get("follow") == "true" and container.run_number == run:
            over = container.exit_code is not None
            if content := handle.read():
                yield content
            elif over:
                return
            else:
                await asyncio.sleep(FOLLOW_POLL_S)
