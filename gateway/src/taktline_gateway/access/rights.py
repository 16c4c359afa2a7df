"""Principals and what they may do: rights, policies by pattern, and the errors of those who may not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from taktline_protocol import ErrorCode, TaktlineError

Right = Literal["act", "read", "observe"]
"""act: ask a policy for chunks. read: see which policies there are and what they read. observe: metrics, live page,
timelines."""
Kind = Literal["key", "token", "anonymous", ""]
ALL_RIGHTS: tuple[Right, ...] = ("act", "read", "observe")
EVERY_POLICY = ("*",)


@dataclasses.dataclass(frozen=True, slots=True)
class Principal:
    """Whoever asks, as the gateway knows it.

    Attributes:
        tenant: whose robots these are; empty while access is open. Queues share by it.
        name: the key's id or the token's subject, for the log.
        kind: how it was established who asks: `key`, `token` or `anonymous`. Each kind has its own names: a token whose
            subject is the id of a key is not that key.
        policies: patterns, each a name or a prefix followed by `*`; every group must have one that fits.
        weight: the tenant's share of a contended worker, relative to other tenants.
    """

    tenant: str
    name: str
    rights: frozenset[Right]
    policies: tuple[tuple[str, ...], ...] = (EVERY_POLICY,)
    weight: float = 1.0
    kind: Kind = ""

    @property
    def account(self) -> tuple[str, str]:
        """What its own rates are kept under."""
        return self.kind, f"{self.tenant}/{self.name}"

    def may(self, right: Right, policy: str | None = None) -> bool:
        """Whether this principal has `right`, on `policy` where one is named. Who may act may also read."""
        if right not in self.rights and not (right == "read" and "act" in self.rights):
            return False
        return policy is None or all(fits(group, policy) for group in self.policies)

    def require(self, right: Right, policy: str | None = None) -> None:
        """Raises TaktlineError `forbidden`; the same for a policy that does not exist, so that names do not leak."""
        if not self.may(right, policy):
            what = f" policy {policy[:128]!r}" if policy is not None else ""
            raise TaktlineError(
                ErrorCode.FORBIDDEN,
                f"{self.name!r} of tenant {self.tenant!r} has no right to {right}{what}",
                "ask for that right in the gateway's access file, or use another key",
            )

    def robot(self, robot_id: str) -> str:
        """The robot's name among all tenants' robots: two tenants may each have an `arm-1`."""
        return f"{self.tenant}/{robot_id}" if self.tenant else robot_id


OPEN = Principal("", "anyone", frozenset(ALL_RIGHTS))
"""Everyone, where no access file is given."""
_SENDS_NONE = (
    "this client can send no key: have an `anonymous` entry for its protocol in the gateway's access file, or a proxy"
    " that adds authorization"
)
_SHOW_A_KEY = {
    "openpi": "give the client a valid key or token: WebsocketClientPolicy(..., api_key=KEY)",
    "groot": "give the client a valid key or token: PolicyClient(..., api_token=KEY)",
    "lerobot": _SENDS_NONE,
    "vla-eval": _SENDS_NONE,
}
"""How the published clients that do not set the header themselves show a credential."""
NOBODY = Principal("", "nobody", frozenset())
"""Sees nothing: stands for the caller where an error is written without knowing who will read it."""


def fits(patterns: Sequence[str], policy: str) -> bool:
    """Whether a policy's name is one of `patterns`, or begins with one that ends in `*`."""
    return any(policy.startswith(pattern[:-1]) if pattern.endswith("*") else policy == pattern for pattern in patterns)


def unauthenticated(reason: str, *, retry_after_ms: float | None = None) -> TaktlineError:
    """The error of a caller who is not known. The reason never holds what was presented."""
    return TaktlineError(
        ErrorCode.UNAUTHENTICATED,
        reason,
        "send a valid key or token: Authorization: Bearer KEY (SDK: api_key=, TAKTLINE_API_KEY, --api-key-file)",
        retry_after_ms=retry_after_ms,
    )


def told_over(protocol: str, error: TaktlineError) -> TaktlineError:
    """`error` with the next step that a client of `protocol` can take: each shows its key in its own way, or none."""
    shown = _SHOW_A_KEY.get(protocol)
    if shown is None or error.code is not ErrorCode.UNAUTHENTICATED:
        return error
    return TaktlineError(error.code, error.message, shown, retry_after_ms=error.retry_after_ms)
