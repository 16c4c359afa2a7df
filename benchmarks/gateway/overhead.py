"""What the gateway costs: requests a second and added latency in front of a worker that does nothing, beside peers.

python -m benchmarks.gateway.overhead [--seconds S] [--rounds N] [--clients 1,16] [--only NAME,...] [--output FILE]

Every request carries two 224x224 RGB frames, raw. All servers run in one go on this machine with the robots beside
them, one server at a time, in rounds that go through them forth and back; a figure is the median of its rounds, a ratio
the median of the ratios within each round. `added` is a request's latency less the bare openpi server's median: what
queue, batching and the second process cost. The robots are the same code for every server of a protocol.

The goals are judged at the end. Requests a second mean little while others are at work: their share of the cores is
shown (`others`), and CPU a request, which they move least. Three rounds take about five minutes. Where others cannot be
sent away, `chrt -r 1 python -m benchmarks.gateway.overhead --seconds 0.7` puts them off for the moments of measuring.
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
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway import robots
from benchmarks.gateway.processes import Deployment, Server, answers, environment, free_port, until

RAY = "ray[serve]==2.60.0"
PEERS = ("openpi", "fastapi", "ray")
OURS = ("taktline rest", "taktline openpi", "taktline stream")
SILENT_S = 120.0
"""A measurement that takes longer has lost an answer."""
QUIET = 0.15
"""Cores that others may keep busy before the figures are doubtful."""


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
    others: float = 0.0
    """Cores that were busy with anything else meanwhile."""


Found = dict[tuple[str, int], list[Measured]]
"""Every round of each server and number of clients."""


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
            until(lambda: "ready" in log.read_text(errors="replace"), "Ray Serve being ready", 300.0, lambda: [server])
        else:
            until(lambda: answers(f"http://127.0.0.1:{port}/"), f"{name} answering", servers=lambda: [server])
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
        deployment.until_ready(1)

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


def busy_s() -> float:
    """CPU seconds that this machine's cores have worked, whoever they worked for."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def measure(name: str, clients: list[int], seconds: float, folder: Path) -> list[Measured]:
    """Starts one server and runs every number of clients against it. Raises TimeoutError where answers stay out."""
    found = []
    with (peer if name in PEERS else ours)(name, folder) as (robot, servers):
        for count in clients:
            before = {label: server.cpu_s() for label, server in servers.items()}
            own = sum(os.times()[:2])
            busy, began = busy_s(), time.monotonic()
            warm_s = min(1.0, 0.5 * seconds)
            seen = uvloop.run(_in_time(robots.run(robot, count, seconds, warm_s), name))
            lasted_s = time.monotonic() - began
            total = len(seen.latencies) * (seconds + warm_s) / seconds
            used = {label: server.cpu_s() - before[label] for label, server in servers.items()}
            used["robots"] = sum(os.times()[:2]) - own
            others = max(0.0, (busy_s() - busy - sum(used.values())) / lasted_s)
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
                    others=round(others, 2),
                )
            )
            asyncio.run(asyncio.sleep(0.2))
    return found


async def _in_time(work: Coroutine[Any, Any, robots.Count], name: str) -> robots.Count:
    try:
        return await asyncio.wait_for(work, SILENT_S)
    except TimeoutError as error:
        raise TimeoutError(f"{name} left a robot without an answer") from error


def median_of(rounds: list[Measured]) -> Measured:
    """The median of each figure over the rounds."""
    first = rounds[0]
    fields = {
        field: round(statistics.median(getattr(found, field) for found in rounds), 3)
        for field in ("per_s", "p50_ms", "p99_ms", "p99_9_ms", "others")
    }
    cpu = {label: round(statistics.median(found.cpu_us[label] for found in rounds), 1) for label in first.cpu_us}
    return Measured(first.server, first.clients, errors=sum(found.errors for found in rounds), cpu_us=cpu, **fields)


def ratio(found: Found, one: str, other: str, clients: int) -> float | None:
    """How many times the requests of another server: the median over the rounds that measured both; None of none."""
    pairs = zip(found.get((one, clients), ()), found.get((other, clients), ()), strict=False)
    ratios = [mine.per_s / its.per_s for mine, its in pairs if its.per_s]
    return statistics.median(ratios) if ratios else None


def goals(found: Found) -> list[tuple[str, float | None, str, float]]:
    """What is asked of the gateway: (what, measured or None, comparison, goal)."""
    by_key = {key: median_of(rounds) for key, rounds in found.items()}
    bare, stream = by_key.get(("openpi", 1)), by_key.get(("taktline stream", 1))
    told: list[tuple[str, float | None, str, float]] = [
        ("openpi port, 16 clients, of bare openpi", ratio(found, "taktline openpi", "openpi", 16), ">=", 0.5),
        ("openpi port, 16 clients, of Ray Serve", ratio(found, "taktline openpi", "ray", 16), ">=", 10.0),
        ("stream, 16 clients, of Ray Serve", ratio(found, "taktline stream", "ray", 16), ">=", 10.0),
    ]
    if bare is not None and stream is not None:
        told.append(("stream, 1 client, added p50 ms", round(stream.p50_ms - bare.p50_ms, 3), "<", 1.0))
        told.append(("stream, 1 client, added p99 ms", round(stream.p99_ms - bare.p50_ms, 3), "<", 2.0))
    return told


def show_goals(found: Found) -> None:
    """Prints each goal and whether it is met, and what makes the figures doubtful."""
    for what, value, comparison, goal in goals(found):
        if value is None:
            print(f"{what:<42}{'-':>9}  {comparison} {goal:g}  not measured")
            continue
        met = value >= goal if comparison == ">=" else value < goal
        print(f"{what:<42}{value:>9.3f}  {comparison} {goal:g}  {'met' if met else 'NOT MET'}")
    busiest = max((one.others for rounds in found.values() for one in rounds), default=0.0)
    if busiest > QUIET:
        print(f"others kept up to {busiest:.2f} cores busy meanwhile: measure again on a quiet machine")
    wrong = sum(one.errors for rounds in found.values() for one in rounds)
    if wrong:
        print(f"{wrong} requests had no good answer")


def rows_of(
    results: list[Measured], rounds: int, seconds: float, found: Found | None = None
) -> list[dict[str, object]]:
    """The rows to commit, with each server's ratio to the bare openpi server and to Ray Serve."""
    by_key = {(one.server, one.clients): one for one in results}
    each = {key: [one] for key, one in by_key.items()} if found is None else found
    rows: list[dict[str, object]] = []
    for one in results:
        bare = by_key.get(("openpi", one.clients))
        rows.append(
            {
                "bench": "gateway-overhead",
                "server": one.server,
                "clients": one.clients,
                "requests_per_s": one.per_s,
                "p50_ms": one.p50_ms,
                "p99_ms": one.p99_ms,
                "p99_9_ms": one.p99_9_ms,
                "added_p50_ms": None if bare is None else round(one.p50_ms - bare.p50_ms, 3),
                "added_p99_ms": None if bare is None else round(one.p99_ms - bare.p50_ms, 3),
                "ratio_to_openpi": _rounded(ratio(each, one.server, "openpi", one.clients), 3),
                "ratio_to_ray": _rounded(ratio(each, one.server, "ray", one.clients), 2),
                "errors": one.errors,
                "cpu_us_per_request": one.cpu_us,
                "shape": f"2 x {robots.SIDE}x{robots.SIDE}x3 uint8, {rounds} rounds of {seconds:g} s",
                "versions": {name: version(name) for name in ("taktline-gateway", "uvicorn", "websockets", "grpcio")}
                | {"ray": RAY},
                "cores": os.cpu_count(),
                # Where others were at work too, every figure is worse than the server.
                "others_cores": one.others,
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "command": " ".join(["python -m benchmarks.gateway.overhead", *sys.argv[1:]]),
            }
        )
    return rows


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def show(rows: list[dict[str, object]]) -> None:
    """Prints the table."""
    heads = ("server", "clients", "requests_per_s", "p50_ms", "p99_ms", "p99_9_ms", "added_p50_ms", "added_p99_ms")
    heads += ("ratio_to_openpi", "ratio_to_ray", "errors", "others_cores")
    titles = ("server", "clients", "req/s", "p50 ms", "p99 ms", "p99.9 ms", "+p50", "+p99", "/openpi", "/ray", "err")
    titles += ("others",)
    print(f"{titles[0]:<17}" + "".join(f"{title:>10}" for title in titles[1:]) + "  CPU us a request")
    for row in rows:
        cells = "".join(f"{'-' if row[head] is None else row[head]!s:>10}" for head in heads[1:])
        print(f"{row['server']:<17}{cells}  {row['cpu_us_per_request']}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", default="1,16")
    parser.add_argument("--only", default=",".join((*PEERS, *OURS)), help="servers, with commas between")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    clients = [int(count) for count in arguments.clients.split(",")]
    names = arguments.only.split(",")
    found: Found = {}
    for number in range(arguments.rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    measured = measure(name, clients, arguments.seconds, Path(folder))
                except (RuntimeError, TimeoutError) as error:
                    if name not in PEERS:
                        raise
                    print(f"{name} is left out of round {number + 1}: {error}", flush=True)
                    continue
            for one in measured:
                found.setdefault((one.server, one.clients), []).append(one)
            rates = ", ".join(f"{one.per_s:g}/s with {one.clients}" for one in measured)
            print(f"round {number + 1} {name}: {rates} ({time.monotonic() - began:.0f} s)", flush=True)
    results = [median_of(found[name, count]) for count in clients for name in names if (name, count) in found]
    rows = rows_of(results, arguments.rounds, arguments.seconds, found)
    show(rows)
    show_goals(found)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
