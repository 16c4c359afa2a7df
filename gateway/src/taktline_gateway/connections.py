"""How many connections one address and all together may hold, and how those are noticed that hold one for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterator, Sized
from typing import Any

import uvloop

from taktline_gateway.logs import log

HANDSHAKE_TIMEOUT_S = 10.0
"""A TLS handshake that takes longer is given up, as is a request's head (`http_protocol`)."""
CLOSING_TIMEOUT_S = 30.0
"""How long a TLS connection that closes may take to send what is left and to hear the other end's goodbye."""
_logger = logging.getLogger(__name__)
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 60, 15, 4
"""After how much silence the kernel asks whether a peer is still there, how often, how many times in vain."""
DESCRIPTORS_KEPT = 256
"""For workers, files, logs and whoever is just being refused."""
TOO_MANY = b"too many connections; close idle ones, or raise --max-connections"


def connections_within_limit(wanted: int) -> int:
    """How many connections this process can hold, at most `wanted`; its limit of descriptors is raised for them.

    Beyond that a connection could not even be refused: the kernel would have it, and nobody here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + DESCRIPTORS_KEPT
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(1, soft - DESCRIPTORS_KEPT)
    log(
        _logger,
        logging.WARNING,
        "few_descriptors",
        reason=f"{soft} descriptors are enough for {possible} connections, not for the {wanted} of --max-connections",
        next_step="raise the limit of open files (ulimit -Hn, LimitNOFILE=), or lower --max-connections",
    )
    return possible


_NO_CONNECTION = frozenset({errno.EBADF, errno.ENOTSOCK, errno.ENOTCONN})
"""Closed meanwhile, another kind of file, a listener: no connection, or none any longer."""


def peers_at(port: int) -> set[tuple[str, int]]:
    """(address, port) of the other end of each TCP connection that this process holds at one of its own ports.

    For listeners whose library tells of no connection that ends. Runs in any thread.

    Raises OSError where they cannot all be seen: there is no /proc, or no descriptor is left to look with.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            with copy_of(int(name)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
                    peer = connection.getpeername()
                    found.add((address_of(peer[0]), peer[1]))
        except OSError as error:
            if error.errno not in _NO_CONNECTION:
                raise
    return found


@contextlib.contextmanager
def copy_of(file: int) -> Iterator[socket.socket]:
    """The socket with this number, as a copy that stays the same one while it is looked at.

    Raises OSError where there is none: it has been closed since, or is another kind of file by now.
    """
    number = os.dup(file)
    try:
        copied = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        raise
    with copied:
        yield copied


def address_of(host: str) -> str:
    """An address in one spelling: an IPv4 one stays so where its socket is one of IPv6; without its link's name, which
    not everyone tells."""
    host = host.partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


class ConnectionCounts:
    """Connections held now, in all and by address."""

    def __init__(self, most: int, most_by_address: int) -> None:
        self.most = most
        self.most_by_address = most_by_address
        self.total = 0
        self.by_address: Counter[str] = Counter()
        self.remembered: list[Sized] = []
        """Clients of ports whose protocol has a connection outlive its socket or be counted elsewhere, by listener."""

    def full(self, address: str) -> bool:
        """Whether one more from this address would be too many."""
        return self.total >= self.most or self.by_address[address] >= self.most_by_address

    def enter(self, address: str) -> None:
        """One more connection."""
        self.total += 1
        self.by_address[address] += 1

    def leave(self, address: str) -> None:
        """One less."""
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class BoundedLoop(uvloop.Loop):
    """uvloop, but that TLS handshakes with its servers have `HANDSHAKE_TIMEOUT_S` instead of a minute.

    Until then a connection belongs to no protocol that could count it, and uvicorn hands no such limit on.
    """

    async def create_server(  # type: ignore[override]  # of its four signatures one is enough
        self, *args: Any, ssl: Any = None, **options: Any
    ) -> asyncio.AbstractServer:
        """As uvloop's."""
        if ssl is not None:
            options = {
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "ssl_shutdown_timeout": CLOSING_TIMEOUT_S,
                **options,
            }
        server: asyncio.AbstractServer = await super().create_server(*args, ssl=ssl, **options)
        return server


def probe(transport: asyncio.BaseTransport) -> None:
    """Lets the kernel end a connection whose peer is gone without a word, where the protocol itself sends nothing."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
