"""How far a delivery is: counted by the threads that fetch, told to a person, to other processes, and over HTTP."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.delivery import DeliveryProgress

logger = logging.getLogger(__name__)

TELL_S = 5.0
SHARE_S = 0.3
State = Literal["preparing", "waiting", "downloading", "verifying", "published"]


class Progress:
    """Counters of one delivery. Every method may be called from any thread."""

    def __init__(self, say: Callable[[DeliveryProgress], None] = lambda _: None) -> None:
        """`say` hears of it every few seconds, and at each change of state."""
        self._say = say
        self._guard = threading.Lock()
        self._now = DeliveryProgress()
        self._begun = time.monotonic()
        self._received = 0
        self._said = self._shared = 0.0
        self._share: Path | None = None
        self._sharing = threading.Lock()
        self._done = threading.Event()

    @property
    def received_bytes(self) -> int:
        """Bytes that came over the network."""
        return self._received

    def now(self) -> DeliveryProgress:
        """This instant."""
        with self._guard:
            return self._now

    def share_in(self, path: Path) -> None:
        """From now on, also tells other processes of the node in a file."""
        self._share = path
        self._told(at_once=True)
        # A transfer that stalls tells nothing itself, and what it told last may be old.
        threading.Thread(target=self._keep_telling, daemon=True, name="telling").start()

    def _keep_telling(self) -> None:
        while not self._done.wait(SHARE_S):
            self._told()

    def share_no_more(self) -> None:
        """Takes the file away."""
        self._done.set()
        with self._sharing:
            if self._share is not None:
                self._share.unlink(missing_ok=True)
            self._share = None

    def show(self, found: DeliveryProgress) -> None:
        """Takes over what another process tells, while this one waits for it."""
        with self._guard:
            self._now = msgspec.structs.replace(found, state="waiting")
        self._told()

    def state(self, state: State) -> None:
        """Enters a state."""
        with self._guard:
            changed = self._now.state != state
            self._now = msgspec.structs.replace(self._now, state=state)
        self._told(at_once=changed)

    def begin(self, *, files: int, total_bytes: int) -> None:
        """Says how much there is."""
        with self._guard:
            self._begun = time.monotonic()
            self._now = DeliveryProgress(state="downloading", total_files=files, total_bytes=total_bytes)
        self._told(at_once=True)

    def had(self, count: int) -> None:
        """Counts bytes that were there already; fewer than none where a file begins anew."""
        with self._guard:
            self._now = msgspec.structs.replace(self._now, done_bytes=max(0, self._now.done_bytes + count))

    def received(self, count: int) -> None:
        """Counts bytes that came over the network."""
        with self._guard:
            self._received += count
            took_s = max(1e-3, time.monotonic() - self._begun)
            self._now = msgspec.structs.replace(
                self._now, done_bytes=self._now.done_bytes + count, bytes_per_s=self._received / took_s, trouble=""
            )
        self._told()

    def file_done(self) -> None:
        """Counts a whole file."""
        with self._guard:
            self._now = msgspec.structs.replace(self._now, done_files=self._now.done_files + 1)

    def trouble(self, message: str) -> None:
        """Notes a failure that is being retried."""
        with self._guard:
            self._now = msgspec.structs.replace(self._now, trouble=message)
        self._told(at_once=True)

    def _told(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._shared >= SHARE_S:
            self._shared = now
            with self._sharing:
                if self._share is not None:
                    _write_whole(self._share, msgspec.json.encode(self.now()))
        if at_once or now - self._said >= TELL_S:
            self._said = now
            self._say(self.now())


def _write_whole(path: Path, content: bytes) -> None:
    staged = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        staged.write_bytes(content)
        staged.rename(path)
    except OSError as error:  # a full disk: the fetch itself says so
        staged.unlink(missing_ok=True)
        logger.debug("progress is not shared", extra={"cause": str(error)})


def read_shared(path: Path) -> DeliveryProgress | None:
    """What the process that fetches tells in its file; None where there is nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeliveryProgress)
    except (OSError, msgspec.MsgspecError):
        return None


def serve(progress: Progress, host: str, port: int) -> int:
    """Answers `GET /progress` in a thread that goes with the process; returns the port.

    Raises:
        TaktlineError: CONFIG_INVALID where the address cannot be had.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/progress"
            body = msgspec.json.encode(progress.now()) if known else b""
            self.send_response(200 if known else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            del format, values

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"cannot listen on {host}:{port}: {error.strerror}", "choose a free HOST:PORT"
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True, name="progress").start()
    return int(server.server_address[1])
