"""Goodput of real processes under growing load: robots, a gateway and a worker, batches sent ahead.

python -m benchmarks.gateway.overload [--seconds S] [--loads 0.5,1,3] [--output FILE]

The worker's engine takes a fixed time for a batch, so what it can do does not depend on this machine's cores; frames
are "decoded" before that while the batch before it runs. Robots over REST and the stream ask every two seconds
whatever they are told. What counts is chunks within their budget a second; at three times the engine's
throughput they must be at least 90% of the peak. `behind` says how many batches came while the engine was busy with
another one.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.fleet import SILENT, Plan, fleet
from benchmarks.gateway.links import CHUNK
from benchmarks.gateway.processes import Deployment, until

PROTOCOLS = ("rest", "stream")
"""Those that say their budget: a deadline that the gateway infers is not known here."""
BATCH, WORK_MS, BEFORE_MS = 8, 160.0, 10.0
BUDGET, PERIOD = 5.0, 12.5
"""What a robot has left when it asks, and how often it asks, in batches."""
WARM_S = 2.0
LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)
KEPT = 0.9
"""Share of the peak that must be kept at the highest load."""


async def measure(
    folder: Path, load: float, seconds: float, work_ms: float = WORK_MS, protocols: tuple[str, ...] = PROTOCOLS
) -> dict[str, Any]:
    """One load on fresh processes, batches of `work_ms`; its row without the share of the peak."""
    deployment = Deployment(folder)
    times = ",".join(f"{size}:{BEFORE_MS + work_ms:g}" for size in (1, 2, 4, BATCH))
    try:
        address = deployment.start_worker("--t-sync", times, "--before-ms", str(BEFORE_MS), "--work-ms", str(work_ms))
        deployment.write_routes([address], max_batch=BATCH)
        deployment.start_gateway()
        await asyncio.to_thread(deployment.until_ready, 1)
        plan = Plan(
            policy="noop",
            addresses=[("127.0.0.1", deployment.port)],
            period_s=PERIOD * work_ms / 1e3,
            budget_ms=BUDGET * work_ms,
        )
        robots = round(load * BATCH * PERIOD)
        async with fleet(plan, protocols, robots) as book:
            await asyncio.sleep(WARM_S)
            began = time.monotonic()
            await asyncio.sleep(seconds)
            ended = time.monotonic()
        worker = deployment.workers[address]
        worker.send(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: worker.log.read_text().endswith("}\n"), "the worker's count")
        counts = json.loads(worker.log.read_text().splitlines()[-1])
        asked = [one for one in book.outcomes if began <= one.sent_at < ended]
        words = book.words()
        return {
            "bench": "gateway-overload-processes",
            "load": load,
            "robots": robots,
            "work_ms": work_ms,
            "protocols": "+".join(protocols),
            "asked_hz": round(len(asked) / (ended - began), 1),
            "goodput_hz": round(sum(one.word == CHUNK and one.over_ms <= 0.0 for one in asked) / (ended - began), 1),
            "late": sum(one.word == CHUNK and one.over_ms > 0.0 for one in asked),
            "requests": book.sent,
            "accounted": len(book.outcomes),
            "silent": words.pop(SILENT, 0),
            "words": dict(words),
            **counts,
        }
    finally:
        deployment.stop()


def run(loads: tuple[float, ...], seconds: float) -> list[dict[str, Any]]:
    """The rows of these loads, with each one's share of the peak."""
    rows = []
    for load in loads:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(uvloop.run(measure(Path(folder), load, seconds)))
        print(
            {key: rows[-1][key] for key in ("load", "asked_hz", "goodput_hz", "late", "batches", "behind")}, flush=True
        )
    peak = max(row["goodput_hz"] for row in rows)
    return [{**row, "share_of_peak": round(row["goodput_hz"] / peak, 4)} for row in rows]


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What must not be: goodput that falls under load, silence, or requests without an outcome."""
    found = [
        f"{row['requests']} requests at {row['load']}, {row['accounted']} outcomes, {row['silent']} silent"
        for row in rows
        if row["requests"] != row["accounted"] or row["silent"]
    ]
    if rows[-1]["share_of_peak"] < KEPT:
        found.append(f"at {rows[-1]['load']} times the capacity {rows[-1]['share_of_peak']} of the peak is left")
    return found


def main() -> None:
    """The command line; exits with 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="in engine throughputs, ascending")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = run(tuple(map(float, arguments.loads.split(","))), arguments.seconds)
    wrong = faults(rows)
    for text in wrong:
        print(f"FAULT {text}")
    if arguments.output is not None:
        about = {
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "command": " ".join(["python -m benchmarks.gateway.overload", *sys.argv[1:]]),
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps({**row, **about}) for row in rows) + "\n]\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
