"""Request traces of real robots: recorded from a running gateway, kept small, and played to the scheduling policies.

python -m benchmarks.gateway.recorded record --url URL --policy NAME --seconds S --about TEXT FILE.json.gz
python -m benchmarks.gateway.recorded compare [--output FILE] [--engine NAME] [--seeds N]

record:  asks the gateway's timeline (`GET /v1/policies/{policy}/timeline`) again and again, and keeps of every request
         when it came, whose it is, what was left of its deadline, its class, what became of it, and how many actions it
         got. Nothing of what a robot sees or is told is in there; robots are numbers.
compare: the traces in benchmarks/gateway/recorded on our policy and the others, and against the bounds.

A recording holds what robots asked while the gateway served them: it is played as it is, whatever a policy would have
made of the robots. To load an engine that is not the one they were served by, more such robots are laid over them, each
lot some time later, and what is left is made up for by playing it faster or slower, its budgets with it. A robot asked
again because it had been answered; a request that comes before the deadline of its robot's last one is another
robot's to the policies, so that it takes nobody's place.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gzip
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.times import Engine
from benchmarks.gateway.traces import Job, Trace

FOLDER = Path(__file__).parent / "recordings"
CAMERAS_FILE = FOLDER / "arm-cameras.zip"
POLL_S = 1.0
ROBOT_TRACKS = 1
COLUMNS = ("at_us", "robot", "seq", "budget_us", "priority", "outcome", "actions")


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a file holds.

    Attributes:
        about: who asked, of what, and where.
        info: policy, horizon, dt_s and T_sync of the workers at the time.
        requests: `COLUMNS` of each, by arrival; priority and outcome are indices into `words`.
    """

    name: str
    about: str
    date: str
    info: dict[str, Any]
    words: list[str]
    requests: list[list[int]]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return (self.requests[-1][0] - self.requests[0][0]) / 1e6

    @property
    def rate_hz(self) -> float:
        """Requests a second."""
        return (len(self.requests) - 1) / self.seconds

    @functools.cached_property
    def robots(self) -> int:
        """How many robots asked."""
        return len({request[1] for request in self.requests})

    def trace(self, engine: Engine, load: float | None = None) -> Trace:
        """The trace at `load` of this engine, with so many lots of robots as come nearest; None plays it as it was.

        What a later lot asked before the others began follows at the end, of robots that are new.
        """
        own = self.rate_hz / engine.capacity_hz
        lots = 1 if load is None else max(1, round(load / own))
        stretch = 1.0 if load is None else lots * own / load
        began, length = self.requests[0][0], self.requests[-1][0] - self.requests[0][0] + 1
        jobs = []
        for lot in range(lots):
            for at, robot, seq, budget, *_ in self.requests:
                turn, arrival = divmod(at - began + length * lot // lots, length)
                whose = robot + self.robots * (2 * lot + turn)
                jobs.append(Job(whose, seq, stretch * arrival / 1e6, stretch * (arrival + budget) / 1e6))
        jobs.sort(key=lambda job: job.arrival)
        return Trace(self.name, own if load is None else load, tuple(_apart(jobs)))


def _apart(jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs by arrival, each under a robot's name that has nothing else open until its deadline."""
    busy: dict[int, list[tuple[int, float]]] = {}
    names = 0
    for job in jobs:
        own = busy.setdefault(job.robot, [])
        place = next((place for place, (_, until) in enumerate(own) if until <= job.arrival), len(own))
        if place == len(own):
            own.append((names, 0.0))
            names += 1
        own[place] = (own[place][0], job.deadline)
        yield dataclasses.replace(job, robot=own[place][0])


def read(path: Path) -> Recording:
    """A recorded file."""
    with gzip.open(path, "rt") as file:
        return Recording(path.name.removesuffix(".json.gz"), **json.load(file))


def recordings() -> Iterator[Recording]:
    """All committed ones."""
    for path in sorted(FOLDER.glob("*.json.gz")):
        yield read(path)


class Recorder:
    """Collects the requests of one policy from its timeline; what `requests` gives is complete up to the last poll."""

    def __init__(self, url: str, policy: str) -> None:
        self._url, self._policy = url.rstrip("/"), policy
        self._seen: dict[tuple[str, str, int], list[Any]] = {}
        self.gaps = 0
        """Polls that shared no request with the one before: more came meanwhile than the gateway keeps."""

    def poll(self) -> None:
        """Asks once. Raises OSError where nobody answers."""
        trace = self._get("/timeline")
        origin = trace["otherData"]["origin_s"]
        found = {}
        for event in trace["traceEvents"]:
            about = event.get("args", {})
            if event.get("pid") != ROBOT_TRACKS or "budget_ms" not in about or "request_id" not in about:
                continue
            at_s = origin + event["ts"] / 1e6 + about.get("observe_ms", 0.0) / 1e3
            robot = about["robot"]
            found[about["request_id"], robot, about["seq"]] = [
                at_s, robot, about["seq"], about["budget_ms"], about.get("priority", ""), about["outcome"],
                about.get("actions", 0),
            ]  # fmt: skip
        if self._seen and found and not found.keys() & self._seen.keys():
            self.gaps += 1
        self._seen.update(found)

    def requests(self) -> tuple[list[str], list[list[int]]]:
        """Words, and the requests as `Recording` has them."""
        ordered = sorted(self._seen.values())
        words: dict[str, int] = {}
        robots: dict[str, int] = {}
        began = ordered[0][0] if ordered else 0.0
        rows = [
            [
                round(1e6 * (at_s - began)),
                robots.setdefault(robot, len(robots)),
                seq,
                round(1e3 * budget_ms),
                words.setdefault(priority, len(words)),
                words.setdefault(outcome, len(words)),
                actions,
            ]
            for at_s, robot, seq, budget_ms, priority, outcome, actions in ordered
        ]
        return list(words), rows

    def info(self) -> dict[str, Any]:
        """What the gateway says of the policy."""
        told = self._get("")
        return {name: told.get(name) for name in ("policy", "family", "horizon", "dt_s", "workers", "rtc", "t_sync")}

    def _get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/v1/policies/{self._policy}{path}", timeout=30) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
        return found


def write(path: Path, recorder: Recorder, info: dict[str, Any], about: str) -> None:
    """The file of what was recorded. Raises RuntimeError where requests are missing, or there are none."""
    words, requests = recorder.requests()
    if recorder.gaps or len(requests) < 2:
        raise RuntimeError(f"{len(requests)} requests, {recorder.gaps} gaps between them: poll more often")
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        found = {"about": about, "date": date, "info": info, "words": words, "requests": requests}
        file.write(json.dumps(found, separators=(",", ":")).encode())


def record(options: argparse.Namespace) -> None:
    """Polls for a while and writes the file."""
    recorder = Recorder(options.url, options.policy)
    end = time.monotonic() + options.seconds
    info = recorder.info()
    while time.monotonic() < end:
        time.sleep(POLL_S)
        with contextlib.suppress(OSError):
            recorder.poll()
            info = recorder.info()
    write(options.file, recorder, info, options.about)
    print(f"{options.file}: {len(recorder.requests()[1])} requests, {options.file.stat().st_size} bytes")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record the requests of a running gateway")
    recording.add_argument("--url", default="http://127.0.0.1:8080")
    recording.add_argument("--policy", required=True)
    recording.add_argument("--seconds", type=float, default=120.0)
    recording.add_argument("--about", required=True, help="who asked, of what, and where")
    recording.add_argument("file", type=Path)
    comparing = commands.add_parser("compare", help="play the committed recordings to the policies")
    comparing.add_argument("--output", type=Path)
    comparing.add_argument("--engine", action="append")
    comparing.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.command == "record":
        record(options)
        return
    from benchmarks.gateway.recorded_comparison import compare

    command = " ".join(["python -m benchmarks.gateway.recorded", *sys.argv[1:]])
    compare(options.engine, options.seeds, options.output, command)


if __name__ == "__main__":
    main()
