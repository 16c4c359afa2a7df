"""TLS of the worker's ports, gRPC and batches, from files that may be renewed while it runs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from taktline_protocol import ErrorCode, TaktlineError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: own certificate with its chain, its key, and the issuer of gateways' certificates.

    Without `client_ca` any gateway that reaches the port is served.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """Key, certificate and issuer.

        Raises:
            TaktlineError: CONFIG_INVALID where a file cannot be read, or the three do not fit.
        """
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # gRPC takes anything for a certificate and then fails in every handshake, without a word.
            check.load_cert_chain(self.cert, self.key)
            if self.client_ca is not None:
                check.load_verify_locations(self.client_ca)
            issuer = self.client_ca.read_bytes() if self.client_ca is not None else None
            return self.key.read_bytes(), self.cert.read_bytes(), issuer
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the certificate {self.cert} cannot be used: {error}",
                "give PEM files: the certificate with its chain, its unencrypted key, the issuer of the gateways'",
            ) from error


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials whose certificate and trust follow the files, looked at in every handshake.

    Raises:
        TaktlineError: CONFIG_INVALID where the files cannot be used now. Later a broken file is logged and the last
            good ones stay.
    """
    served = files.contents()
    refused: tuple[int, ...] = ()

    def follow() -> grpc.ServerCertificateConfiguration | None:
        nonlocal served, refused
        changed = _changes(files)
        try:
            found = files.contents()
        except TaktlineError as error:
            if changed != refused:
                logger.error("certificate_refused", extra={"reason": error.message})
            refused = changed
            return None
        if found == served:
            return None
        served = found
        logger.info("certificate_read", extra={"cert": str(files.cert)})
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served), follow, require_client_authentication=files.client_ca is not None
    )


class WholeHandshakes(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses every call that came by a resumed TLS session, with UNAUTHENTICATED.

    gRPC resumes sessions for days and has no switch for it, and it looks at no certificate of theirs again: it may have
    expired, or its issuer may be trusted no more. The gateway resumes none, so nobody who may come is turned away.
    """

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of the call, behind the check."""
        handler = continuation(details)
        if handler is None:
            return None
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        return handler._replace(
            **{kind: _checked(getattr(handler, kind)) for kind in kinds if getattr(handler, kind) is not None}
        )


def _checked(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    # With its attributes: by one the health service says that its Watch holds no thread, and takes one argument more.
    @functools.wraps(behaviour)
    def answer(request: Any, context: grpc.ServicerContext, *rest: Any) -> Any:
        if b"true" in context.auth_context().get("ssl_session_reused", ()):
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "a resumed TLS session shows no certificate; connect anew, without a cache of sessions",
            )
        return behaviour(request, context, *rest)

    return answer


def interceptors(files: TlsFiles | None) -> tuple[grpc.ServerInterceptor, ...]:
    """What stands before the calls of a server with these files: nothing, where no certificate is asked for."""
    return (WholeHandshakes(),) if files is not None and files.client_ca is not None else ()


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """The same for a port that is not gRPC's: certificate and trust follow the files, looked at in every handshake.

    Raises:
        TaktlineError: as `server_credentials`.
    """
    seen = _changes(files)
    current = context = _context(files)

    def choose(handshake: ssl.SSLSocket | ssl.SSLObject, name: str | None, asked: ssl.SSLContext) -> None:
        nonlocal current, seen
        changed = _changes(files)
        if changed != seen:
            seen = changed
            try:
                current = _context(files)
            except TaktlineError as error:
                logger.error("certificate_refused", extra={"reason": error.message})
        if current is not context:
            handshake.context = current

    context.sni_callback = choose  # asked in every handshake, with and without a name
    return context


def _context(files: TlsFiles) -> ssl.SSLContext:
    files.contents()  # refuses, with the reason, what cannot be used
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # TLS 1.2 resumes sessions without tickets, too, and `ssl` has no switch for that; every gateway speaks 1.3.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files.cert, files.key)
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
        # A resumed session would let a gateway in by a certificate whose issuer is trusted no more.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _configuration(contents: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    key, cert, issuer = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], issuer)


def _changes(files: TlsFiles) -> tuple[int, ...]:
    paths = (files.cert, files.key, files.client_ca)
    return tuple(path.stat().st_mtime_ns if path is not None and path.exists() else 0 for path in paths)
