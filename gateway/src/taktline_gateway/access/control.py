"""The one gate of all fronts: from what a caller presents to a principal, and from a principal to yes or no."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import ipaddress
import logging
import time
from pathlib import Path

from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.access.access_file import (
    AccessFile,
    Anonymous,
    Key,
    Protocol,
    Rates,
    Tenant,
    read_access_file,
)
from taktline_gateway.access.audit import AuditLog, Decision
from taktline_gateway.access.keys import UNKNOWN, StoredHash, split_key
from taktline_gateway.access.rates import Quota, admit
from taktline_gateway.access.rights import OPEN, Kind, Principal, Right, told_over, unauthenticated
from taktline_gateway.access.tokens import TokenVerifier
from taktline_gateway.logs import log
from taktline_gateway.routes import POLL_S, FileChanges, file_identity

MAX_CREDENTIAL_CHARS = 8192
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Credential:
    """What a caller presents. The secret never appears in a log or in an error."""

    protocol: Protocol
    peer: str
    secret: str | None = dataclasses.field(default=None, repr=False)

    @property
    def address(self) -> str:
        """The peer without its port."""
        return _address(self.peer)


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownKey:
    key: Key
    hash: StoredHash
    principal: Principal


class AccessControl:
    """Authenticates, authorises, limits and writes the audit log. Without an access file everyone may do everything."""

    def __init__(self, path: Path | None = None, audit: AuditLog | None = None) -> None:
        """Reads the access file. Raises TaktlineError `config_invalid`."""
        self.audit = audit or AuditLog()
        self._path = path
        self._changes = FileChanges(lambda: None if path is None else file_identity(path))
        self._watcher: asyncio.Task[None] | None = None
        self._started = False
        self._quotas: dict[tuple[str, str], Quota] = {}
        self._tokens = TokenVerifier(())
        self._closing: set[asyncio.Task[None]] = set()
        self._apply(read_access_file(path) if path is not None else AccessFile())

    @property
    def open(self) -> bool:
        """Whether everyone may do everything, as no access file was given."""
        return self._path is None

    @property
    def public_metrics(self) -> bool:
        """Whether /metrics needs no credential."""
        return self.open or "metrics" in self._file.public

    def weights(self) -> dict[str, float]:
        """Each tenant's share of a contended worker, relative to the others'."""
        return {tenant.name: tenant.weight for tenant in self._file.tenants}

    async def start(self) -> None:
        """Begins to watch the access file and the issuers' keys."""
        self._started = True
        self._tokens.start()
        if self._path is not None:
            self._watcher = asyncio.create_task(self._watch(self._path))

    async def close(self) -> None:
        """Stops watching and writes out the audit log."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._tokens.close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self.audit.close()

    # ----- who

    async def authenticate(self, credential: Credential) -> Principal:
        """Who this is. Raises TaktlineError `unauthenticated`."""
        if self.open:
            return OPEN
        try:
            if credential.secret is None:
                return self._anonymous_principal(credential)
            return await self._known_principal(credential.secret)
        except TaktlineError as error:
            self._note(OPEN, credential, error.code.value, "", "", "", "")
            told = told_over(credential.protocol, error)
            if told is error:
                raise
            raise told from None  # its frames hold the credential

    async def _known_principal(self, secret: str) -> Principal:
        if len(secret) > MAX_CREDENTIAL_CHARS:
            raise unauthenticated("the credential is too long")
        parts = split_key(secret)
        if parts is not None:
            return self._key_principal(*parts)
        if secret.count(".") == 2:
            return await self._token_principal(secret)
        raise unauthenticated("what was presented is neither an API key nor a token of this gateway")

    def _key_principal(self, key_id: str, secret: str) -> Principal:
        known = self._keys.get(key_id)
        if not (known.hash if known is not None else UNKNOWN).matches(secret) or known is None:
            raise unauthenticated("the API key is not known here")
        expires = known.key.expires
        if expires is not None and datetime.datetime.now(datetime.UTC) >= expires:
            raise unauthenticated(f"the API key {key_id!r} has expired")
        return known.principal

    async def _token_principal(self, token: str) -> Principal:
        claims = await self._tokens.verify(token)
        tenant = self._tenants.get(claims.tenant)
        if tenant is None:
            raise unauthenticated(f"the token's tenant {claims.tenant[:64]!r} is not known here")
        return _principal(tenant, "token", claims.subject, claims.rights, claims.policies)

    def _anonymous_principal(self, credential: Credential) -> Principal:
        for entry, principal in self._anonymous:
            if entry.protocol == credential.protocol and _from_networks(credential.address, entry):
                return principal
        raise unauthenticated(f"this gateway wants an API key or a token over {credential.protocol}")

    # ----- what

    def authorise(
        self,
        principal: Principal,
        credential: Credential,
        right: Right,
        policy: str | None = None,
        *,
        robot: str = "",
        request_id: str = "",
    ) -> None:
        """Lets pass or raises TaktlineError `forbidden`; both go into the audit log."""
        if self.open:
            return
        try:
            principal.require(right, policy)
        except TaktlineError as error:
            self._note(principal, credential, error.code.value, right, policy or "", robot, request_id)
            raise
        self._note(principal, credential, "allowed", right, policy or "", robot, request_id)

    def admit(
        self,
        principal: Principal,
        credential: Credential,
        right: Right | None,
        policy: str | None,
        body_bytes: int,
        *,
        robot: str = "",
        request_id: str = "",
    ) -> None:
        """Counts one request against the tenant's and the caller's rates and body limits; refusals are audited.

        Raises:
            TaktlineError: `rate_limited` with the time after which it would be admitted, or `body_too_large`;
                `unauthenticated` where nothing has established who asks.
        """
        if self.open:
            return
        try:
            self._count(principal, body_bytes, time.monotonic())
        except TaktlineError as error:
            self._note(principal, credential, error.code.value, right or "", policy or "", robot, request_id)
            raise

    def _count(self, principal: Principal, body_bytes: int, now: float) -> None:
        if principal is OPEN:
            raise unauthenticated("this gateway wants an API key or a token")
        quotas = []
        for kind, name in (("tenant", principal.tenant), principal.account):
            rates = self._rates.get((kind, name))
            if rates is None:
                continue
            if rates.body_bytes is not None and body_bytes > rates.body_bytes:
                raise TaktlineError(
                    ErrorCode.BODY_TOO_LARGE,
                    f"the body has {body_bytes} bytes; {kind} {name!r} may send {rates.body_bytes}",
                    "send fewer or smaller images: JPEG at the policy's own resolution loses nothing",
                )
            quota = self._quotas.get((kind, name))
            if quota is None or quota.rates != rates:
                quota = self._quotas[kind, name] = Quota.of(rates, now)
            quotas.append(quota)
        wait_s = admit(quotas, body_bytes, now)
        if wait_s > 0.0:
            raise TaktlineError(
                ErrorCode.RATE_LIMITED,
                f"tenant {principal.tenant!r} or its {principal.kind} {principal.name!r} asks for more than its rate",
                "slow down, or raise `rates` in the access file",
                retry_after_ms=max(1.0, round(1e3 * wait_s, 1)),
            )

    def _note(
        self,
        principal: Principal,
        credential: Credential,
        outcome: str,
        right: str,
        policy: str,
        robot: str,
        request_id: str,
    ) -> None:
        caller = principal.name if principal is not OPEN else ""
        decision = Decision(
            outcome,
            principal.tenant,
            caller,
            right,
            policy[:128],
            credential.protocol,
            credential.address,
            principal.kind,
        )
        self.audit.note(decision, time.monotonic(), robot=robot[:128], request_id=request_id)

    # ----- the file

    def _apply(self, file: AccessFile) -> None:
        self._file = file
        self._tenants = {tenant.name: tenant for tenant in file.tenants}
        self._keys = {
            key.id: _KnownKey(
                key,
                StoredHash(key.hash),
                _principal(self._tenants[key.tenant], "key", key.id, key.rights, key.policies),
            )
            for key in file.keys
        }
        self._anonymous = [
            (
                entry,
                _principal(
                    self._tenants[entry.tenant],
                    "anonymous",
                    f"anonymous-{entry.protocol}",
                    entry.rights,
                    entry.policies,
                ),
            )
            for entry in file.anonymous
        ]
        self._rates: dict[tuple[str, str], Rates] = {("tenant", tenant.name): tenant.rates for tenant in file.tenants}
        for key in file.keys:
            self._rates["key", f"{key.tenant}/{key.id}"] = key.rates
        for entry in file.anonymous:
            self._rates["anonymous", f"{entry.tenant}/anonymous-{entry.protocol}"] = entry.rates
        self._quotas = {name: quota for name, quota in self._quotas.items() if name in self._rates}
        self._tokens = TokenVerifier(file.issuers, self._tokens)
        if self._started:
            self._tokens.start()

    async def _watch(self, path: Path) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self._look(path)
                self.audit.write_due(time.monotonic())
            except OSError as error:  # the audit log cannot be written; keys must be revocable all the same
                log(_logger, logging.ERROR, "audit_unwritable", reason=str(error)[:300])

    def _look(self, path: Path) -> None:
        """Applies the file where it has changed; one that is not valid changes nothing."""
        if self._changes.due():
            try:
                file = read_access_file(path)
            except TaktlineError as error:
                if self._changes.failed(error):
                    log(_logger, logging.ERROR, "access_refused", code=error.code.value, reason=str(error))
                return
            before, replaced = self._file, self._tokens
            self._apply(file)
            closing = asyncio.create_task(replaced.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            old, new = ({key.id for key in one.keys} for one in (before, file))
            self.audit.event("access_applied", keys_added=sorted(new - old), keys_removed=sorted(old - new))


def _principal(
    tenant: Tenant, kind: Kind, name: str, rights: tuple[Right, ...], policies: tuple[str, ...]
) -> Principal:
    return Principal(tenant.name, name, frozenset(rights), (tenant.policies, policies), tenant.weight, kind)


def _address(peer: str) -> str:
    """`1.2.3.4:567`, `[::1]:567`, `tcp://..`, and gRPC's `ipv4:1.2.3.4:567` without scheme and port."""
    for scheme in ("ipv4:", "ipv6:", "tcp://"):
        peer = peer.removeprefix(scheme)
    peer = peer.replace("%5B", "[").replace("%5D", "]")
    host, _, port = peer.rpartition(":")
    return (host if port.isdigit() and (host.startswith("[") or ":" not in host) else peer).strip("[]") or peer


def _from_networks(address: str, entry: Anonymous) -> bool:
    if not entry.networks:
        return True
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None) or found
    return any(mapped in ipaddress.ip_network(network) for network in entry.networks)
