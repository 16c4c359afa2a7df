"""Addresses to listen on, looked at before anything starts: one that cannot be used is said in a line of its own."""

from __future__ import annotations

import contextlib
import errno
import socket

from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.compat.ports import ClientPorts


def check_addresses(host: str, port: int, clients: ClientPorts) -> None:
    """Raises TaktlineError `config_invalid` for an address that is taken, not this machine's, or not for this user.

    The listeners bind a moment later and by themselves, so an address that is taken in between still ends the start.
    """
    _check("HTTP", "--listen", host, port)
    for protocol, listens in (
        ("openpi", clients.openpi),
        ("vla-eval", clients.vla_eval),
        ("groot", clients.groot),
        ("lerobot", clients.lerobot),
    ):
        for listen in listens:
            _check(protocol, f"--{protocol}-listen", listen.host, listen.port)


def _check(protocol: str, option: str, host: str, port: int) -> None:
    reason, usable = "no such host", False
    advice = f"give {option} an address of this machine, 0.0.0.0 for all of them"
    with contextlib.suppress(socket.gaierror, UnicodeError):  # the latter of a name that no host can have
        for family, kind, number, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            try:
                with socket.socket(family, kind, number) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    probe.bind(address)
                usable = True
            except OSError as error:
                reason = error.strerror or str(error)
                if error.errno == errno.EADDRINUSE:
                    advice = f"end what uses it, or give {option} another address"
                elif error.errno == errno.EACCES:
                    advice = f"give {option} a port of 1024 or above, or this user the right to lower ones"
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    usable = False
                    break
    # Of a name's two addresses the machine may have one only, as of localhost's where there is no IPv6.
    if not usable:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"cannot listen for {protocol} on {host}:{port}: {reason}",
            advice,
        )
