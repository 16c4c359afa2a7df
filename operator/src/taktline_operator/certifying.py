"""Keeps the webhook's certificate current: in a Secret and in the API server's trust, or from files that others renew.

Every replica looks by itself, so none depends on which one leads. Writes carry the version that was read: of two
replicas that renew at once one is refused, and takes over what the other wrote.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import ssl
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from taktline_operator import certificates
from taktline_operator.kube import ApiError

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# Keys of the Secret; the first three are those of kubernetes.io/tls, as cert-manager fills them.
CERTIFICATE, KEY, AUTHORITIES, AUTHORITY_KEY = "tls.crt", "tls.key", "ca.crt", "ca.key"
CONFIGURATION = "ValidatingWebhookConfiguration"


class Api(Protocol):
    """The part of `kube.KubeApi` that is used."""

    async def get(self, kind: str, namespace: str | None, name: str) -> Json | None: ...  # noqa: D102

    async def replace(self, body: Json) -> Json: ...  # noqa: D102

    async def apply(self, desired: Json, subresource: str = "") -> Json: ...  # noqa: D102


class Context:
    """The TLS context of the webhook's listener; a new certificate holds from the next handshake on."""

    def __init__(self) -> None:
        self.ssl = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        self.certificate = b""

    def use(self, certificate: bytes, key: bytes) -> bool:
        """Show `certificate` from now on; returns whether it is another one than before.

        Raises:
            ssl.SSLError: certificate and key are not a pair.
        """
        if certificate == self.certificate:
            return False
        # OpenSSL reads files only. In the container /tmp is memory.
        with tempfile.NamedTemporaryFile() as file:
            os.chmod(file.name, 0o600)
            file.write(certificate + b"\n" + key)
            file.flush()
            # Where key and certificate are no pair, OpenSSL has taken the one and thrown the other away by then.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(file.name)
            self.ssl.load_cert_chain(file.name)
        self.certificate = certificate
        return True


class SelfManaged:
    """Certificates made by the operator itself."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        secret: str,
        configuration: str,
        hosts: Sequence[str],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Prepare to look.

        Args:
            secret: name of an existing Secret in `namespace`, empty at first.
            configuration: name of the ValidatingWebhookConfiguration whose webhooks are told whom to trust.
            hosts: names and addresses that the API server calls the webhook by.
        """
        self._api = api
        self._place = (namespace, secret)
        self._configuration = configuration
        self._hosts = tuple(hosts)
        self._clock = clock

    async def look(self, context: Context) -> str:
        """Renew what is due, tell the API server, and show the certificate; returns what is wrong, empty if nothing.

        Raises:
            ApiError: the API server refused or gave no answer.
        """
        namespace, name = self._place
        secret = await self._api.get("Secret", namespace, name)
        if secret is None:
            return f"Secret {namespace}/{name} does not exist: the chart makes it, empty"
        configuration = await self._api.get(CONFIGURATION, None, self._configuration)
        told = _told(configuration)
        stored = _read(secret)
        wanted = certificates.renewed(stored, self._hosts, told, self._clock())
        if wanted != stored:
            await self._api.replace(_written(secret, wanted))
            logger.info("webhook certificate renewed", extra={"object": f"Secret/{name}"})
        if context.use(wanted.certificate, wanted.key):
            left = certificates.days_left(wanted.certificate, self._clock())
            logger.info("webhook certificate in use", extra={"days_left": round(left)})
        if configuration is None:
            return f"{CONFIGURATION} {self._configuration} does not exist: nothing asks this webhook"
        if told != wanted.authorities:
            await self._api.apply(_telling(configuration, wanted.authorities))
            logger.info("webhook trust told", extra={"object": f"{CONFIGURATION}/{self._configuration}"})
        return ""


class FromFiles:
    """Certificates in a folder that somebody else renews, such as a Secret of cert-manager's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def look(self, context: Context) -> str:
        """Show the pair in the folder; returns what is wrong, empty if nothing. The last good pair stays in use."""
        try:
            pair = [(self._folder / name).read_bytes() for name in (CERTIFICATE, KEY)]
            if context.use(*pair):
                logger.info("webhook certificate in use", extra={"object": str(self._folder / CERTIFICATE)})
        except (OSError, ssl.SSLError) as error:
            return f"no usable certificate in {self._folder}: {error}"
        return ""


def _read(secret: Json) -> certificates.Stored | None:
    data = secret.get("data") or {}
    try:
        parts = [base64.b64decode(data[name]) for name in (AUTHORITIES, AUTHORITY_KEY, CERTIFICATE, KEY)]
    except (KeyError, binascii.Error):
        return None
    return certificates.Stored(authorities=parts[0], authority_key=parts[1], certificate=parts[2], key=parts[3])


def _written(secret: Json, stored: certificates.Stored) -> Json:
    parts = {
        AUTHORITIES: stored.authorities,
        AUTHORITY_KEY: stored.authority_key,
        CERTIFICATE: stored.certificate,
        KEY: stored.key,
    }
    return secret | {
        "apiVersion": "v1",
        "kind": "Secret",
        "data": {name: base64.b64encode(part).decode() for name, part in parts.items()},
    }


def _told(configuration: Json | None) -> bytes:
    """Authorities that all our webhooks trust; nothing where they differ."""
    bundles = {hook["clientConfig"].get("caBundle", "") for hook in (configuration or {}).get("webhooks", [])}
    return base64.b64decode(bundles.pop()) if len(bundles) == 1 else b""


def _telling(configuration: Json, authorities: bytes) -> Json:
    """Only our field of it: everything else stays the chart's."""
    bundle = base64.b64encode(authorities).decode()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": CONFIGURATION,
        "metadata": {"name": configuration["metadata"]["name"]},
        "webhooks": [
            {"name": hook["name"], "clientConfig": {"caBundle": bundle}} for hook in configuration.get("webhooks", [])
        ],
    }


def is_conflict(error: ApiError) -> bool:
    """Whether another replica was faster; the next look takes over what it wrote."""
    return error.status == 409
