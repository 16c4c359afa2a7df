"""What a robot shows a gateway, and what it checks of it: API key or token, certificates."""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping
from pathlib import Path

from taktline_protocol import ErrorCode, TaktlineError

API_KEY = "TAKTLINE_API_KEY"
API_KEY_FILE = "TAKTLINE_API_KEY_FILE"
CA_FILE = "TAKTLINE_CA_FILE"
CLIENT_CERT = "TAKTLINE_CLIENT_CERT"
CLIENT_KEY = "TAKTLINE_CLIENT_KEY"


@dataclasses.dataclass(frozen=True)
class Access:
    """How to be let in. Fields left out are read from the environment variable beside them.

    Attributes:
        api_key: API key or access token (TAKTLINE_API_KEY).
        api_key_file: a file that holds it (TAKTLINE_API_KEY_FILE); goes before `api_key`. Read again where the gateway
            does not know the key.
        ca_file: certificates to trust for https (TAKTLINE_CA_FILE); the system's where there is none.
        client_cert: this robot's own certificate (TAKTLINE_CLIENT_CERT), where the gateway asks for one,
        client_key: and its private key (TAKTLINE_CLIENT_KEY); empty where the certificate's file holds it.
    """

    api_key: str = dataclasses.field(default_factory=lambda: os.environ.get(API_KEY, ""), repr=False)
    api_key_file: str = dataclasses.field(default_factory=lambda: os.environ.get(API_KEY_FILE, ""))
    ca_file: str = dataclasses.field(default_factory=lambda: os.environ.get(CA_FILE, ""))
    client_cert: str = dataclasses.field(default_factory=lambda: os.environ.get(CLIENT_CERT, ""))
    client_key: str = dataclasses.field(default_factory=lambda: os.environ.get(CLIENT_KEY, ""))

    @classmethod
    def of(cls, api_key: str | None, access: Access | None) -> Access:
        """`access`, or the environment's, with `api_key` in place of its key where one is given."""
        found = access or cls()
        return found if api_key is None else dataclasses.replace(found, api_key=api_key, api_key_file="")

    def headers(self) -> dict[str, str]:
        """The header that carries the key; none where there is no key. Raises TaktlineError `config_invalid`."""
        key = self.api_key.strip()
        if self.api_key_file:
            try:
                key = Path(self.api_key_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise _refused(f"the API key file {self.api_key_file} cannot be read", API_KEY_FILE) from error
        if not key.isascii() or not key.isprintable():
            # Never the key itself: this text ends in logs.
            raise _refused("the API key holds characters that no key has", API_KEY)
        return {"authorization": f"Bearer {key}"} if key else {}

    def renewed(self, shown: Mapping[str, str]) -> bool:
        """Whether there is another key by now than the one in the headers `shown`: keys in files are rotated."""
        try:
            return self.headers() not in ({}, shown)
        except TaktlineError:  # half written; the next refusal asks again
            return False

    def tls(self) -> ssl.SSLContext:
        """The context for https. Raises TaktlineError `config_invalid` where a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
        except OSError as error:
            raise _refused(f"the certificates of {self.ca_file} cannot be read: {error}", CA_FILE) from error
        if self.client_cert:
            try:
                context.load_cert_chain(self.client_cert, self.client_key or None)
            except OSError as error:
                raise _refused(f"the certificate {self.client_cert} cannot be used: {error}", CLIENT_CERT) from error
        return context

    def verify(self, url: str) -> ssl.SSLContext | bool:
        """What httpx wants to know: the context for an https URL; building one for http would only cost time."""
        return self.tls() if url.startswith(("https:", "wss:")) else False


def _refused(reason: str, variable: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, reason, f"check the setting, or {variable}")
