"""Ports for local programs: none that the system gives to whoever connects before the program listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
from taktline_local import network
from taktline_protocol.errors import TaktlineError


def test_no_port_is_one_that_the_system_gives_away() -> None:
    """A controller manager could not start because a connection had taken the port that was chosen for it."""
    found = [network.free_port() for _ in range(100)]
    assert len(set(found)) == 100, "none is given twice in a row"
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(ephemeral.read_text().split()[0]) if ephemeral.exists() else 32768
    if first < network.PORTS[1]:
        pytest.skip(f"this host gives away ports from {first} on, which leaves none that are safe")
    assert max(found) < first


def test_a_port_on_which_somebody_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_given", [])
    with socket.socket() as held:
        for taken in random.sample(range(*network.PORTS), 100):
            try:
                held.bind(("127.0.0.1", taken))
                break
            except OSError:
                continue
        held.listen()
        monkeypatch.setattr(network, "PORTS", (taken, taken + 1))
        with pytest.raises(TaktlineError, match="no free port"):
            network.free_port()
    monkeypatch.setattr(network, "_given", [])
    assert network.free_port() == taken
