"""Robots that account for every request: exactly one outcome each, with the time it took against its deadline.

A robot that loses its connection counts the request it had open as `connection` and connects again, to the next
gateway where there are several. Nothing is retried: what a client saw is what is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.gateway.links import (
    CHUNK,
    GrootLink,
    KserveLink,
    LerobotLink,
    Link,
    OpenpiLink,
    RestLink,
    StreamLink,
    VlaEvalLink,
)
from benchmarks.gateway.processes import free_port

RECONNECT_S = 0.05
CONNECTION = "connection"
"""The client saw its connection refused, reset or closed."""
SILENT = "silent"
"""Neither an answer nor an error within the deadline and the bound: what must never happen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One request: when it was sent (monotonic, s), what came, how long after its deadline (ms; negative is before)."""

    robot: str
    protocol: str
    sent_at: float
    word: str
    over_ms: float
    took_ms: float


@dataclasses.dataclass
class Book:
    """All outcomes of a run."""

    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    sent: int = 0

    def words(self) -> Counter[str]:
        """How many of each."""
        return Counter(outcome.word for outcome in self.outcomes)

    @property
    def worst_over_ms(self) -> float:
        """The longest that a client was left without a word after its deadline."""
        return max((outcome.over_ms for outcome in self.outcomes), default=0.0)

    def chunks_after(self, instant: float) -> int:
        """Chunks for requests sent after an instant."""
        return sum(outcome.word == CHUNK and outcome.sent_at > instant for outcome in self.outcomes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What each robot does.

    Attributes:
        addresses: (host, port) of the gateways, in the order in which they are tried.
        ports: the same for each of `OWN_PORTS` that robots speak; see `client_ports`.
        period_s: from one request to the next.
        bound_s: how long after its deadline a request may at most go without a word.
    """

    policy: str
    addresses: Sequence[tuple[str, int]]
    ports: Mapping[str, Sequence[tuple[str, int]]] = dataclasses.field(default_factory=dict)
    period_s: float = 0.05
    budget_ms: float = 500.0
    bound_s: float = 3.0


class AccountedRobot:
    """Asks at a fixed rate until told to stop."""

    def __init__(self, protocol: str, number: int, plan: Plan, book: Book) -> None:
        self.name = f"{protocol}-{number}-{os.urandom(3).hex()}"
        self._protocol = protocol
        self._plan = plan
        self._book = book
        self._at = number
        self._seq = 0
        self._link: Link | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """One request a period; a late answer delays the next request, as a robot that waits for its chunk."""
        plan = self._plan
        due = time.monotonic() + plan.period_s * (self._at % 16) / 16
        while not stop.is_set():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent_at = time.monotonic()
            due = max(due + plan.period_s, sent_at)
            self._seq += 1
            self._book.sent += 1
            limit_s = plan.budget_ms / 1e3 + plan.bound_s
            try:
                async with asyncio.timeout(limit_s):
                    word = await self._ask()
            except TimeoutError:
                word = SILENT
                await self._drop()
            except (OSError, EOFError, asyncio.IncompleteReadError, ConnectionError):
                word = CONNECTION
                await self._drop()
            took_ms = 1e3 * (time.monotonic() - sent_at)
            self._book.outcomes.append(
                Outcome(self.name, self._protocol, sent_at, word, took_ms - plan.budget_ms, took_ms)
            )
            if word == CONNECTION:
                await asyncio.sleep(RECONNECT_S)
        await self._drop()

    async def _ask(self) -> str:
        if self._link is None:
            plan = self._plan
            addresses = plan.ports.get(self._protocol, plan.addresses)
            host, port = addresses[self._at % len(addresses)]
            self._link = LINKS[self._protocol](host, port, self.name, plan.policy, plan.budget_ms)
            await self._link.open()
        word = await self._link.ask(self._seq)
        if self._link.leaving:
            await self._drop()
        return word

    async def _drop(self) -> None:
        self._at += 1  # the next gateway, where there is one
        link, self._link = self._link, None
        if link is not None:
            await link.cut()


LINKS: dict[str, type[Link]] = {
    "rest": RestLink,
    "stream": StreamLink,
    "openpi": OpenpiLink,
    "groot": GrootLink,
    "lerobot": LerobotLink,
    "vla-eval": VlaEvalLink,
    "kserve": KserveLink,
}
PROTOCOLS = tuple(LINKS)
OWN_PORTS = ("openpi", "groot", "lerobot", "vla-eval")
"""Protocols that a gateway speaks on ports of their own."""
CLIENTS = {"vla-eval": {"execute_steps": 1}}
"""What the route must say so that each observation of each protocol reaches a worker."""


@contextlib.asynccontextmanager
async def fleet(plan: Plan, protocols: Sequence[str], robots: int):  # type: ignore[no-untyped-def]
    """Robots of each protocol in turn, for as long as the context lasts; yields their book, complete on leaving."""
    book = Book()
    stop = asyncio.Event()
    drivers = [
        asyncio.create_task(AccountedRobot(protocols[number % len(protocols)], number, plan, book).run(stop))
        for number in range(robots)
    ]
    try:
        yield book
    finally:
        stop.set()
        await asyncio.gather(*drivers)


def client_ports() -> dict[str, int]:
    """A free port for each of `OWN_PORTS`."""
    return {protocol: free_port() for protocol in OWN_PORTS}


def listen_flags(ports: Mapping[str, int]) -> list[str]:
    """What a gateway is started with to speak those protocols there."""
    return [word for name, port in ports.items() for word in (f"--{name}-listen", f"127.0.0.1:{port}")]
