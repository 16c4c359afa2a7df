"""`taktline-worker`: the command that a worker container runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker import group, logs
from taktline_worker.idle_threads import let_others_run
from taktline_worker.tls import TlsFiles

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 after a drain, 2 where policy or configuration is refused, 3 for a lost group."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["model"]:
        from taktline_worker.delivery import command

        return command.main(words[1:])
    parser = argparse.ArgumentParser(prog="taktline-worker", description="Serves one robot policy over gRPC.")
    parser.add_argument("--version", action="version", version=f"taktline-worker {version('taktline-worker')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("model", help="fetch, verify, list and prune the checkpoints of this node")
    serve = commands.add_parser("serve", help="load the policy of an engine config and serve it until SIGTERM")
    serve.add_argument("--config", type=Path, required=True, help="engine.json, as the operator writes it")
    serve.add_argument("--listen", default="127.0.0.1:50051", help="gRPC HOST:PORT (default: %(default)s)")
    serve.add_argument("--metrics-listen", default="", help="Prometheus HOST:PORT (default: none)")
    serve.add_argument("--health-listen", default="", help="HOST:PORT of plain health checks, for probes beside TLS")
    serve.add_argument(
        "--batch-port",
        type=_batch_port,
        default=0,
        metavar="PORT",
        help="take batches on this TCP port beside gRPC, with the same TLS; 0 is any free one, off none (default: 0)",
    )
    serve.add_argument(
        "--linger-s", type=float, default=1.0, help="seconds between SIGTERM and refusing calls (default: %(default)s)"
    )
    serve.add_argument(
        "--grace-s",
        type=float,
        default=30.0,
        help="seconds that running calls may take after that (default: %(default)s)",
    )
    serve.add_argument("--tls-cert", type=Path, help="serve gateways over TLS with this certificate (PEM, chain)")
    serve.add_argument("--tls-key", type=Path, help="its private key")
    serve.add_argument("--tls-client-ca", type=Path, help="serve only gateways with a certificate of this issuer")
    serve.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    replica = commands.add_parser("replica", help="what serve starts for each replica of engine.parallel.dp")
    replica.add_argument("--config", type=Path, required=True, help="engine.json of the worker")
    replica.add_argument("--socket", type=Path, required=True, help="Unix socket to serve on")
    replica.add_argument("--grace-s", type=float, default=30.0, help="seconds that running calls may take at the end")
    replica.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    rank = commands.add_parser("rank", help="what a planner starts for each further rank of engine.parallel.search")
    rank.add_argument("--config", type=Path, required=True, help="engine.json of the worker")
    rank.add_argument("--rank", type=int, required=True, help="this process, from 1")
    rank.add_argument("--ranks", type=int, required=True, help="all of them, rank 0 included")
    rank.add_argument("--store-host", default="127.0.0.1", help="where rank 0 keeps the group's store (%(default)s)")
    rank.add_argument("--store-port", type=int, required=True, help="its TCP port")
    rank.add_argument(
        "--grouped", action="store_true", help="the ranks are spread over pods: wait until all have loaded"
    )
    rank.add_argument("--generation", type=int, required=True, help="which group of ranks this process joins")
    rank.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    options = parser.parse_args(arguments)
    logs.configure(options.log_level)
    # gRPC's C core writes plain text to stderr; what it would say reaches the log as an error of ours.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    let_others_run()
    from taktline_worker.replicas.front import ReplicaRefusedError

    try:
        {"serve": _serve, "replica": _replica, "rank": _rank}[options.command](options)
    except ReplicaRefusedError as refused:
        print(refused, file=sys.stderr)
        return EXIT_REFUSED
    except group.GroupLostError as lost:
        if lost.refused:  # its rank has said why, and that is to be the last word of this pod
            return EXIT_REFUSED
        print(f"taktline-worker: {lost}", file=sys.stderr)
        return group.EXIT_LOST
    except TaktlineError as error:
        logger.error(
            error.message, extra={"code": error.code.value, "next_step": error.next_step, "config": str(options.config)}
        )
        print(f"taktline-worker: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _serve(options: argparse.Namespace) -> None:
    from taktline_worker.delivery import in_use
    from taktline_worker.lifecycle import ServeOptions, read_config

    config = read_config(options.config)
    listening = ServeOptions(
        options.listen,
        options.metrics_listen,
        options.linger_s,
        options.grace_s,
        _tls_files(options),
        options.health_listen,
        options.batch_port,
    )
    in_use.hold(Path(config.model.path))
    place = group.from_environment(os.environ)
    if place is not None:
        group.check_size(place, config.engine.parallel.search)
        if not place.leads:
            from taktline_worker.planning import group_pod

            group_pod.serve(config, listening, place)
            return
        from taktline_worker import server

        server.serve(config, listening)
        if group.is_lost():
            raise group.GroupLostError
        return
    if config.engine.parallel.dp > 1:
        from taktline_worker.replicas import front

        if options.batch_port:
            logger.warning("batch_port_unused", extra={"reason": "batches reach a worker with replicas through gRPC"})
        front.serve(config, options.config, listening)
        return
    # torch and the families load only once the arguments are good, and only where the policy runs.
    from taktline_worker import server

    server.serve(config, listening)


def _replica(options: argparse.Namespace) -> None:
    from taktline_worker import server
    from taktline_worker.replicas.child import leave_with_parent

    leave_with_parent()
    # The pod's own metrics page reads this one; its port is said in the log.
    listening = server.ServeOptions(f"unix:{options.socket}", "127.0.0.1:0", linger_s=0.0, grace_s=options.grace_s)
    server.serve(server.read_config(options.config), listening)


def _rank(options: argparse.Namespace) -> None:
    from taktline_worker.lifecycle import read_config
    from taktline_worker.replicas.child import leave_with_parent

    leave_with_parent()
    config = read_config(options.config)
    if config.model.family.startswith("cosmos3-"):
        from taktline_worker.models.cosmos3.rank_process import serve_rank

        serve_rank(config, options.rank, options.ranks, options.store_port, options.generation, options.store_host)
        return
    from taktline_worker.models.vjepa2_ac import adapter
    from taktline_worker.planning import ranks
    from taktline_worker.planning.relay import follow

    if options.grouped:
        from taktline_worker.planning import group_pod

        group_pod.follow(config, options)
        return
    store = ranks.follower_store(options.store_port, options.store_host)
    world = adapter.load(config).world
    store.set(ranks.loaded_key(options.generation, options.rank), "1")
    try:
        follow(world, ranks.join(store, options.generation, options.rank, options.ranks, world.device))
    except RuntimeError as error:  # what torch.distributed raises for a closed connection
        logger.warning("the mesh broke up; this rank leaves", extra={"rank": options.rank, "cause": str(error)[:300]})


def _batch_port(word: str) -> int | None:
    if word == "off":
        return None
    if not word.isdecimal() or int(word) > 65535:
        raise argparse.ArgumentTypeError(f"{word!r} is neither off nor a port from 0 to 65535")
    return int(word)


def _tls_files(options: argparse.Namespace) -> TlsFiles | None:
    if options.tls_cert is None and options.tls_key is None and options.tls_client_ca is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, "--tls-cert and --tls-key go together", "give both, or no certificate at all"
        )
    return TlsFiles(options.tls_cert, options.tls_key, options.tls_client_ca)
