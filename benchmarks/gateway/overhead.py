"""What the gateway costs: requests a second and added latency in front of a worker that does nothing, beside peers.

python -m benchmarks.gateway.overhead [--seconds S] [--rounds N] [--clients 1,16] [--only NAME,...] [--output FILE]

Every request carries two 224x224 RGB frames, raw. All servers run in one go on this machine with the robots beside
them, one server at a time, in rounds that alternate between them; a figure is the median of its rounds. `added` is
a request's latency less the bare openpi server's median: what queue, batching and the second process cost.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import uvloop

from benchmarks.gateway import robots
from benchmarks.gateway.processes import Deployment, Server, answers, environment, free_port, until

RAY = "ray[serve]==2.60.0"
PEERS = ("openpi", "fastapi", "ray")
OURS = ("taktline rest", "taktline openpi", "taktline stream")


@dataclasses.dataclass
class Measured:
    """One server under one number of clients, one round."""

    server: str
    clients: int
    per_s: float
    p50_ms: float
    p99_ms: float
    p99_9_ms: float
    errors: int
    cpu_us: dict[str, float]
    """CPU microseconds a request, by process."""


@contextmanager
def peer(name: str, folder: Path) -> Iterator[tuple[Callable[[int], robots.Robot], dict[str, Server]]]:
    """A bare server and the robots for it."""
    port = free_port()
    python = str(environment("ray-serve", RAY, "msgspec", "numpy")) if name == "ray" else sys.executable
    script = str(Path(__file__).with_name("bare_servers.py"))
    log = folder / f"{name}.log"
    server = Server([python, script, name, "--port", str(port)], log)
    body = robots.bare_body()

    def robot(number: int) -> robots.Robot:
        if name == "openpi":
            return robots.OpenpiRobot("127.0.0.1", port, f"r{number}")
        return robots.HttpRobot("127.0.0.1", port, f"r{number}", "/act", body)

    try:
        if name == "ray":
            until(lambda: "ready" in log.read_text(errors="replace"), "Ray Serve being ready", 300.0)
        else:
            until(lambda: answers(f"http://127.0.0.1:{port}/"), f"{name} answering")
        yield robot, {name: server}
    finally:
        server.stop()


@contextmanager
def ours(name: str, folder: Path) -> Iterator[tuple[Callable[[int], robots.Robot], dict[str, Server]]]:
    """The gateway, a no-op worker, and the robots for one of the gateway's protocols."""
    deployment = Deployment(folder)
    openpi_port = free_port()
    try:
        address = deployment.start_worker()
        deployment.write_routes([address])
        gateway = deployment.start_gateway("--openpi-listen", f"127.0.0.1:{openpi_port}", "--log-level", "warning")
        until(lambda: deployment.ready(1), "the worker being up")

        def robot(number: int) -> robots.Robot:
            who = f"r{number}-{os.urandom(4).hex()}"  # a robot of the last run may still count as live
            if name == "taktline rest":
                path = "/v1/policies/noop/act"
                return robots.HttpRobot("127.0.0.1", deployment.port, who, path, robots.rest_body(who))
            if name == "taktline openpi":
                return robots.OpenpiRobot("127.0.0.1", openpi_port, who)
            return robots.StreamRobot("127.0.0.1", deployment.port, who, "noop")

        yield robot, {"gateway": gateway, "worker": deployment.workers[address]}
    finally:
        deployment.stop()


def measure(name: str, clients: list[int], seconds: float, folder: Path) -> list[Measured]:
    """Starts one server and runs every number of clients against it."""
    found = []
    with (peer if name in PEERS else ours)(name, folder) as (robot, servers):
        for count in clients:
            before = {label: server.cpu_s() for label, server in servers.items()}
            own = sum(os.times()[:2])
            warm_s = min(2.0, 0.5 * seconds)
            seen = uvloop.run(robots.run(robot, count, seconds, warm_s))
            total = len(seen.latencies) * (seconds + warm_s) / seconds
            used = {label: server.cpu_s() - before[label] for label, server in servers.items()}
            used["robots"] = sum(os.times()[:2]) - own
            ordered = sorted(seen.latencies) or [float("nan")]

            def at(share: float, ordered: list[float] = ordered) -> float:
                return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

            found.append(
                Measured(
                    server=name,
                    clients=count,
                    per_s=round(len(seen.latencies) / seconds, 1),
                    p50_ms=at(0.5),
                    p99_ms=at(0.99),
                    p99_9_ms=at(0.999),
                    errors=seen.errors,
                    cpu_us={label: round(1e6 * value / max(1.0, total), 1) for label, value in used.items()},
                )
            )
            asyncio.run(asyncio.sleep(0.2))
    return found


def median_of(rounds: list[Measured]) -> Measured:
    """The median of each figure over the rounds."""
    first = rounds[0]
    fields = {
        field: round(statistics.median(getattr(found, field) for found in rounds), 3)
        for field in ("per_s", "p50_ms", "p99_ms", "p99_9_ms")
    }
    cpu = {label: round(statistics.median(found.cpu_us[label] for found in rounds), 1) for label in first.cpu_us}
    return Measured(first.server, first.clients, errors=sum(found.errors for found in rounds), cpu_us=cpu, **fields)


def rows_of(results: list[Measured], rounds: int, seconds: float) -> list[dict[str, object]]:
    """The rows to commit, with each server's ratio to the bare openpi server and to Ray Serve."""
    by_key = {(found.server, found.clients): found for found in results}
    rows: list[dict[str, object]] = []
    for found in results:
        bare = by_key.get(("openpi", found.clients))
        ray = by_key.get(("ray", found.clients))
        rows.append(
            {
                "bench": "gateway-overhead",
                "server": found.server,
                "clients": found.clients,
                "requests_per_s": found.per_s,
                "p50_ms": found.p50_ms,
                "p99_ms": found.p99_ms,
                "p99_9_ms": found.p99_9_ms,
                "added_p50_ms": None if bare is None else round(found.p50_ms - bare.p50_ms, 3),
                "added_p99_ms": None if bare is None else round(found.p99_ms - bare.p50_ms, 3),
                "ratio_to_openpi": None if bare is None else round(found.per_s / bare.per_s, 3),
                "ratio_to_ray": None if ray is None else round(found.per_s / ray.per_s, 2),
                "errors": found.errors,
                "cpu_us_per_request": found.cpu_us,
                "shape": f"2 x {robots.SIDE}x{robots.SIDE}x3 uint8, {rounds} rounds of {seconds:g} s",
                "versions": {name: version(name) for name in ("taktline-gateway", "uvicorn", "websockets", "grpcio")}
                | {"ray": RAY},
                "cores": os.cpu_count(),
                # Above the number of cores others were at work too, and every figure is worse than the server.
                "load_average": round(os.getloadavg()[0], 1),
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "command": " ".join(["python -m benchmarks.gateway.overhead", *sys.argv[1:]]),
            }
        )
    return rows


def show(rows: list[dict[str, object]]) -> None:
    """Prints the table."""
    heads = ("server", "clients", "requests_per_s", "p50_ms", "p99_ms", "p99_9_ms", "added_p50_ms", "added_p99_ms")
    heads += ("ratio_to_openpi", "ratio_to_ray", "errors")
    titles = ("server", "clients", "req/s", "p50 ms", "p99 ms", "p99.9 ms", "+p50", "+p99", "/openpi", "/ray", "err")
    print(f"{titles[0]:<17}" + "".join(f"{title:>10}" for title in titles[1:]) + "  CPU us a request")
    for row in rows:
        cells = "".join(f"{'-' if row[head] is None else row[head]!s:>10}" for head in heads[1:])
        print(f"{row['server']:<17}{cells}  {row['cpu_us_per_request']}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,16")
    parser.add_argument("--only", default=",".join((*PEERS, *OURS)), help="servers, with commas between")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    clients = [int(count) for count in arguments.clients.split(",")]
    found: dict[tuple[str, int], list[Measured]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.only.split(","):
            with tempfile.TemporaryDirectory() as folder:
                for one in measure(name, clients, arguments.seconds, Path(folder)):
                    found.setdefault((one.server, one.clients), []).append(one)
    results = [median_of(found[name, count]) for count in clients for name in arguments.only.split(",")]
    rows = rows_of(results, arguments.rounds, arguments.seconds)
    show(rows)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
