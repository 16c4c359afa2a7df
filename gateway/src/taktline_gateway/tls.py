"""TLS from files that may be renewed while the gateway runs: for its listeners, and for its channels to workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import grpc
from cryptography import x509
from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.logs import log
from taktline_gateway.routes import POLL_S, FileChanges, file_identity

_logger = logging.getLogger(__name__)
Identity = tuple[tuple[int, int, int, int] | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files of one end.

    Attributes:
        cert: own certificate and its chain; likewise key.
        ca: certificates that the other end must have been issued by; None trusts nobody's (no certificate is asked of
            clients).
        name: the name that the other end's certificate must carry, where that is not its address.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    name: str = ""

    def identity(self) -> Identity:
        """What changes when one of the files is replaced."""
        return tuple(file_identity(path) for path in (self.cert, self.key, self.ca) if path is not None)


class ServerTls:
    """What the listeners hand to every handshake: `context`, whose certificate and trust follow the files."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises TaktlineError `config_invalid`."""
        self.files = files
        self._changes = FileChanges(files.identity)
        self._current = self.context = _server_context(files)
        # Asked in every handshake, with and without SNI: the newest context takes over certificate and trust.
        self.context.sni_callback = self._choose

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """The same for a gRPC server; it too reads the files again when they change."""
        seen = [self.files.identity()]

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            identity = self.files.identity()
            if identity == seen[0]:
                return None
            try:
                found = _grpc_server_configuration(self.files)
            except TaktlineError:
                return None  # `refresh` has logged it; the last good one stays
            seen[0] = identity
            return found

        return grpc.dynamic_ssl_server_credentials(
            _grpc_server_configuration(self.files), fetch, require_client_authentication=self.files.ca is not None
        )

    def refresh(self) -> bool:
        """Reads the files again where they changed; whether it did. A broken one is logged, the last good one stays."""
        if not self._changes.due():
            return False
        try:
            self._current = _server_context(self.files)
        except TaktlineError as error:
            if self._changes.failed(error):
                log(_logger, logging.ERROR, "certificate_refused", reason=str(error))
            return False
        log(_logger, logging.INFO, "certificate_read", cert=str(self.files.cert))
        return True

    def _choose(
        self, handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> int | None:
        if self.files.ca is not None and handshake.session_reused:
            # TLS 1.2 resumes by session ids, too, for which `ssl` has no switch. The certificate of a resumed session
            # is not looked at again: it may have expired, its issuer may be trusted no more. The alert makes both ends
            # forget the session, so the client's next connection is a whole handshake.
            return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE
        if self._current is not self.context:
            handshake.context = self._current
        return None


def expired_but_resumed(auth: Mapping[str, Sequence[bytes]]) -> bool:
    """Whether a gRPC client came by a resumed session after its certificate had expired; `auth` is of the call.

    gRPC resumes sessions for days and offers no switch for it. It forgets them when trust changes, but looks at no
    certificate of theirs again.
    """
    if b"true" not in auth.get("ssl_session_reused", ()):
        return False
    shown = auth.get("x509_pem_cert", ())
    now = datetime.datetime.now(datetime.UTC)
    return any(x509.load_pem_x509_certificate(pem).not_valid_after_utc <= now for pem in shown)


class WorkerTls:
    """How workers are reached: their issuer, and the certificate that the gateway shows them."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files. Raises TaktlineError `config_invalid`."""
        self.files = files
        self._changes = FileChanges(files.identity)
        self._credentials = _channel_credentials(files)
        self.context = _client_context(files)
        """For connections to workers that are not gRPC's; another one after the files have changed."""
        self._listeners: set[Callable[[], None]] = set()

    def channel(self, address: str, options: tuple[tuple[str, int], ...]) -> grpc.aio.Channel:
        """A channel to one worker with the certificates of now."""
        named = (("grpc.ssl_target_name_override", self.files.name),) if self.files.name else ()
        return grpc.aio.secure_channel(address, self._credentials, options=(*options, *named))

    def on_change(self, renew: Callable[[], None]) -> Callable[[], None]:
        """Calls `renew` whenever the files changed; returns what ends that."""
        self._listeners.add(renew)
        return lambda: self._listeners.discard(renew)

    def refresh(self) -> bool:
        """As `ServerTls.refresh`."""
        if not self._changes.due():
            return False
        try:
            self._credentials, self.context = _channel_credentials(self.files), _client_context(self.files)
        except TaktlineError as error:
            if self._changes.failed(error):
                log(_logger, logging.ERROR, "certificate_refused", reason=str(error))
            return False
        log(_logger, logging.INFO, "certificate_read", cert=str(self.files.cert or self.files.ca))
        for renew in list(self._listeners):
            renew()
        return True


@contextlib.asynccontextmanager
async def following(*watched: ServerTls | WorkerTls | None) -> AsyncIterator[None]:
    """Keeps each one up to date while the context lasts."""
    found = [one for one in watched if one is not None]

    async def follow() -> None:
        while True:
            await asyncio.sleep(POLL_S)
            for one in found:
                one.refresh()

    task = asyncio.create_task(follow()) if found else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(str(files.cert), str(files.key))
        if files.ca is not None:
            context.load_verify_locations(str(files.ca))
            context.verify_mode = ssl.CERT_REQUIRED
            # A resumed session would let a client in by a certificate whose issuer is trusted no more.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
    except (OSError, ssl.SSLError, ValueError) as error:
        raise _refused(files, str(error)) from error
    return context


def _grpc_server_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    _server_context(files)  # gRPC takes anything for a certificate and fails in the handshake, without a word
    pair = (_bytes(files, files.key), _bytes(files, files.cert))
    return grpc.ssl_server_certificate_configuration([pair], _bytes(files, files.ca) if files.ca else None)


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(str(files.ca))
        if files.cert is not None:
            context.load_cert_chain(str(files.cert), str(files.key))
    except (OSError, ssl.SSLError, ValueError) as error:
        raise _refused(files, str(error)) from error
    return context


def _channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    _client_context(files)  # gRPC takes anything for a certificate
    own = (_bytes(files, files.key), _bytes(files, files.cert)) if files.cert is not None else (None, None)
    return grpc.ssl_channel_credentials(_bytes(files, files.ca), *own)


def _bytes(files: TlsFiles, path: Path | None) -> bytes:
    try:
        return path.read_bytes() if path is not None else b""
    except OSError as error:
        raise _refused(files, f"{path}: {error.strerror}") from error


def _refused(files: TlsFiles, reason: str) -> TaktlineError:
    shown = ", ".join(str(path) for path in (files.cert, files.key, files.ca) if path is not None)
    return TaktlineError(
        ErrorCode.CONFIG_INVALID,
        f"the certificates {shown} cannot be used: {reason[:200]}",
        "give PEM files: the certificate with its chain, its unencrypted key, the issuer's certificates",
    )
