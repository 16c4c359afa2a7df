"""The access file: tenants, keys, token issuers, and what callers without a credential may do."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NoReturn
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import ClientProtocol
from taktline_protocol.limits import MIB

from taktline_gateway.access.keys import is_hash
from taktline_gateway.access.rights import ALL_RIGHTS, EVERY_POLICY, Right

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signatures by public keys only: with a shared secret, whoever can check a token could make one."""
Protocol = ClientProtocol | Literal["rest", "stream"]
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much may be asked; None is no limit.

    Attributes:
        requests_per_s: sustained rate of requests.
        burst: requests that may come at once; None is one second's worth, at least 1.
        mib_per_s: sustained rate of request bodies, in MiB.
        body_mib: largest request body, in MiB; never above the gateway's own limit.
    """

    requests_per_s: Annotated[float, Meta(gt=0)] | None = None
    burst: Annotated[int, Meta(ge=1)] | None = None
    mib_per_s: Annotated[float, Meta(gt=0)] | None = None
    body_mib: Annotated[float, Meta(gt=0)] | None = None

    @property
    def body_bytes(self) -> int | None:
        """`body_mib` in bytes."""
        return None if self.body_mib is None else int(self.body_mib * MIB)


NO_RATES = Rates()


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose robots. What a key or token is granted holds only within its tenant's policies and rates."""

    name: str
    policies: tuple[str, ...] = EVERY_POLICY
    weight: Annotated[float, Meta(gt=0)] = 1.0
    rates: Rates = NO_RATES


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One API key, as `taktline-gateway new-key` prints it; the key itself is not in here."""

    id: str
    tenant: str
    hash: str
    rights: tuple[Right, ...] = ("act", "read")
    policies: tuple[str, ...] = EVERY_POLICY
    expires: datetime.datetime | None = None
    rates: Rates = NO_RATES


class Issuer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Who issues access tokens (JWT), and how their claims are read.

    Attributes:
        issuer: the `iss` claim, exactly.
        audience: what the `aud` claim must hold.
        jwks_file: its public keys in a file, or
        jwks_url: at an https address (http on this machine only), fetched again every `refresh_s`.
        jwks_ca_file: certificates to trust for that address; empty is the system's.
        tenant: the tenant of all its tokens; empty reads `tenant_claim`.
        tenants: which tenants it may name; with an empty list none but `tenant`.
        rights_claim: list of rights, or a text of them; absent grants act and read.
        policies_claim: list of policy patterns; absent grants all of the tenant's.
    """

    issuer: str
    audience: str
    jwks_file: str = ""
    jwks_url: str = ""
    jwks_ca_file: str = ""
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1)] = ("RS256", "ES256", "EdDSA")
    tenant: str = ""
    tenants: tuple[str, ...] = ()
    tenant_claim: str = "tenant"
    rights_claim: str = "taktline_rights"
    policies_claim: str = "taktline_policies"
    refresh_s: Annotated[float, Meta(ge=10)] = 300.0


class Anonymous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a caller without a credential may do on one protocol: for clients that can send none, e.g. LeRobot's.

    Attributes:
        networks: addresses it must come from, in CIDR form; empty is from anywhere.
    """

    protocol: Protocol
    tenant: str
    rights: tuple[Right, ...] = ("act", "read")
    policies: tuple[str, ...] = EVERY_POLICY
    networks: tuple[str, ...] = ()
    rates: Rates = NO_RATES


class AccessFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole file. `public` names what needs no credential besides the health probes."""

    tenants: tuple[Tenant, ...] = ()
    keys: tuple[Key, ...] = ()
    issuers: tuple[Issuer, ...] = ()
    anonymous: tuple[Anonymous, ...] = ()
    public: tuple[Literal["metrics"], ...] = ()


def read_access_file(path: Path) -> AccessFile:
    """Reads and checks the file.

    Raises:
        TaktlineError: `config_invalid`, which never quotes a hash; its cause is the OSError where it cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        # With its cause: whoever watches the file reads it again until the system gives it out.
        raise _refusal(path, f"cannot be read: {error.strerror}") from error
    try:
        file = msgspec.json.decode(data, type=AccessFile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _refuse(path, f"is not valid: {error}")
    _check(path, file)
    return file


def _check(path: Path, file: AccessFile) -> None:
    tenants = {tenant.name for tenant in file.tenants}
    for what, names in (
        ("tenant", [tenant.name for tenant in file.tenants]),
        ("key", [key.id for key in file.keys]),
        ("issuer", [issuer.issuer for issuer in file.issuers]),
    ):
        for name in _repeated(names):
            _refuse(path, f"has the {what} {name!r} more than once")
    for name in [*tenants, *(key.id for key in file.keys)]:
        if _NAME.fullmatch(name) is None:
            _refuse(path, f"has the name {name[:64]!r}; names are 1 to 63 lower-case letters, digits and hyphens")
    users = [(f"key {key.id!r}", key.tenant) for key in file.keys]
    users += [(f"anonymous {entry.protocol}", entry.tenant) for entry in file.anonymous]
    for issuer in file.issuers:
        users += [(f"issuer {issuer.issuer!r}", name) for name in (issuer.tenant, *issuer.tenants) if name]
    for user, tenant in users:
        if tenant not in tenants:
            _refuse(path, f"has no tenant {tenant[:64]!r}, which its {user} names")
    for key in file.keys:
        if not is_hash(key.hash):
            _refuse(path, f"has no valid hash for key {key.id!r}; make one with `taktline-gateway new-key`")
        if key.expires is not None and key.expires.tzinfo is None:
            _refuse(path, f"gives no time zone for the expiry of key {key.id!r}; end it with Z")
    for issuer in file.issuers:
        _check_issuer(path, issuer)
    for entry in file.anonymous:
        for network in entry.networks:
            try:
                ipaddress.ip_network(network)
            except ValueError:
                _refuse(path, f"has {network[:64]!r}, which is no network like 10.1.0.0/16")


def _check_issuer(path: Path, issuer: Issuer) -> None:
    name = f"issuer {issuer.issuer!r}"
    if bool(issuer.jwks_file) == bool(issuer.jwks_url):
        _refuse(path, f"must give {name} either jwks_file or jwks_url")
    if issuer.jwks_url and not _is_safe(issuer.jwks_url):
        _refuse(path, f"gives {name} a jwks_url that is not https")
    if not issuer.issuer or not issuer.audience:
        _refuse(path, f"must give {name} a name and an audience")
    if not issuer.tenant and not issuer.tenants:
        _refuse(path, f"must give {name} a tenant, or the tenants that its tokens may name")


def _is_safe(url: str) -> bool:
    """Whether nobody on the way can change what an address answers: https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:  # no address
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in ("127.0.0.1", "localhost", "::1"))


def rights_of(value: object) -> tuple[Right, ...] | None:
    """Rights of a claim: a list, or one text with spaces; None where it is neither. Unknown ones are left out."""
    words: Iterable[object]
    if isinstance(value, str):
        words = value.split()
    elif isinstance(value, list):
        words = value
    else:
        return None
    found = set(words) if all(isinstance(word, str) for word in words) else set()
    return tuple(right for right in ALL_RIGHTS if right in found)


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise _refusal(path, reason) from None


def _refusal(path: Path, reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.CONFIG_INVALID, f"the access file {path} {reason}", "compare it with docs/security.md"
    )
