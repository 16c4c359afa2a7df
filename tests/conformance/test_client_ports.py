"""Command line of the client ports: what cannot be served is refused at start, with the option named."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(sys.executable).parent / "taktline-gateway")


def serve(tmp_path, *flags):
    routes = tmp_path / "routes.json"
    routes.write_text('{"routes": []}')
    command = [PROGRAM, "serve", "--routes", str(routes), "--listen", "127.0.0.1:0", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("option", ["openpi", "vla-eval", "groot", "lerobot"])
@pytest.mark.parametrize("address", ["x", "=127.0.0.1:1", "127.0.0.1:70000", ":8000"])
def test_what_is_no_address(tmp_path, option, address):
    done = serve(tmp_path, f"--{option}-listen", address)
    assert done.returncode == 2
    assert f"--{option}-listen: {address!r} is not [POLICY=]HOST:PORT" in done.stderr


@pytest.mark.parametrize("option", ["openpi", "vla-eval", "groot", "lerobot"])
def test_an_address_in_use(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(tmp_path, f"--{option}-listen", f"127.0.0.1:{port}")
    assert done.returncode != 0
    assert f"config_invalid: cannot listen for {option} on 127.0.0.1:{port}" in done.stderr


def test_token_file_that_is_absent_or_empty(tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for path in (empty, tmp_path / "absent"):
        assert serve(tmp_path, "--groot-token-file", str(path)).returncode == 2


def test_a_token_file_with_half_a_hash_is_refused_and_not_shown(tmp_path):
    """Taken for a token it would let in whoever has read it."""
    path = tmp_path / "token"
    path.write_text("blake2b:c2FsdA:aGFzaA")
    done = serve(tmp_path, "--groot-token-file", str(path))
    assert done.returncode == 2
    assert "it is no hash that `taktline-gateway new-key` prints" in done.stderr
    assert "c2FsdA" not in done.stderr
