"""Ports for the programs that tests start, from a block that no other run of the tests on this machine has.

They lie below the range from which Linux takes ports by itself (from 32768 on, where nobody has set
net.ipv4.ip_local_port_range otherwise; a host with a lower one has no such guard): whoever asks for any port, or
connects, gets none of them between our choice and the moment when the program listens.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

FIRST = 20_000
BLOCK = 250
BLOCKS = 40


class PortBlock:
    """One block of ports, held by a lock that goes with the process."""

    def __init__(self, folder: Path) -> None:
        """Take the first block that is free. `folder` holds a lock file for each. Raises RuntimeError without any."""
        folder.mkdir(exist_ok=True)
        for number in range(BLOCKS):
            held = (folder / f"block-{number}").open("w")
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.close()
                continue
            self._lock: TextIO = held
            self.first = FIRST + number * BLOCK
            self._next: Iterator[int] = itertools.cycle(range(self.first, self.first + BLOCK))
            return
        raise RuntimeError(f"all {BLOCKS} blocks of ports are taken: does something hold locks in {folder}?")

    def take(self) -> int:
        """A port that nobody listens on; the one given longest ago comes last. Raises RuntimeError without any."""
        for port in itertools.islice(self._next, BLOCK):
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise RuntimeError(f"something listens on each of the ports {self.first} to {self.first + BLOCK - 1}")

    def release(self) -> None:
        """Give the block back."""
        self._lock.close()


_BLOCKS: dict[int, PortBlock] = {}  # by process: a forked one takes a block of its own


def free_port() -> int:
    """A port that nobody listens on, none given lately: whoever asked for that may be about to listen."""
    block = _BLOCKS.get(os.getpid())
    if block is None:
        folder = Path(tempfile.gettempdir()) / f"taktline-test-ports-{os.getuid()}"
        block = _BLOCKS[os.getpid()] = PortBlock(folder)
    return block.take()
