"""API keys: made here with 256 random bits, kept as a keyed hash, compared in constant time.

A hash that is slow on purpose protects secrets that can be guessed. These cannot: every key is drawn by `new_key`, and
what does not have that form is refused before it is hashed. So one keyed BLAKE2b (about 2 us) is enough, and fits a
check on every request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets

PREFIX = "tkl_"
SECRET_BYTES = 32
SALT_BYTES = 16
_FORM = re.compile(r"tkl_([a-z0-9][a-z0-9-]{0,62})_([A-Za-z0-9_-]{43})")
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_SCHEME = "blake2b"
_PERSON = b"taktline-apikey1"


def new_key(key_id: str) -> tuple[str, str]:
    """A fresh key and the hash to keep of it. Raises ValueError where `key_id` is not of [a-z0-9-]{1,63}."""
    if _ID.fullmatch(key_id) is None:
        raise ValueError(f"{key_id!r} is not of 1 to 63 lower-case letters, digits and hyphens")
    secret = _text(secrets.token_bytes(SECRET_BYTES))
    return f"{PREFIX}{key_id}_{secret}", hash_of(secret, secrets.token_bytes(SALT_BYTES))


def split_key(key: str) -> tuple[str, str] | None:
    """Id and secret of a key, None for what does not have a key's form."""
    match = _FORM.fullmatch(key)
    return None if match is None else (match[1], match[2])


def hash_of(secret: str, salt: bytes) -> str:
    """What is kept of a secret: scheme, salt and keyed hash as one text."""
    return f"{_SCHEME}:{_text(salt)}:{_text(_digest(secret, salt))}"


def is_hash(text: str) -> bool:
    """Whether `text` is what `hash_of` makes."""
    return _parts(text) is not None


class StoredHash:
    """One kept hash, taken apart once so that a check only hashes and compares."""

    __slots__ = ("_digest", "_salt")

    def __init__(self, text: str) -> None:
        """Raises ValueError where `text` is not what `hash_of` makes."""
        parts = _parts(text)
        if parts is None:
            raise ValueError("it is no hash that `taktline-gateway new-key` prints")
        self._salt, self._digest = parts

    def matches(self, secret: str) -> bool:
        """Whether this is the hash of `secret`, in time that does not depend on where they differ."""
        return hmac.compare_digest(_digest(secret, self._salt), self._digest)


class PortToken:
    """What every client of a port must send: a text, or a key of `new_key` of which only the hash is known here."""

    __slots__ = ("_hash", "_text")

    def __init__(self, text: str) -> None:
        """`text` is the token, or its hash. Raises ValueError where it begins like a hash and is none."""
        self._hash = StoredHash(text) if text.startswith(f"{_SCHEME}:") else None
        self._text = text.encode()

    def matches(self, token: object) -> bool:
        """Whether a client sent it, in time that does not depend on where they differ."""
        if not isinstance(token, str):
            return False
        if self._hash is None:
            return hmac.compare_digest(token.encode(errors="replace"), self._text)
        parts = split_key(token)
        return parts is not None and self._hash.matches(parts[1])


def _digest(secret: str, salt: bytes) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=32, key=salt, person=_PERSON).digest()


def _parts(text: str) -> tuple[bytes, bytes] | None:
    parts = text.split(":")
    if len(parts) != 3 or parts[0] != _SCHEME:
        return None
    try:
        salt, digest = (base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True) for part in parts[1:])
    except (binascii.Error, ValueError):
        return None
    return (salt, digest) if len(salt) == SALT_BYTES and len(digest) == 32 else None


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


UNKNOWN = StoredHash(hash_of("", bytes(SALT_BYTES)))
"""Compared with where an id is unknown, so that a known id takes no longer to refuse."""
