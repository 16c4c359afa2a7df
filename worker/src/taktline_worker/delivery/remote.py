"""Requests to where checkpoints come from: redirects, proxies, certificates, retries, a deadline over all of them."""

from __future__ import annotations

import logging
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import httpx
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.delivery.names import unsafe

RETRIES = f"{__name__}.retries"
"""The logger of what is tried again."""
_retries = logging.getLogger(RETRIES)

MAX_REDIRECTS = 8
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_ResultT = TypeVar("_ResultT")


class Origin(Protocol):
    """A place that files come from.

    Attributes:
        precondition: the header that makes a later part come from the same version of a file.
    """

    precondition: Literal["If-Range", "If-Match"]

    def url(self, name: str) -> str:
        """Address of a file; of the place itself for an empty name."""

    def headers(self, method: str, url: httpx.URL) -> Mapping[str, str]:
        """Headers that let us in; never sent to another host."""


class PassingError(Exception):
    """A failure that may be over when we ask again.

    Attributes:
        after_s: how long the server asks us to wait; 0 where it does not say.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True)
class Patience:
    """How long we wait for what.

    Attributes:
        connect_s: for a connection.
        stall_s: for the next byte.
        base_s, cap_s: the pause before a retry is drawn evenly from 0 to a bound that doubles from one to the other.
    """

    connect_s: float = 10.0
    stall_s: float = 30.0
    base_s: float = 0.5
    cap_s: float = 30.0


@dataclass(frozen=True)
class Head:
    """What a server says of a file before it is fetched: its size, and what identifies this version of it."""

    size: int | None
    validator: str


class Remote:
    """A client for one delivery; threads may share it."""

    def __init__(
        self,
        deadline: float,
        *,
        patience: Patience | None = None,
        authority: Path | None = None,
        trouble: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare to ask.

        Args:
            deadline: monotonic time, in seconds, after which nothing is tried any more.
            authority: PEM file of a certificate authority that is trusted besides the usual ones.
            trouble: hears of each failure that is retried.

        Raises:
            TaktlineError: CONFIG_INVALID; the authority's file cannot be read.
        """
        self.deadline = deadline
        self.stop = threading.Event()
        self._patience = patience or Patience()
        self._trouble = trouble
        context = httpx.create_ssl_context()
        if authority is not None:
            try:
                context.load_verify_locations(authority)
            except OSError as error:
                raise TaktlineError(
                    ErrorCode.CONFIG_INVALID,
                    f"{authority} holds no certificate authority: {error}",
                    "give a PEM file with the issuer of the source's certificate",
                ) from error
        # Proxies come from HTTPS_PROXY, HTTP_PROXY and NO_PROXY.
        timeout = httpx.Timeout(
            self._patience.stall_s, connect=self._patience.connect_s, read=self._patience.stall_s, pool=None
        )
        self._client = httpx.Client(verify=context, timeout=timeout, follow_redirects=False)

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()

    def retrying(self, what: str, work: Callable[[], _ResultT], advanced: Callable[[], int] = lambda: 0) -> _ResultT:
        """Does `work` until it succeeds or is refused. While `advanced` grows, pauses stay short.

        Raises:
            TaktlineError: what `work` raises, or MODEL_UNREACHABLE at the deadline with the last failure.
        """
        failures, before, words = 0, advanced(), ""
        while True:
            self.require_time(what, words)
            try:
                return work()
            except (httpx.TransportError, httpx.InvalidURL, PassingError) as error:
                if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
                    raise TaktlineError(
                        ErrorCode.CONFIG_INVALID, f"{what}: {error}", "write an http or https address"
                    ) from error
                if (untrusted := _certificate_error(error)) is not None:
                    raise TaktlineError(
                        ErrorCode.MODEL_UNREACHABLE,
                        f"{what}: its certificate is not trusted: {untrusted.verify_message}",
                        "name its certificate authority in spec.delivery.caConfigMap (--ca), or correct the address",
                    ) from error
                words = str(error) or type(error).__name__
                now = advanced()
                failures, before = (1 if now > before else failures + 1), now
                bound = min(self._patience.cap_s, self._patience.base_s * 2 ** min(failures - 1, 16))
                pause = max(random.uniform(0, bound), getattr(error, "after_s", 0.0))
                self._trouble(f"{what}: {words}")
                _retries.warning(
                    "will be tried again", extra={"file": what, "cause": words[:300], "after_s": round(pause, 2)}
                )
                if time.monotonic() + pause >= self.deadline:
                    raise self._late(what, words) from error
                self.stop.wait(pause)

    def require_time(self, what: str, words: str) -> None:
        """Goes on only before the deadline, and while no other file failed for good.

        Raises:
            TaktlineError: MODEL_UNREACHABLE.
        """
        if time.monotonic() >= self.deadline:
            raise self._late(what, words)
        self.require_go_on()

    def require_go_on(self) -> None:
        """Goes on only while no other file failed for good.

        Raises:
            StoppedError: one did.
        """
        if self.stop.is_set():
            raise StoppedError

    def _late(self, what: str, words: str) -> TaktlineError:
        return TaktlineError(
            ErrorCode.MODEL_UNREACHABLE,
            f"{what} did not come before the deadline" + (f"; the last failure: {words}" if words else ""),
            "what came is kept and the next attempt goes on from there; check the source, or allow more time"
            " (spec.delivery.deadlineSeconds, on the command line --deadline-s)",
        )

    def head(self, origin: Origin, name: str) -> Head:
        """Size and version of a file.

        Raises:
            TaktlineError: MODEL_ABSENT, MODEL_DENIED, MODEL_UNREACHABLE.
        """
        url = origin.url(name)

        def ask() -> Head:
            with self.answer("HEAD", url, origin, {}) as reply:
                if reply.status_code in (405, 501):
                    return Head(None, "")
                require_success(reply, url)
                length = reply.headers.get("content-length", "")
                return Head(int(length) if length.isdigit() else None, validator(reply))

        return self.retrying(shown(url), ask)

    def document(self, origin: Origin, name: str, limit: int) -> tuple[bytes, httpx.Headers]:
        """The whole content of a small file, with the headers that came with it.

        Raises:
            TaktlineError: as `head`; MODEL_UNSAFE where it is larger than `limit` bytes.
        """
        url = origin.url(name)

        def ask() -> tuple[bytes, httpx.Headers]:
            with self.answer("GET", url, origin, {}) as reply:
                require_success(reply, url)
                content = bytearray()
                for block in reply.iter_raw():
                    self.require_time(shown(url), "it is still on its way")
                    content += block
                    if len(content) > limit:
                        raise unsafe(f"{shown(url)} is larger than {limit:,} bytes")
                return bytes(content), reply.headers

        return self.retrying(shown(url), ask)

    @contextmanager
    def answer(self, method: str, url: str, origin: Origin, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """The answer to one request, its body not read yet; redirects are followed, without our credentials elsewhere.

        Raises:
            PassingError, httpx.TransportError: asking again may help.
            TaktlineError: MODEL_UNSAFE for a redirect that leaves HTTPS, MODEL_UNREACHABLE for a circle of them.
        """
        home = current = httpx.URL(url)
        for _ in range(MAX_REDIRECTS):
            let_in = origin.headers(method, current) if place(current) == place(home) else {}
            # As it lies there: a compressed answer has other sizes and ranges.
            wanted = {"accept-encoding": "identity", **headers, **let_in}
            reply = self._client.send(self._client.build_request(method, current, headers=wanted), stream=True)
            try:
                if reply.status_code not in _REDIRECTS:
                    if reply.headers.get("content-encoding", "identity") != "identity":
                        raise unsafe(f"{shown(url)} comes compressed though it was asked for as it is")
                    yield reply
                    return
                target = current.join(reply.headers.get("location", ""))
            finally:
                reply.close()
            if target.scheme not in ("http", "https") or (current.scheme == "https" and target.scheme != "https"):
                raise unsafe(f"{shown(url)} is redirected to {target.scheme}://{target.host}, which is not followed")
            current = target
        raise TaktlineError(
            ErrorCode.MODEL_UNREACHABLE, f"{shown(url)} is redirected in a circle", "correct the address of the source"
        )


class StoppedError(Exception):
    """Another file of the delivery failed; this one is left as it is."""


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """The refusal of a certificate behind a failure to connect: asking again does not cure it."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None


def place(url: httpx.URL) -> tuple[str, str, int | None]:
    """Whose address it is: credentials are for one place only."""
    return url.scheme, url.host, url.port


def shown(url: str) -> str:
    """An address without what may be secret in it."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(query=None, fragment=None, userinfo=b""))


def validator(reply: httpx.Response) -> str:
    """What identifies this version of a file: a strong ETag, else nothing."""
    found: str = reply.headers.get("etag", "")
    return "" if found.startswith("W/") else found


def require_success(reply: httpx.Response, url: str) -> None:
    """Lets 2xx pass.

    Raises:
        PassingError: the server is busy or broken for now.
        TaktlineError: MODEL_DENIED, MODEL_ABSENT.
    """
    status = reply.status_code
    if 200 <= status < 300:
        return
    what = f"{shown(url)} answers {status}"
    if status in _PASSING:
        after = reply.headers.get("retry-after", "")
        raise PassingError(what, min(float(after), 300.0) if after.isdigit() else 0.0)
    if status in (404, 410):
        raise TaktlineError(
            ErrorCode.MODEL_ABSENT, f"{what}: there is no such file", "correct spec.model.source, or add the file there"
        )
    raise TaktlineError(
        ErrorCode.MODEL_DENIED,
        f"{what}: we are not let in" if status in (401, 403, 407) else what,
        "check the Secret that spec.model.source names, its rights, and the address",
    )
