"""A real HTTP server on loopback with ranges and entity tags, which can be cut, stalled and changed mid-transfer."""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BLOCK = 16384


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class Mirror:
    """What the server serves, how it fails, and what it was asked.

    Attributes:
        files: path -> content.
        tags: path -> entity tag, where it is not the content's own.
        fault: called with each request before it is answered; returns `cut=N` bytes, `unsized` where the end of the
            connection is to end the body, a status, headers, or None.
        ranges: whether parts are served.
        pace_s: pause between blocks.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    fault: Callable[[Asked], dict[str, object] | None] = lambda asked: None
    ranges: bool = True
    pace_s: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    served_bytes: int = 0
    url: str = ""
    guard: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)

    def tag(self, path: str) -> str:
        """Entity tag of a file."""
        return self.tags.get(path) or f'"{hashlib.sha256(self.files[path]).hexdigest()[:16]}"'

    def gets(self, path: str) -> list[Asked]:
        """GET requests for a path."""
        return [asked for asked in self.asked if asked.method == "GET" and asked.path == path]

    def put(self, folder: str, files: dict[str, bytes]) -> str:
        """Adds a folder with its SHA256SUMS; returns the digest of that."""
        lines = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
        self.files |= {f"/{folder}/{name}": data for name, data in files.items()}
        self.files[f"/{folder}/SHA256SUMS"] = lines.encode()
        return hashlib.sha256(lines.encode()).hexdigest()


@contextmanager
def serving(mirror: Mirror, certificate: tuple[Path, Path] | None = None) -> Iterator[Mirror]:
    """Serves `mirror` while entered, over TLS where there is a certificate with its key."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = self.path.split("?")[0]
            asked = Asked(self.command, path, {name.lower(): value for name, value in self.headers.items()})
            with mirror.guard:
                mirror.asked.append(asked)
            fault = mirror.fault(asked) or {}
            if "status" in fault:
                self._refuse(int(str(fault["status"])), dict(fault.get("headers") or {}))  # type: ignore[call-overload]
                return
            content = mirror.files.get(path)
            if content is None:
                self._refuse(404, {})
                return
            self._send(asked, path, content, fault)

        def _send(self, asked: Asked, path: str, content: bytes, fault: dict[str, object]) -> None:
            tag, start, status = mirror.tag(path), 0, 200
            wanted = re.fullmatch(r"bytes=(\d+)-", asked.headers.get("range", ""))
            if "if-match" in asked.headers and asked.headers["if-match"] != tag:
                self._refuse(412, {})
                return
            if wanted and mirror.ranges and asked.headers.get("if-range", tag) == tag:
                start, status = int(wanted.group(1)), 206
                if start >= len(content):
                    self._refuse(416, {"content-range": f"bytes */{len(content)}"})
                    return
            self.send_response(status)
            self.send_header("etag", tag)
            if "unsized" not in fault:
                self.send_header("content-length", str(len(content) - start))
            for name, value in dict(fault.get("headers") or {}).items():  # type: ignore[call-overload]
                self.send_header(name, value)
            if status == 206:
                self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if asked.method == "HEAD":
                return
            end = start + int(str(fault["cut"])) if "cut" in fault else len(content)
            for at in range(start, min(end, len(content)), BLOCK):
                block = content[at : min(at + BLOCK, end)]
                try:
                    self.wfile.write(block)
                    self.wfile.flush()
                except OSError:
                    return
                with mirror.guard:
                    mirror.served_bytes += len(block)
                if mirror.pace_s:
                    time.sleep(mirror.pace_s)
            if "stall" in fault:
                mirror.released.wait(60)
            if end < len(content) or "unsized" in fault:
                self.close_connection = True
                self.connection.close()

        def _refuse(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            del format, values

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that was killed is no news."""

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    mirror.url = f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
