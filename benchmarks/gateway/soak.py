"""Holds a gateway at 80% load and watches what it holds: memory, tasks, sessions and descriptors must stay flat.

python -m benchmarks.gateway.soak [--minutes M] [--load SHARE] [--robots N] [--output FILE]

Robots in every protocol that the gateway speaks (REST, the stream, openpi, GR00T's ZeroMQ, LeRobot's gRPC, vla-eval,
the Open Inference Protocol) ask at a fixed rate; some leave and others come all the time, so that what a connection
leaves behind would add up. The worker's batches take a fixed time, so capacity does not depend on this machine's cores.
At the end every robot leaves, and the gateway must hold what it held before the first one came: descriptors, tasks,
connections, remembered clients, robots, sessions and requests are counted in its census (SIGUSR1), memory by the
kernel. Exits with 1, and says why, where more is left, where memory grew, or where a request got no word.

A machine that is busy with other work makes requests late and this process blind (`worst_stall_ms`); the run is sound
where that stays under a few hundred ms. Beside other work run it in the real-time class:

    chrt -r 1 python -m benchmarks.gateway.soak --minutes 30 --output benchmarks/results/cpu/gateway-soak.json

The row is printed, and FILE replaced by it alone.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.fleet import CLIENTS, PROTOCOLS, SILENT, Plan, client_ports, fleet, listen_flags
from benchmarks.gateway.links import CHUNK
from benchmarks.gateway.processes import Deployment

WORK_MS = 40.0
BEFORE_MS = 5.0
"""What a batch takes before the engine needs it, as frames are decoded: the next one is sent ahead by as much."""
BATCH = 8
STALL_LOOK_S = 0.1
SETTLE_S = 8.0
"""After the last robot has left: sessions that may be resumed live longer than this unless their robot said goodbye."""
RESUME_S = 2.0
COUNTED = ("descriptors", "tasks", "connections", "clients", "robots", "sessions", "queued")
"""Of a sample: what must be as few after the load as before it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What the gateway held at one instant; `at_s` since the start."""

    at_s: float
    resident_mib: float
    descriptors: int
    tasks: int
    connections: int
    clients: int
    robots: int
    sessions: int
    queued: int


class Watched:
    """A gateway whose census is read from its log."""

    def __init__(self, deployment: Deployment) -> None:
        assert deployment.gateway is not None
        self._deployment = deployment
        self._server = deployment.gateway
        self._began = time.monotonic()
        self._read = 0

    async def sample(self) -> Sample:
        """Asks for a census and reads it. Raises TimeoutError where none comes."""
        self._server.send(signal.SIGUSR1)
        for _ in range(200):
            census = self._census()
            if census is not None:
                return Sample(
                    at_s=round(time.monotonic() - self._began, 1),
                    resident_mib=round(self._server.resident_mib(), 2),
                    descriptors=self._server.descriptors(),
                    tasks=census["task_count"],
                    connections=census["connections"],
                    clients=census["clients"],
                    robots=census["robots"],
                    sessions=census["sessions"],
                    queued=sum(census["unanswered"].values()),
                )
            await asyncio.sleep(0.05)
        raise TimeoutError("the gateway gave no census")

    def _census(self) -> dict[str, object] | None:  # type: ignore[type-arg]
        with self._deployment.log.open() as file:
            file.seek(self._read)
            found = None
            while line := file.readline():
                if not line.endswith("\n"):
                    break
                self._read = file.tell()
                entry = json.loads(line)
                if entry.get("message") == "census":
                    found = entry
        return found


def t_sync_of(work_ms: float) -> str:
    """What the worker says of its times: batches of any size take about as long."""
    return ",".join(
        f"{size}:{BEFORE_MS + share * work_ms:g}" for size, share in ((1, 0.95), (2, 0.975), (4, 1.0), (8, 1.05))
    )


def growth_of(samples: list[Sample]) -> float:
    """MiB by which memory grew between the second and the last quarter of a run (medians, so a peak does not count)."""
    quarter = max(1, len(samples) // 4)
    before = statistics.median(sample.resident_mib for sample in samples[quarter : 2 * quarter] or samples[:1])
    return statistics.median(sample.resident_mib for sample in samples[-quarter:]) - before


class Stalls:
    """The longest that this process was kept from running, ms: on a machine that is too busy the run tells nothing."""

    def __init__(self) -> None:
        self.worst_ms = 0.0

    async def watch(self) -> None:
        """Looks ten times a second, until it is cancelled."""
        while True:
            due = time.monotonic() + STALL_LOOK_S
            await asyncio.sleep(STALL_LOOK_S)
            self.worst_ms = max(self.worst_ms, 1e3 * (time.monotonic() - due))


async def soak(
    folder: Path, seconds: float, load: float, robots: int, sample_s: float, work_ms: float = WORK_MS
) -> dict[str, object]:
    """One run, before a worker whose batches of up to `BATCH` take `work_ms`. Returns its row."""
    capacity_hz = 1e3 * BATCH / work_ms
    stalls = Stalls()
    deployment = Deployment(folder)
    ports = client_ports()
    try:
        address = deployment.start_worker(
            "--t-sync", t_sync_of(work_ms), "--work-ms", str(work_ms), "--before-ms", str(BEFORE_MS)
        )
        deployment.write_routes([address], max_batch=BATCH, clients=CLIENTS)
        deployment.start_gateway(*listen_flags(ports), "--stream-resume-s", str(RESUME_S))
        await asyncio.to_thread(deployment.until_ready, 1)
        plan = Plan(
            policy="noop",
            addresses=[("127.0.0.1", deployment.port)],
            ports={protocol: [("127.0.0.1", port)] for protocol, port in ports.items()},
            period_s=robots / (load * capacity_hz),
            budget_ms=1000.0,
        )
        watched = Watched(deployment)
        async with fleet(plan, PROTOCOLS, len(PROTOCOLS)):
            await asyncio.sleep(min(3.0, 0.2 * seconds))  # what is made once is made before the baseline
        await asyncio.sleep(SETTLE_S)
        before = await watched.sample()
        samples: list[Sample] = []
        books = []
        ends = time.monotonic() + seconds

        async def shift(number: int) -> None:
            """A share of the fleet that comes, stays for a while, and goes, until the time is over."""
            stay_s = max(1.0, min(20.0, seconds / 6)) * (1 + number / 4)
            at = number * (robots // 4) % len(PROTOCOLS)  # a small fleet has every protocol in one of its shifts
            while (left_s := ends - time.monotonic()) > 0.2:
                async with fleet(plan, PROTOCOLS[at:] + PROTOCOLS[:at], robots // 4) as book:
                    books.append(book)
                    await asyncio.sleep(min(stay_s, left_s))

        async def watch() -> None:
            while time.monotonic() < ends:
                await asyncio.sleep(sample_s)
                samples.append(await watched.sample())

        stalling = asyncio.create_task(stalls.watch())
        await asyncio.gather(*(shift(number) for number in range(4)), watch())
        stalling.cancel()
        await asyncio.sleep(SETTLE_S)
        after = await watched.sample()
        for _ in range(20):  # what is merely late goes by itself; a leak stays
            if not _more(dataclasses.asdict(before), dataclasses.asdict(after)):
                break
            await asyncio.sleep(0.5)
            after = await watched.sample()
        words = sum((book.words() for book in books), start=books[0].words().__class__())
        sent = sum(book.sent for book in books)
        over = [outcome.over_ms for book in books for outcome in book.outcomes]
        return {
            "bench": "gateway-soak",
            "seconds": seconds,
            "load": load,
            "robots": robots,
            "protocols": "+".join(PROTOCOLS),
            "requests": sent,
            "accounted": len(over),
            "requests_per_s": round(sent / seconds, 1),
            "work_ms": work_ms,
            "reached_load": round(sent / seconds / capacity_hz, 3),
            "worst_stall_ms": round(stalls.worst_ms, 1),
            "worst_ms": round(max((outcome.took_ms for book in books for outcome in book.outcomes), default=0.0), 1),
            CHUNK: words.pop(CHUNK, 0),
            SILENT: words.pop(SILENT, 0),
            "other": dict(words),
            "late": sum(value > 0 for value in over),
            "memory_growth_mib": round(growth_of(samples), 2),
            "memory_mib": [sample.resident_mib for sample in samples][:: max(1, len(samples) // 60)],
            "before": dataclasses.asdict(before),
            "peak": {field: max(getattr(sample, field) for sample in samples) for field in ("resident_mib", *COUNTED)},
            "after": dataclasses.asdict(after),
        }
    finally:
        deployment.stop()


def _more(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the gateway holds more of after the load."""
    return [
        f"{field}: {before[field]} before the load, {after[field]} after it"
        for field in COUNTED
        if after[field] > before[field]
    ]


def faults(row: dict[str, object], growth_mib: float) -> list[str]:
    """What of a run must not be: leaks, silence, memory that grows."""
    before, after = row["before"], row["after"]
    assert isinstance(before, dict) and isinstance(after, dict)  # noqa: PT018
    found = _more(before, after)
    if row["requests"] != row["accounted"] or row[SILENT]:
        found.append(f"{row['requests']} requests, {row['accounted']} outcomes, {row[SILENT]} silent")
    if float(str(row["memory_growth_mib"])) > growth_mib:
        found.append(f"memory grew by {row['memory_growth_mib']} MiB")
    return found


def main() -> None:
    """The command line; exits with 1 where something leaked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of load; about 40 s more for before and after")
    parser.add_argument("--load", type=float, default=0.8, help="share of what the worker can do")
    parser.add_argument(
        "--robots", type=int, default=28, help="at a time, in four shifts; each shift has every protocol from 28 on"
    )
    parser.add_argument(
        "--work-ms", type=float, default=WORK_MS, help="time of a batch: a longer one asks less of this machine's cores"
    )
    parser.add_argument("--sample-s", type=float, default=5.0, help="from one census to the next")
    parser.add_argument("--growth-mib", type=float, default=8.0, help="growth of memory that is still flat")
    parser.add_argument("--output", type=Path, help="the row goes there as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        row = uvloop.run(
            soak(
                Path(folder),
                60 * arguments.minutes,
                arguments.load,
                arguments.robots,
                arguments.sample_s,
                arguments.work_ms,
            )
        )
    row["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    row["command"] = " ".join(["python -m benchmarks.gateway.soak", *sys.argv[1:]])
    print(json.dumps(row, indent=2))
    wrong = faults(row, arguments.growth_mib)
    for text in wrong:
        print(f"FAULT {text}")
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps([row]) + "\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
