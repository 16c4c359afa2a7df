"""Ports for local programs: none that the system gives to whoever connects before the program listens."""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

import pytest
from taktline_local import network
from taktline_protocol.errors import TaktlineError


def test_no_port_is_one_that_the_system_gives_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller manager could not start because a connection had taken the port that was chosen for it."""
    monkeypatch.setattr(network, "_given", deque(maxlen=200))
    found = [network.free_port() for _ in range(100)]
    assert len(set(found)) == 100, "none is given twice in a row"
    if network.GIVEN_AWAY.exists():
        first, last = map(int, network.GIVEN_AWAY.read_text().split())
        if first <= 1024 + network.FEWEST and last > 65535 - network.FEWEST:
            pytest.skip(f"this host gives away ports {first} to {last}, which leaves too few")
        assert not [port for port in found if first <= port <= last]


@pytest.mark.parametrize(
    ("given_away", "chosen"),
    [
        ("32768\t60999\n", network.PORTS),
        ("15000\t65000", (10_300, 15_000)),
        ("10500 60999", (61_000, 65_536)),
        ("9000 65535", (1024, 9000)),
        ("1024 65535", network.PORTS),
        ("what is this", network.PORTS),
        (None, network.PORTS),
    ],
)
def test_ports_are_chosen_beside_those_that_the_system_gives_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_away: str | None, chosen: tuple[int, int]
) -> None:
    told = tmp_path / "ip_local_port_range"
    if given_away is not None:
        told.write_text(given_away)
    monkeypatch.setattr(network, "GIVEN_AWAY", told)
    assert network.ports() == chosen


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
        monkeypatch.setattr(network, "ports", lambda: (taken, taken + 1))
        with pytest.raises(TaktlineError, match="no free port"):
            network.free_port()
    monkeypatch.setattr(network, "_given", [])
    assert network.free_port() == taken
