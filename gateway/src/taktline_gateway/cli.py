"""The `taktline-gateway` command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from importlib.metadata import version
from pathlib import Path

from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.limits import MIB, Limits

from taktline_gateway import logs
from taktline_gateway.access.command import add_arguments, make_key
from taktline_gateway.access.exposure import check_exposure
from taktline_gateway.compat import ports
from taktline_gateway.connections import BoundedLoop, connections_within_limit
from taktline_gateway.listening import check_addresses
from taktline_gateway.server import serve
from taktline_gateway.service import Settings
from taktline_gateway.stream import settings as stream_settings
from taktline_gateway.tls import TlsFiles


def main() -> None:
    """Entry point. Exits with 2 on a configuration that cannot be served."""
    arguments = _parser().parse_args()
    try:
        arguments.run(arguments)
    except TaktlineError as error:
        print(f"taktline-gateway: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _serve(arguments: argparse.Namespace) -> None:
    logs.configure(arguments.log_level)
    settings = Settings(
        routes=arguments.routes,
        limits=Limits(body_bytes=int(arguments.max_body_mib * MIB)),
        max_queued=arguments.max_queued,
        drain_settle_s=arguments.drain_settle_s,
        drain_limit_s=arguments.drain_limit_s,
        client_ports=ports.ports_of(arguments),
        stream=stream_settings.settings_of(arguments),
        access_file=arguments.access_file,
        audit_log=arguments.audit_log,
        tls=_server_files(arguments),
        worker_tls=_worker_files(arguments),
        max_connections=connections_within_limit(arguments.max_connections),
        max_connections_by_address=arguments.max_connections_by_address,
    )
    host, port = arguments.listen
    check_exposure(settings, host, allow_anonymous=arguments.allow_anonymous)
    check_addresses(host, port, settings.client_ports)
    with asyncio.Runner(loop_factory=BoundedLoop) as runner:
        runner.run(serve(settings, host, port))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False or action.default in ("", [])
        return action.help if says_nothing else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="taktline-gateway", description="Serves robots' requests for action chunks.")
    parser.add_argument("--version", action="version", version=f"taktline-gateway {version('taktline-gateway')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("serve", help="serve until SIGTERM", formatter_class=_Help)
    run.set_defaults(run=_serve)
    key = commands.add_parser("new-key", help="make an API key", formatter_class=_Help)
    key.set_defaults(run=make_key)
    add_arguments(key)
    run.add_argument("--routes", type=Path, required=True, help="routing table, read again when it changes")
    run.add_argument("--listen", type=_address, default="127.0.0.1:8080", metavar="HOST:PORT", help="where to listen")
    ports.add_arguments(run)
    stream_settings.add_arguments(run)
    run.add_argument(
        "--access-file",
        type=Path,
        help="who may ask what (docs/security.md), read again when it changes; without it everyone may ask everything",
    )
    run.add_argument(
        "--allow-anonymous",
        action="store_true",
        help="without --access-file, listen on more than this machine's own addresses all the same",
    )
    run.add_argument("--audit-log", type=Path, help="file of access decisions, JSON lines; default: the process's log")
    run.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve over TLS with this certificate (PEM, chain)")
    run.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    run.add_argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="ask clients for a certificate of this issuer (mTLS)"
    )
    run.add_argument("--worker-tls-ca", type=Path, metavar="FILE", help="reach workers over TLS; their issuer")
    run.add_argument("--worker-tls-cert", type=Path, metavar="FILE", help="certificate that the gateway shows workers")
    run.add_argument("--worker-tls-key", type=Path, metavar="FILE", help="its private key")
    run.add_argument(
        "--worker-tls-name",
        default="",
        metavar="NAME",
        help="name in the workers' certificates; default: the address",
    )
    run.add_argument(
        "--max-connections",
        type=int,
        default=10_000,
        help="connections held at once; as many again on each of LeRobot's ports",
    )
    run.add_argument("--max-connections-by-address", type=int, default=2_000, help="the same for one client address")
    run.add_argument("--max-body-mib", type=float, default=16.0, help="largest request body")
    run.add_argument("--max-queued", type=int, default=10_000, help="observations that may wait for one policy")
    run.add_argument("--drain-settle-s", type=float, default=1.0, help="on SIGTERM, keep answering at least so long")
    run.add_argument("--drain-limit-s", type=float, default=25.0, help="on SIGTERM, stop at the latest after so long")
    run.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def _server_files(arguments: argparse.Namespace) -> TlsFiles | None:
    given = (arguments.tls_cert, arguments.tls_key)
    if (given[0] is None) != (given[1] is None) or (given[0] is None and arguments.tls_client_ca is not None):
        raise TaktlineError(ErrorCode.CONFIG_INVALID, "--tls-cert and --tls-key go together", "give both, or none")
    if given[0] is None:
        return None
    return TlsFiles(cert=given[0], key=given[1], ca=arguments.tls_client_ca)


def _worker_files(arguments: argparse.Namespace) -> TlsFiles | None:
    ca, cert, key = arguments.worker_tls_ca, arguments.worker_tls_cert, arguments.worker_tls_key
    if (cert is None) != (key is None) or (ca is None and cert is not None):
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "--worker-tls-cert, --worker-tls-key and --worker-tls-ca go together",
            "give the issuer of the workers' certificates, and certificate and key where workers ask for one",
        )
    return None if ca is None else TlsFiles(cert=cert, key=key, ca=ca, name=arguments.worker_tls_name)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)
