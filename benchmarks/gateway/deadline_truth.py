"""Deadline truth: robots, log and metrics must agree to the request on a run full of faults.

    python -m benchmarks.gateway.deadline_truth --requests 100000

A real gateway process, three scripted worker processes (tests/gateway/scripted_worker.py) that die, hang, fail and are
slow on command, and robots that ask for too much, drop their connections and overtake themselves: most over HTTP, a
fifth with the SDK on streams. Afterwards every
request is looked up in the robots' own count, the gateway's log and its metrics (`truth_books.compare`). Exits with 1
where a claim does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gateway.processes import ROOT, Server, free_port, until
from benchmarks.gateway.truth_books import SDK, Finding, Metrics, compare, network_ms, outcomes_in, unsent
from benchmarks.gateway.truth_robots import SHAPE_WEIGHTS, Robot, SdkRobot, Seen, Tickets

T_SYNC = "1:2,2:2.4,4:3.2,8:4.8,16:8"
WORKERS = 3
BURST_EVERY_S = 5.0
BURST_ROBOTS = 40
QUIET_S = 5.0
"""When nothing was counted for so long, nothing more will be."""


class Worker:
    """A scripted worker that is started again whenever it dies."""

    def __init__(self, address: str, folder: Path) -> None:
        self._command = [
            sys.executable,
            str(ROOT / "tests/gateway/scripted_worker.py"),
            *("--listen", address, "--t-sync", T_SYNC),
        ]
        self._log = folder / f"worker-{address}.log"
        self.deaths = -1
        self.keep_alive()

    def keep_alive(self) -> None:
        """Starts the process where it is not there."""
        if self.deaths < 0 or self._process.poll() is not None:
            self.deaths += 1
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


async def drive(port: int, workers: list[Worker], count: int, robots: int, think_s: float, seed: int) -> list[Seen]:
    """Sends `count` tickets from `robots` robots, with bursts of others now and then; what each of them saw."""
    seen: list[Seen] = []
    tickets = Tickets(count, seed, dict(SHAPE_WEIGHTS))
    stop = asyncio.Event()

    async def watch() -> None:
        while not stop.is_set():
            for worker in workers:
                worker.keep_alive()
            await asyncio.sleep(0.2)

    async def bursts() -> None:
        # Overload: a second fleet that asks without a pause until a share of its tickets is gone.
        for number in range(1, 10_000):
            if stop.is_set():
                return
            await asyncio.sleep(BURST_EVERY_S)
            share = [next(tickets, None) for _ in range(4 * BURST_ROBOTS)]
            left = iter([ticket for ticket in share if ticket is not None])
            fleet = [Robot(port, f"burst-{number}-{i}", left, 0.0, seen) for i in range(BURST_ROBOTS)]  # type: ignore[arg-type]
            await asyncio.gather(*(robot.run() for robot in fleet))

    watcher, overload = asyncio.create_task(watch()), asyncio.create_task(bursts())
    fleet = [Robot(port, f"arm-{i}", tickets, think_s, seen) for i in range(robots)]
    streams = [SdkRobot(port, f"{SDK}{i}", tickets, think_s, seen) for i in range(max(1, robots // 4))]
    await asyncio.gather(*(robot.run() for robot in [*fleet, *streams]))
    stop.set()
    await asyncio.gather(watcher, overload)
    return seen


def measure(count: int, robots: int, think_s: float, seed: int, folder: Path) -> tuple[list[Finding], dict[str, Any]]:
    """One run; its findings, and figures that describe it."""
    log, port = folder / "gateway.log", free_port()
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(WORKERS)]
    route = {"policy": "scripted", "targets": [{"address": a} for a in addresses], "max_batch": 16, "max_wait_ms": 0}
    (folder / "routes.json").write_text(json.dumps({"routes": [route]}))
    workers = [Worker(address, folder) for address in addresses]
    command = [str(Path(sys.executable).parent / "taktline-gateway"), "serve", "--log-level", "debug"]
    command += ["--routes", str(folder / "routes.json"), "--listen", f"127.0.0.1:{port}"]
    gateway = Server(command, log)
    try:
        until(
            lambda: _get(port, "/v1/policies/scripted").get("workers") == WORKERS,
            f"{WORKERS} workers being up",
            servers=lambda: [gateway],
        )
        began = time.monotonic()
        seen = asyncio.run(drive(port, workers, count, robots, think_s, seed))
        seconds = time.monotonic() - began

        _settle(port, len(seen))
        found, lines = _metrics(port), outcomes_in(log)
    finally:
        gateway.stop()
        for worker in workers:
            worker.stop()
    unseen = network_ms(seen, lines) or [float("nan")]  # where nothing at all was answered
    figures = {
        "requests": len(seen),
        "seconds": round(seconds, 1),
        "outcomes": dict(Counter(line["code"] for line in lines).most_common()),
        "misses": dict(Counter(line["cause"] for line in lines if "cause" in line).most_common()),
        "answered_by_the_sdk": len(unsent(seen, lines)),
        "worker_deaths": sum(worker.deaths for worker in workers),
        "unseen_ms": {"median": round(float(np.median(unseen)), 3), "p99": round(float(np.percentile(unseen, 99)), 3)},
    }
    return compare(seen, lines, found), figures


def _settle(port: int, expected: int) -> None:
    """Waits until every request is over: some robots have left before. What never comes is for `compare` to name."""
    counted, since = -1, time.monotonic()
    while counted < expected and time.monotonic() - since < QUIET_S:
        now = round(_metrics(port).total("taktline_requests_total"))
        if now != counted:
            counted, since = now, time.monotonic()
        time.sleep(0.1)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--robots", type=int, default=32, help="robots that ask all the time, beside the bursts")
    parser.add_argument("--think-ms", type=float, default=20.0, help="mean pause of a robot between two requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with tempfile.TemporaryDirectory(prefix="deadline-truth-") as folder:
        findings, figures = measure(
            arguments.requests, arguments.robots, arguments.think_ms / 1e3, arguments.seed, Path(folder)
        )
    print(json.dumps(figures, indent=2))
    for finding in findings:
        print(f"{'holds' if finding.holds else 'FAILS':5}  {finding.checked:7}  {finding.claim}")
        for wrong in finding.wrong[:5]:
            print(f"         {wrong}")
    if arguments.json:
        claims = [{"claim": f.claim, "checked": f.checked, "wrong": len(f.wrong)} for f in findings]
        command = f"python -m benchmarks.gateway.deadline_truth --requests {arguments.requests}"
        command += f" --robots {arguments.robots} --think-ms {arguments.think_ms:g} --seed {arguments.seed}"
        about = {"date": datetime.date.today().isoformat(), "command": command}
        rows = [{"bench": "gateway-deadline-truth", **figures, "claims": claims, **about}]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(finding.holds for finding in findings) else 1


def _get(port: int, path: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return {}


def _metrics(port: int) -> Metrics:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return Metrics(answer.read().decode())


if __name__ == "__main__":
    sys.exit(main())
