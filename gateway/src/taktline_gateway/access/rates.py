"""Token buckets: how much a tenant and a key may ask for, and when a refused one may try again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from taktline_protocol.limits import MIB

from taktline_gateway.access.access_file import Rates


class TokenBucket:
    """`rate` tokens a second, at most `burst` saved up. Time is handed in, in seconds of any monotonic clock."""

    __slots__ = ("_at", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at = now

    def wait_s(self, wanted: float, now: float) -> float:
        """How long until `wanted` tokens are there; 0 where they are. More than `burst` waits for a full bucket."""
        self._level = min(self.burst, self._level + (now - self._at) * self.rate)
        self._at = now
        return max(0.0, (min(wanted, self.burst) - self._level) / self.rate)

    def take(self, amount: float) -> None:
        """Takes tokens that `wait_s` said are there; an amount over the burst leaves a debt."""
        self._level -= amount


@dataclasses.dataclass(slots=True)
class Quota:
    """The buckets of one tenant or key."""

    rates: Rates
    requests: TokenBucket | None
    bytes: TokenBucket | None

    @classmethod
    def of(cls, rates: Rates, now: float) -> Quota:
        """Full buckets."""
        requests = sent = None
        if rates.requests_per_s is not None:
            burst = rates.burst if rates.burst is not None else max(1.0, rates.requests_per_s)
            requests = TokenBucket(rates.requests_per_s, burst, now)
        if rates.mib_per_s is not None:
            sent = TokenBucket(rates.mib_per_s * MIB, rates.mib_per_s * MIB, now)
        return cls(rates, requests, sent)


def admit(quotas: Sequence[Quota], body_bytes: int, now: float) -> float:
    """Takes one request of `body_bytes` from every bucket, or from none.

    Returns:
        0 where it was taken, else the seconds until it could be.
    """
    wait_s = 0.0
    for quota in quotas:
        if quota.requests is not None:
            wait_s = max(wait_s, quota.requests.wait_s(1.0, now))
        if quota.bytes is not None:
            wait_s = max(wait_s, quota.bytes.wait_s(body_bytes, now))
    if wait_s > 0.0:
        return wait_s
    for quota in quotas:
        if quota.requests is not None:
            quota.requests.take(1.0)
        if quota.bytes is not None:
            quota.bytes.take(body_bytes)
    return 0.0
