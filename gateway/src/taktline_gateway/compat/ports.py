"""Which ports the client protocols listen on: the settings, and the command line options that fill them."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Listen:
    """Where a client protocol is spoken; `policy` is the one at `/`, empty where only one is served."""

    host: str
    port: int
    policy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientPorts:
    """Where each protocol listens."""

    openpi: Sequence[Listen] = ()
    vla_eval: Sequence[Listen] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `ports_of` reads."""
    form = "[POLICY=]HOST:PORT"
    parser.add_argument(
        "--openpi-listen",
        type=listen_of,
        action="append",
        default=[],
        metavar=form,
        help="speak openpi's WebSocket protocol there: for POLICY at /, for every policy at /v1/policies/POLICY/openpi",
    )
    parser.add_argument(
        "--vla-eval-listen",
        type=listen_of,
        action="append",
        default=[],
        metavar=form,
        help="speak the vla-eval harness's protocol there: for POLICY at /, for every at /v1/policies/POLICY/vla-eval",
    )


def ports_of(arguments: argparse.Namespace) -> ClientPorts:
    """The ports that the command line asks for."""
    return ClientPorts(openpi=tuple(arguments.openpi_listen), vla_eval=tuple(arguments.vla_eval_listen))


def listen_of(text: str) -> Listen:
    """Reads `[POLICY=]HOST:PORT`. Raises argparse.ArgumentTypeError."""
    policy, separator, address = text.rpartition("=")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or (separator and not policy):
        raise argparse.ArgumentTypeError(f"{text!r} is not [POLICY=]HOST:PORT")
    return Listen(host.strip("[]"), int(port), policy)
