"""`taktline-worker`: the command that a worker container runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker import logs
from taktline_worker.tls import TlsFiles

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 after a drain and 2 where the policy or the configuration is refused."""
    parser = argparse.ArgumentParser(prog="taktline-worker", description="Serves one robot policy over gRPC.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="load the policy of an engine config and serve it until SIGTERM")
    serve.add_argument("--config", type=Path, required=True, help="engine.json, as the operator writes it")
    serve.add_argument("--listen", default="127.0.0.1:50051", help="gRPC HOST:PORT (default: %(default)s)")
    serve.add_argument("--metrics-listen", default="", help="Prometheus HOST:PORT (default: none)")
    serve.add_argument("--linger-s", type=float, default=1.0, help="seconds between SIGTERM and refusing calls")
    serve.add_argument("--grace-s", type=float, default=30.0, help="seconds that running calls may take after that")
    serve.add_argument("--tls-cert", type=Path, help="serve gRPC over TLS with this certificate (PEM, chain)")
    serve.add_argument("--tls-key", type=Path, help="its private key")
    serve.add_argument("--tls-client-ca", type=Path, help="serve only gateways with a certificate of this issuer")
    serve.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    options = parser.parse_args(arguments)
    logs.configure(options.log_level)
    # gRPC's C core writes plain text to stderr; what it would say reaches the log as an error of ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Threads that spin while they wait make every step tens of times slower where others share the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # torch and the families load only once the arguments are good.
    from taktline_worker import server

    try:
        server.serve(
            server.read_config(options.config),
            server.ServeOptions(
                options.listen, options.metrics_listen, options.linger_s, options.grace_s, _tls_files(options)
            ),
        )
    except TaktlineError as error:
        logger.error(
            error.message, extra={"code": error.code.value, "next_step": error.next_step, "config": str(options.config)}
        )
        print(f"taktline-worker: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _tls_files(options: argparse.Namespace) -> TlsFiles | None:
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, "--tls-cert and --tls-key go together", "give both, or no certificate at all"
        )
    return TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
