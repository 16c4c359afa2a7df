"""Which ports the client protocols listen on: the settings, and the command line options that fill them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from taktline_gateway.access.keys import PortToken


@dataclasses.dataclass(frozen=True, slots=True)
class Listen:
    """Where a client protocol is spoken; `policy` is the one at `/`, empty where only one is served."""

    host: str
    port: int
    policy: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientPorts:
    """Where each protocol listens; `groot_api_token` is what GR00T's clients must send, or its hash, or empty."""

    openpi: Sequence[Listen] = ()
    vla_eval: Sequence[Listen] = ()
    groot: Sequence[Listen] = ()
    lerobot: Sequence[Listen] = ()
    groot_api_token: str = dataclasses.field(default="", repr=False)


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
    parser.add_argument(
        "--groot-listen",
        type=groot_listen_of,
        action="append",
        default=[],
        metavar=form,
        help="speak Isaac GR00T's ZeroMQ protocol there, for POLICY or the only one (needs the extra `groot`)",
    )
    parser.add_argument(
        "--lerobot-listen",
        type=listen_of,
        action="append",
        default=[],
        metavar=form,
        help="serve LeRobot's asynchronous inference there, for POLICY or the one that the client's model path names",
    )
    parser.add_argument(
        "--groot-token-file",
        type=token_in,
        metavar="FILE",
        help="file with the API token of GR00T clients, or the hash that new-key prints",
    )


def ports_of(arguments: argparse.Namespace) -> ClientPorts:
    """The ports that the command line asks for."""
    return ClientPorts(
        openpi=tuple(arguments.openpi_listen),
        vla_eval=tuple(arguments.vla_eval_listen),
        groot=tuple(arguments.groot_listen),
        lerobot=tuple(arguments.lerobot_listen),
        groot_api_token=arguments.groot_token_file or "",
    )


def listen_of(text: str) -> Listen:
    """Reads `[POLICY=]HOST:PORT`. Raises argparse.ArgumentTypeError."""
    policy, separator, address = text.rpartition("=")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535 or (separator and not policy):
        raise argparse.ArgumentTypeError(f"{text!r} is not [POLICY=]HOST:PORT")
    return Listen(host.strip("[]"), int(port), policy)


def groot_listen_of(text: str) -> Listen:
    """Reads `[POLICY=]HOST:PORT` where ZeroMQ is installed. Raises argparse.ArgumentTypeError."""
    if importlib.util.find_spec("zmq") is None:
        raise argparse.ArgumentTypeError("pyzmq is not installed: install taktline-gateway[groot]")
    return listen_of(text)


def token_in(path: str) -> str:
    """The token in a file, or its hash, without the white space around it. Raises argparse.ArgumentTypeError."""
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read") from error
    if not token:
        raise argparse.ArgumentTypeError(f"{path} is empty")
    try:
        PortToken(token)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error
    return token
