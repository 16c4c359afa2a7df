"""Addresses: free ports, and a loopback network of its own for every node, so that container ports never clash."""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

from taktline_protocol.errors import ErrorCode, TaktlineError

NODE_PORT = 10250
"""Port of the node's own endpoint; holding it on the network's first address is what reserves the network."""
LAST_HOST = 254
PORTS = (10_300, 20_000)
FEWEST = 500
"""A part of the ports is chosen from only where it has so many."""
TRIES = 1000
GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last of the ports that Linux gives to whoever connects, or asks for any."""
_given: deque[int] = deque(maxlen=200)
"""Ports given lately: whoever asked for one may be about to listen on it."""


def ports() -> tuple[int, int]:
    """First port that may be chosen, and the one after the last: none that the system gives away by itself.

    Whoever connects, or asks for any port, gets one from 32768 to 60999 (Linux, where nobody has set another range):
    between a choice among those and the moment when a program listens, another one is quick to take it on a busy
    machine. Where the range is so wide that it leaves too few, it cannot be helped.
    """
    try:
        first, last = map(int, GIVEN_AWAY.read_text().split())
    except (OSError, ValueError):  # not Linux: the others give away the ports from 49152 on
        return PORTS
    left = [(PORTS[0], min(PORTS[1], first)), (last + 1, 65536), (1024, first)]
    return next(((low, high) for low, high in left if high - low >= FEWEST), PORTS)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses right now, nor is given as any port before a program listens on it.

    Raises:
        TaktlineError: none of many that were tried is free.
    """
    low, high = ports()
    for _ in range(TRIES):
        port = random.randrange(low, high)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.append(port)
        return port
    raise TaktlineError(ErrorCode.OVERLOADED, f"no free port among {low} to {high - 1}", "end what listens there")


class LoopbackNetwork:
    """One /24 of 127.0.0.0/8. The first address is the node's, the others are given to Pods in turn."""

    def __init__(self) -> None:
        """Reserve a random network that no other node of this machine holds. Raises TaktlineError."""
        for _ in range(64):
            prefix = f"127.{random.randrange(64, 128)}.{random.randrange(256)}"
            listener = socket.socket()
            try:
                listener.bind((f"{prefix}.1", NODE_PORT))
            except OSError:
                listener.close()
                continue
            self._prefix = prefix
            self.node_address = f"{prefix}.1"
            self.listener = listener
            self._in_use: set[int] = set()
            self._named: dict[str, str] = {}
            self._last = 1
            return
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "no address of 127.64.0.0/10 can be bound",
            "the process node needs Linux, where all of 127.0.0.0/8 is local",
        )

    def take(self) -> str:
        """An address no running Pod has; the one returned longest ago comes last. Raises TaktlineError when full."""
        for step in range(1, LAST_HOST):
            host = 2 + (self._last - 1 + step - 1) % (LAST_HOST - 1)
            if host not in self._in_use:
                self._in_use.add(host)
                self._last = host
                return f"{self._prefix}.{host}"
        raise TaktlineError(
            ErrorCode.OVERLOADED, f"all {LAST_HOST - 1} Pod addresses are in use", "delete Pods or start another node"
        )

    def take_named(self, name: str) -> str:
        """The address of a Pod with a DNS name: always the same one, also before that Pod is there, and after."""
        if name not in self._named:
            self._named[name] = self.take()
        return self._named[name]

    def give_back(self, address: str) -> None:
        """The Pod with this address is gone; the address of a name stays with the name."""
        if address not in self._named.values():
            self._in_use.discard(int(address.rsplit(".", 1)[1]))

    def close(self) -> None:
        """Release the network."""
        self.listener.close()
