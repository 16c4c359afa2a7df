"""TLS of the worker's gRPC port, from files that may be renewed while it runs."""

from __future__ import annotations

import dataclasses
import logging
import ssl
from pathlib import Path

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


def _configuration(contents: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    key, cert, issuer = contents
    return grpc.ssl_server_certificate_configuration([(key, cert)], issuer)


def _changes(files: TlsFiles) -> tuple[int, ...]:
    paths = (files.cert, files.key, files.client_ca)
    return tuple(path.stat().st_mtime_ns if path is not None and path.exists() else 0 for path in paths)
