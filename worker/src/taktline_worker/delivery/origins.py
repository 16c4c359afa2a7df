"""Where files lie, and how we are let in: an HTTP mirror, a bucket of an S3-compatible service, a model hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote

import httpx
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.delivery import TOKEN_VARIABLE, HttpSource, S3Source

from taktline_worker.delivery.remote import Origin

Precondition = Literal["If-Range", "If-Match"]
_SIGNING_S = 10.0


class HttpOrigin:
    """Files below an address, with a bearer token where one is given."""

    precondition: Precondition = "If-Range"

    def __init__(self, base: str, token: str = "") -> None:
        self._base = base
        self._token = token

    def url(self, name: str) -> str:
        """Address of a file; of the place itself for an empty name."""
        return f"{self._base.rstrip('/')}/{quote(name)}" if name else self._base

    def headers(self, method: str, url: httpx.URL) -> Mapping[str, str]:
        """The token."""
        del method, url
        return {"authorization": f"Bearer {self._token}"} if self._token else {}


class S3Origin:
    """Objects of a bucket; each request is signed with SigV4 where there are credentials. Needs `s3:GetObject` only."""

    precondition: Precondition = "If-Match"  # what S3 documents; services differ on If-Range

    def __init__(self, source: S3Source, environment: Mapping[str, str]) -> None:
        self._prefix = source.prefix.strip("/")
        self._region = source.region
        endpoint = source.endpoint or f"https://s3.{source.region}.amazonaws.com"
        parsed = httpx.URL(endpoint)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID, f"the S3 endpoint {endpoint!r} is no address", "write https://HOST[:PORT]"
            )
        place = parsed.netloc.decode()
        self._base = (
            f"{parsed.scheme}://{place}/{quote(source.bucket)}"
            if source.path_style
            else f"{parsed.scheme}://{source.bucket}.{place}"
        )
        self._credentials = (
            environment.get("AWS_ACCESS_KEY_ID", ""),
            environment.get("AWS_SECRET_ACCESS_KEY", ""),
            environment.get("AWS_SESSION_TOKEN") or None,
        )

    def url(self, name: str) -> str:
        """Address of an object; of the prefix itself for an empty name."""
        key = "/".join(part for part in (self._prefix, name) if part)
        return f"{self._base}/{quote(key)}"

    def headers(self, method: str, url: httpx.URL) -> Mapping[str, str]:
        """The signature."""
        access, secret, session = self._credentials
        if not access:
            return {}
        from awscrt import auth, http  # a native library: only where something is signed

        config = auth.AwsSigningConfig(
            algorithm=auth.AwsSigningAlgorithm.V4,
            signature_type=auth.AwsSignatureType.HTTP_REQUEST_HEADERS,
            credentials_provider=auth.AwsCredentialsProvider.new_static(access, secret, session),
            region=self._region,
            service="s3",
            # S3's own rules: a key is a key, also with // and .. in it.
            use_double_uri_encode=False,
            should_normalize_uri_path=False,
            signed_body_value=auth.AwsSignedBodyValue.EMPTY_SHA256,
            signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
        )
        asked = http.HttpRequest(method, url.raw_path.decode(), http.HttpHeaders([("host", url.netloc.decode())]))
        signed = auth.aws_sign_request(asked, config).result(_SIGNING_S)
        return {name.lower(): value for name, value in signed.headers if name.lower() != "host"}


def of(source: HttpSource | S3Source, environment: Mapping[str, str] | None = None) -> Origin:
    """The origin of a source, with the credentials of the environment."""
    found = os.environ if environment is None else environment
    if isinstance(source, HttpSource):
        return HttpOrigin(source.url, found.get(TOKEN_VARIABLE, ""))
    return S3Origin(source, found)
