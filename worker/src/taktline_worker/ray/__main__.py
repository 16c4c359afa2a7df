"""Runs a planner's Serve application on this machine until SIGTERM: python -m taktline_worker.ray --config FILE."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from taktline_protocol import TaktlineError

EXIT_REFUSED = 2
NAME = "planner"
_ATTEMPTS = 2
_SLOW_START = "timed out during startup"


class RayStartError(RuntimeError):
    """Ray's own processes did not come up."""


def main() -> int:
    """Returns 0 after an orderly end and 2 where the policy or the configuration is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m taktline_worker.ray",
        description="Serves a planner by Ray Serve on this machine: the WorldModels of a cluster as local processes.",
    )
    parser.add_argument("--config", type=Path, required=True, help="engine.json, as the operator writes it")
    parser.add_argument("--replicas", type=int, default=0, help="WorldModels (default: engine.parallel.search)")
    parser.add_argument("--listen", default="127.0.0.1:50051", help="gRPC HOST:PORT (default: %(default)s)")
    parser.add_argument("--metrics-listen", default="", help="Prometheus HOST:PORT (default: none)")
    parser.add_argument("--linger-s", type=float, default=1.0, help="seconds between SIGTERM and refusing calls")
    parser.add_argument("--object-store-mb", type=int, default=256, help="shared memory of the object store")
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    options = parser.parse_args()
    try:
        import ray
    except ImportError:
        print("taktline-worker: Ray is not installed; install taktline-worker[ray]", file=sys.stderr)
        return EXIT_REFUSED
    try:
        run(options)
    except TaktlineError as error:
        print(f"taktline-worker: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except RuntimeError as error:  # what Serve raises where a constructor fails; its last lines name the cause
        print(f"taktline-worker: the application does not start: {str(error)[-2000:]}", file=sys.stderr)
        return EXIT_REFUSED
    # Only now: Ray takes these signals for itself when it starts.
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        stop.wait()
    finally:
        end()
        ray.shutdown()
    return 0


def run(options: argparse.Namespace) -> Any:
    """Starts Ray and the application; returns the Planner's handle once it serves.

    Raises:
        TaktlineError: the deployment was refused.
        RuntimeError: it did not start, as Serve reports it.
    """
    from ray import serve

    from taktline_worker.ray.application import build

    application = build(
        {
            "config": str(options.config),
            "replicas": options.replicas,
            "listen": options.listen,
            "metrics_listen": options.metrics_listen,
            "linger_s": options.linger_s,
            "log_level": options.log_level,
        }
    )
    _start_ray(options.object_store_mb)
    # Robots come by the gateway and the gRPC port; nothing is served over HTTP.
    serve.start(proxy_location="Disabled")
    return serve.run(application, name=NAME, route_prefix=None)


def _start_ray(object_store_mb: int) -> None:
    """A Ray of this machine's own; where the machine has no time for it, once more.

    Raises:
        RayStartError: it did not start.
    """
    import ray

    # Ray makes its workers give way to everything else on the machine; these have robots waiting.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            ray.init(
                # Room for the processes, not a claim on cores: the world models share those that there are.
                num_cpus=64,
                include_dashboard=False,
                object_store_memory=object_store_mb * 2**20,
                configure_logging=False,
            )
        except Exception as error:  # Ray raises the bare class, and gives its own processes 30 s whatever the load
            ray.shutdown()
            if _SLOW_START not in str(error) or attempt == _ATTEMPTS:
                raise RayStartError(f"Ray does not start: {error}") from error
            continue
        return


def end() -> None:
    """Lets the Planner finish what runs, and takes the application down."""
    from ray import serve

    serve.delete(NAME)
    serve.shutdown()


if __name__ == "__main__":
    sys.exit(main())
