"""Access tokens (JWT): signature by an issuer's public key, then exp, nbf, aud and iss; keys rotate without restart."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import ssl
import threading
import time
import urllib.request
from collections import OrderedDict
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any, NamedTuple

import jwt

from taktline_gateway.access.access_file import Issuer, rights_of
from taktline_gateway.access.rights import Right, unauthenticated
from taktline_gateway.logs import log

MAX_TOKEN_CHARS = 8192
MAX_JWKS_BYTES = 1 << 20
LEEWAY_S = 10.0
"""How far the issuer's clock may be from ours."""
FETCH_TIMEOUT_S = 5.0
UNKNOWN_KEY_PAUSE_S = 10.0
"""A token with an unknown key id makes the keys be read again at most so often."""
CACHED_TOKENS = 4096
_logger = logging.getLogger(__name__)


class Claims:
    """What a valid token says, already read by its issuer's rules."""

    __slots__ = ("expires", "generation", "keys", "policies", "rights", "subject", "tenant")

    def __init__(self, keys: KeySet, payload: dict[str, Any]) -> None:
        """Raises TaktlineError `unauthenticated` where a claim cannot be read."""
        issuer = keys.issuer
        self.keys, self.generation = keys, keys.generation
        self.expires = float(payload["exp"])
        subject = payload.get("sub")
        self.subject = subject[:128] if isinstance(subject, str) and subject.isprintable() else "token"
        named = payload.get(issuer.tenant_claim, "")
        self.tenant: str = issuer.tenant or (named if isinstance(named, str) else "")
        if not issuer.tenant and self.tenant not in issuer.tenants:
            raise unauthenticated(f"the token's {issuer.tenant_claim!r} is no tenant that its issuer may name")
        self.rights: tuple[Right, ...] = ("act", "read")
        if issuer.rights_claim in payload:
            rights = rights_of(payload[issuer.rights_claim])
            if rights is None:
                raise unauthenticated(f"the token's {issuer.rights_claim!r} is no list of rights")
            self.rights = rights
        policies = payload.get(issuer.policies_claim, ["*"])
        if not isinstance(policies, list) or not all(isinstance(name, str) for name in policies):
            raise unauthenticated(f"the token's {issuer.policies_claim!r} is no list of policies")
        self.policies: tuple[str, ...] = tuple(policies)


class PublicKey(NamedTuple):
    """One key; `algorithm` is the only one that it is for, None where any of its kind will do."""

    key: Any
    algorithm: str | None


class KeySet:
    """The public keys of one issuer, by key id."""

    def __init__(self, issuer: Issuer) -> None:
        self.issuer = issuer
        self.generation = 0
        """Grows whenever the keys change: what was checked with the old ones is checked again."""
        self._keys: dict[str, PublicKey] = {}
        self._document = b""
        self._read_at = -float("inf")
        self._reading: asyncio.Task[None] | None = None
        self._reader: threading.Thread | None = None

    def take_over(self, older: KeySet) -> None:
        """Begins with the keys that another set of this issuer has read last."""
        self._keys, self._document = older._keys, older._document

    @property
    def known(self) -> bool:
        """Whether any keys have been read."""
        return bool(self._keys)

    def key(self, key_id: str | None) -> PublicKey | None:
        """The key of this id; without an id the only one there is."""
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id)

    async def refresh(self, *, at_most_every_s: float = 0.0) -> None:
        """Reads the keys again; the last good ones stay where that fails. Concurrent calls share one reading."""
        if self._reading is None or self._reading.done():
            if time.monotonic() - self._read_at < at_most_every_s:
                return
            self._reading = asyncio.create_task(self._refresh())
        await asyncio.shield(self._reading)

    async def run(self) -> None:
        """Refreshes for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(self.issuer.refresh_s if self.known else min(self.issuer.refresh_s, 5.0))

    async def _refresh(self) -> None:
        self._read_at = time.monotonic()
        try:
            document = await self._document_in_time()
            keys = public_keys(document)
        except Exception as error:  # whatever the issuer sends, the next document is read again
            reason = str(error)[:300] or type(error).__name__
            log(_logger, logging.ERROR, "jwks_unreadable", issuer=self.issuer.issuer, reason=reason)
            return
        if document != self._document:
            log(_logger, logging.INFO, "jwks_read", issuer=self.issuer.issuer, key_ids=sorted(keys))
            self._keys, self._document = keys, document
            self.generation += 1

    async def _document_in_time(self) -> bytes:
        """Reads on a thread of its own, which holds up no exit: a server may send a byte now and then for ever.

        Raises:
            TimeoutError: it takes longer than `FETCH_TIMEOUT_S`, or the reading before it still does.
        """
        if self._reader is not None:
            raise TimeoutError("the server still sends its last answer")
        loop = asyncio.get_running_loop()
        found: asyncio.Future[bytes] = loop.create_future()

        def tell(document: bytes | None, error: BaseException | None) -> None:
            self._reader = None
            if found.done():
                return
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(document or b"")

        def read() -> None:
            document, failed = None, None
            try:
                document = _read(self.issuer)
            except Exception as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(tell, document, failed)

        self._reader = threading.Thread(target=read, name="jwks", daemon=True)
        self._reader.start()
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            return await found


class TokenVerifier:
    """Checks tokens of any number of issuers; what was checked once is remembered until it expires."""

    def __init__(self, issuers: tuple[Issuer, ...], before: TokenVerifier | None = None) -> None:
        """`before` is the one that this one replaces: the keys of issuers that did not change stay known."""
        self._sets = {issuer.issuer: KeySet(issuer) for issuer in issuers}
        for name, older in before._sets.items() if before is not None else ():
            if name in self._sets and self._sets[name].issuer == older.issuer:
                self._sets[name].take_over(older)
        self._seen: OrderedDict[bytes, Claims] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to read the issuers' keys; needs a running event loop."""
        self._tasks = [asyncio.create_task(keys.run()) for keys in self._sets.values()]

    async def close(self) -> None:
        """Stops reading keys."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def verify(self, token: str) -> Claims:
        """The claims of a valid token. Raises TaktlineError `unauthenticated`, which never quotes the token."""
        digest = hashlib.sha256(token.encode()).digest()
        claims = self._seen.get(digest)
        if claims is None or claims.generation != claims.keys.generation:
            claims = await self._verify(token)
            self._seen[digest] = claims
            while len(self._seen) > CACHED_TOKENS:
                self._seen.popitem(last=False)
        elif time.time() > claims.expires + LEEWAY_S:
            del self._seen[digest]
            raise unauthenticated("the token has expired")
        return claims

    async def _verify(self, token: str) -> Claims:
        if len(token) > MAX_TOKEN_CHARS:
            raise unauthenticated(f"the token is over {MAX_TOKEN_CHARS} characters")
        try:
            header = jwt.get_unverified_header(token)
            named = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except jwt.PyJWTError:
            raise unauthenticated("the token is no JWT") from None
        keys = self._sets.get(named) if isinstance(named, str) else None
        if keys is None:
            raise unauthenticated("the token's issuer is not known here")
        algorithm = header.get("alg")
        if algorithm not in keys.issuer.algorithms:
            raise unauthenticated(f"the token's algorithm is not one of {', '.join(keys.issuer.algorithms)}")
        key_id = header.get("kid")
        key = await self._key(keys, key_id if isinstance(key_id, str) else None)
        if key.algorithm not in (None, algorithm):
            raise unauthenticated("the token's key is for another algorithm")
        try:
            payload: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=keys.issuer.audience,
                issuer=keys.issuer.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise unauthenticated("the token has expired") from None
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            # PyJWT's own words name the claim at fault and hold nothing of the token.
            raise unauthenticated(f"the token is not valid: {str(error)[:200]}") from None
        return Claims(keys, payload)

    async def _key(self, keys: KeySet, key_id: str | None) -> PublicKey:
        key = keys.key(key_id)
        if key is None:
            await keys.refresh(at_most_every_s=UNKNOWN_KEY_PAUSE_S)
            key = keys.key(key_id)
        if key is None and not keys.known:
            raise unauthenticated("the issuer's keys could not be read yet", retry_after_ms=1000.0)
        if key is None:
            raise unauthenticated("the token's key is not among its issuer's keys")
        return key


def public_keys(data: bytes) -> dict[str, PublicKey]:
    """Signing keys of a JWKS document by id. Shared secrets and entries that nothing here can use are left out.

    An RSA key that names no algorithm serves for all of its kind (RFC 7517, 4.4); a curve has one (RFC 7518, 3.4).

    Raises:
        ValueError: it is no JWKS document, or holds no usable key.
    """
    try:
        document = json.loads(data)
    except RecursionError as error:
        raise ValueError("it nests too deep") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is no JWKS document")
    found: dict[str, PublicKey] = {}
    for position, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP") or entry.get("use") == "enc":
            continue
        key = _public_key(entry)
        if key is not None:
            key_id = entry.get("kid")
            found[key_id if isinstance(key_id, str) else f"#{position}"] = key
    if not found:
        raise ValueError("it holds no public signing key")
    return found


def _public_key(entry: dict[str, Any]) -> PublicKey | None:
    try:
        key = jwt.PyJWK(entry)
    except Exception:  # an unknown curve or algorithm, or fields of the wrong kind: PyJWT raises whatever they cause
        return None
    return PublicKey(key.key, None if entry["kty"] == "RSA" and "alg" not in entry else key.algorithm_name)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Keys come from the configured address or not at all."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        return None


def _read(issuer: Issuer) -> bytes:
    if issuer.jwks_file:
        return Path(issuer.jwks_file).read_bytes()
    context = ssl.create_default_context(cafile=issuer.jwks_ca_file or None)
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
    ends, data = time.monotonic() + FETCH_TIMEOUT_S, bytearray()
    # The access file's check lets only https through, and http to this machine.
    with opener.open(issuer.jwks_url, timeout=FETCH_TIMEOUT_S) as answer:
        while block := answer.read1():
            data += block
            if len(data) > MAX_JWKS_BYTES:
                raise ValueError(f"the document is over {MAX_JWKS_BYTES} bytes")
            if time.monotonic() > ends:
                raise TimeoutError("the document does not end")
    return bytes(data)
