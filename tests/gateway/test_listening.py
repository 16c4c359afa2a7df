"""An address that cannot be listened on is said in a line of its own, with what to do about it."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from taktline_gateway.compat.ports import ClientPorts
from taktline_gateway.listening import check_addresses
from taktline_protocol import ErrorCode, TaktlineError


def refusal(host: str, port: int) -> TaktlineError:
    with pytest.raises(TaktlineError) as said:
        check_addresses(host, port, ClientPorts())
    assert said.value.code is ErrorCode.CONFIG_INVALID
    assert f"{host}:{port}" in said.value.message
    return said.value


def test_a_free_address_is_taken():
    check_addresses("127.0.0.1", 0, ClientPorts())


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_name_of_no_host_is_told_with_what_is_one(host):
    said = refusal(host, 8080)
    assert "no such host" in said.message
    assert "an address of this machine" in said.next_step


def test_an_address_in_use_is_told_with_its_ways_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "end what uses it" in refusal("127.0.0.1", taken.getsockname()[1]).next_step


def test_a_port_that_is_not_for_this_user_is_told_with_one_that_is(monkeypatch):
    def bind(*_) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", bind)
    said = refusal("127.0.0.1", 80)
    assert "Permission denied" in said.message
    assert "1024" in said.next_step
