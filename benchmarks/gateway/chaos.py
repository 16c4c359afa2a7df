"""Kills gateways, workers and Redis under load, at any moment, and accounts for every request.

python -m benchmarks.gateway.chaos [--rounds N] [--robots N] [--seed N] [--output FILE]

Two gateways, two workers and (where redis-server is installed) one Redis, all real processes; robots in every protocol
that the gateway speaks: REST, the stream, openpi, GR00T's ZeroMQ, LeRobot's gRPC, vla-eval and the Open Inference
Protocol. In each scenario one of them is killed (SIGKILL) or told to end (SIGTERM) at a random
moment and started again. Every request must have exactly one outcome within its deadline and a bound: a chunk, a typed
error, or an error of the connection that its client saw. One that has none is `silent`, and the run fails. On a machine
that stands still for seconds every client is silent: beside other work run it in the real-time class (chrt -r 1).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from benchmarks.gateway.fleet import (
    CLIENTS,
    CONNECTION,
    OWN_PORTS,
    PROTOCOLS,
    SILENT,
    Plan,
    client_ports,
    fleet,
    listen_flags,
)
from benchmarks.gateway.links import CHUNK
from benchmarks.gateway.processes import Deployment, Server, ServerEndedError, free_port, until

SIGNALS = (signal.SIGKILL, signal.SIGTERM)
TARGETS = ("worker", "gateway", "redis")
WORKER = ("--t-sync", "1:6,2:7,4:8,8:10,16:14", "--before-ms", "2", "--work-ms", "4")
"""Batches are sent ahead: what a worker that dies has is often two of them."""
DOWN_S = 0.4
PERIOD_S = 0.1
BACK_WITHIN_S = 120.0
"""A process that starts again beside the load needs its share of this machine's cores."""


@dataclasses.dataclass
class Stage:
    """The processes of a run."""

    first: Deployment
    second: Deployment
    workers: list[str]
    ports: list[dict[str, int]]
    redis: Server | None
    redis_port: int

    def gateway_flags(self, number: int) -> list[str]:
        """What each gateway is started with, also the second time."""
        flags = [*listen_flags(self.ports[number]), "--drain-settle-s", "0.2"]
        return flags + (["--redis-url", f"redis://127.0.0.1:{self.redis_port}/0"] if self.redis_port else [])

    def start_gateway(self, number: int) -> None:
        """Starts or restarts one of the two."""
        (self.first, self.second)[number].start_gateway(*self.gateway_flags(number))

    def start_redis(self, folder: Path) -> None:
        """Starts or restarts Redis; it keeps nothing on disk."""
        program = shutil.which("redis-server")
        assert program is not None
        command = [program, "--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.redis = Server(command, folder / "redis.log")

    def ready(self) -> bool:
        """Whether both gateways have both workers."""
        return self.first.ready(2) and self.second.ready(2)

    def servers(self) -> list[Server]:
        """Every process of the run."""
        return [*self.first.servers(), *self.second.servers(), *([self.redis] if self.redis is not None else [])]

    def stop(self) -> None:
        """Kills everything."""
        self.first.stop()
        if self.second.gateway is not None:
            self.second.gateway.stop()
        if self.redis is not None:
            self.redis.stop()


def build(folder: Path, *, redis: bool) -> Stage:
    """Starts everything and waits until it serves."""
    folders = [folder / name for name in ("one", "two")]
    for each in folders:
        each.mkdir()
    first, second = (Deployment(each) for each in folders)
    workers = [first.start_worker(*WORKER) for _ in range(2)]
    stage = Stage(first, second, workers, [client_ports(), client_ports()], None, free_port() if redis else 0)
    if redis:
        stage.start_redis(folder)
    for number, deployment in enumerate((first, second)):
        deployment.write_routes(workers, clients=CLIENTS)
        stage.start_gateway(number)
    try:
        until(stage.ready, "both gateways having both workers", servers=stage.servers)
    except (TimeoutError, ServerEndedError):
        stage.stop()
        raise
    return stage


async def scenario(
    stage: Stage, folder: Path, target: str, number: signal.Signals, robots: int, dice: random.Random
) -> dict[str, object]:
    """One kill under load. Returns its row."""
    addresses = [("127.0.0.1", stage.first.port), ("127.0.0.1", stage.second.port)]
    plan = Plan(
        policy="noop",
        addresses=addresses,
        period_s=PERIOD_S,
        ports={name: [("127.0.0.1", ports[name]) for ports in stage.ports] for name in OWN_PORTS},
    )
    async with fleet(plan, PROTOCOLS, robots) as book:
        await asyncio.sleep(0.5 + dice.random())
        killed_at = time.monotonic()
        victim = dice.randrange(2)
        if target == "worker":
            address = stage.workers[victim]
            process = stage.first.workers[address]
        elif target == "gateway":
            found = (stage.first, stage.second)[victim].gateway
            assert found is not None
            process = found
        else:
            assert stage.redis is not None
            process = stage.redis
        process.send(number)
        await asyncio.sleep(DOWN_S)
        await asyncio.to_thread(process.process.wait)
        ended_s = time.monotonic() - killed_at
        if target == "worker":
            stage.first.start_worker(*WORKER, address=stage.workers[victim])
        elif target == "gateway":
            stage.start_gateway(victim)
        else:
            stage.start_redis(folder)
        await asyncio.to_thread(until, stage.ready, "everything being back", BACK_WITHIN_S)
        back_at = time.monotonic()
        await asyncio.sleep(0.7)
        for _ in range(200):  # robots that wait before they ask again
            if book.chunks_after(back_at):
                break
            await asyncio.sleep(0.1)
    words = book.words()
    return {
        "bench": "gateway-chaos",
        "target": target,
        "signal": number.name,
        "robots": robots,
        "protocols": "+".join(PROTOCOLS),
        "requests": book.sent,
        "accounted": len(book.outcomes),
        CHUNK: words.pop(CHUNK, 0),
        CONNECTION: words.pop(CONNECTION, 0),
        SILENT: words.pop(SILENT, 0),
        "silent_robots": sorted({outcome.robot for outcome in book.outcomes if outcome.word == SILENT}),
        "typed_errors": dict(words),
        "worst_over_deadline_ms": round(book.worst_over_ms, 1),
        "bound_ms": 1e3 * plan.bound_s,
        "ended_s": round(ended_s, 3),
        "back_s": round(back_at - killed_at, 3),
        "chunks_after": book.chunks_after(back_at),
    }


def faults(row: dict[str, object]) -> list[str]:
    """What of a row must not be."""
    found = []
    if row["requests"] != row["accounted"]:
        found.append(f"{row['requests']} requests, {row['accounted']} outcomes")
    if row[SILENT]:
        found.append(f"{row[SILENT]} requests of {row['silent_robots']} got no word within deadline and bound")
    if not row["chunks_after"]:
        found.append("no chunk after everything was back")
    if row["target"] == "redis" and row[CONNECTION]:
        found.append("Redis going away broke connections of robots")
    return [f"{row['target']} {row['signal']}: {text}" for text in found]


def run(folder: Path, rounds: int, robots: int, seed: int, *, redis: bool) -> list[dict[str, object]]:
    """The kill matrix, `rounds` times."""
    dice = random.Random(seed)
    stage = build(folder, redis=redis)
    rows = []
    try:
        for _ in range(rounds):
            for target in TARGETS if redis else TARGETS[:2]:
                for number in SIGNALS:
                    row = uvloop.run(scenario(stage, folder, target, number, robots, dice))
                    row["seed"] = seed
                    rows.append(row)
                    shown = {name: row[name] for name in ("requests", CHUNK, CONNECTION, SILENT, "typed_errors")}
                    over = row["worst_over_deadline_ms"]
                    print(f"{target:<8}{number.name:<8} {shown} worst {over} ms over its deadline", flush=True)
    finally:
        stage.stop()
    return rows


def main() -> None:
    """The command line; exits with 1 where a request is unaccounted for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--robots", type=int, default=28)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    redis = shutil.which("redis-server") is not None
    with tempfile.TemporaryDirectory() as folder:
        rows = run(Path(folder), arguments.rounds, arguments.robots, arguments.seed, redis=redis)
    for row in rows:
        row["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        row["command"] = " ".join(["python -m benchmarks.gateway.chaos", *sys.argv[1:]])
    wrong = [text for row in rows for text in faults(row)]
    total = sum(int(str(row["requests"])) for row in rows)
    print(f"{len(rows)} kills, {total} requests, {len(wrong)} faults" + ("" if redis else "; no redis-server here"))
    for text in wrong:
        print(f"FAULT {text}")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
