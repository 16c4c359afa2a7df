"""Makes the committed recordings: SDK robots in processes of their own against a real gateway, while it is recorded.

python -m benchmarks.gateway.recorded_fleets lines|shifts|arms|cameras [--seconds S] [--episodes N]

lines:  robots of three lines (10, 20 and 50 actions a second, chunks of 50) play their buffers through a Player over
        the stream, ask again after 10 to 25 actions, a third of them with the rest of the chunk for real-time chunking.
        All start within two seconds.
shifts: the same robots, in episodes: each works for seconds, rests, and begins anew with an empty buffer; lines come
        and go together, so that the load swings from nothing to more than can be served, and some robots claim
        `background`.
arms:   the demo's simulated MuJoCo arms, `taktline-demo fleet`, against the demo policy on this machine's CPU.
cameras: what one of these arms sends: JPEG frames, state and words, for `stream_bytes`.

The workers of lines and shifts take as long for each batch as `pi05-h200` and `pi05` of `times`, with a spread, and
compute nothing. Robots' loops have the jitter of this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import taktline
from taktline.action_buffer import Mark
from taktline_demo.jpeg import encode_jpeg
from taktline_protocol.messages import PriorityName

from benchmarks.gateway.noop_worker import CAMERAS, STATE_DIM
from benchmarks.gateway.processes import ROOT, Deployment, Server, free_port, until
from benchmarks.gateway.recorded import CAMERAS_FILE, FOLDER, POLL_S, Recorder, write
from benchmarks.gateway.times import ENGINES

Kind = Literal["lines", "shifts"]
PROCESSES = 4
ROBOTS = {"lines": 64, "shifts": 96}
SERVED_BY = {"lines": "pi05-h200", "shifts": "pi05"}
RATES_HZ = (10.0, 20.0, 50.0)
REST_EVERY = 3
"""Robots of a shift that claim `background`: one in so many."""
ARMS = 3
DEMO = "demo-reach"
BIN = Path(sys.executable).parent


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one robot plays."""

    name: str
    rate_hz: float
    replan: int
    rtc: bool
    priority: PriorityName
    starts_s: tuple[float, ...]
    stops_s: tuple[float, ...]


class Buffer(taktline.ActionBuffer):
    """Takes the no-op worker's rows for some of its own line's control period: they move nothing."""

    def add(self, chunk: taktline.Chunk, mark: Mark) -> bool:
        """As of `ActionBuffer`."""
        return super().add(dataclasses.replace(chunk, dt_s=self.dt_s), mark)


def plans(kind: Kind, seconds: float, seed: int = 5) -> list[Plan]:
    """The robots of a recording."""
    rng = random.Random(seed)
    made = []
    for number in range(ROBOTS[kind]):
        line = number % len(RATES_HZ)
        replan = rng.randint(10, 25)
        starts, stops = [rng.uniform(0.0, 2.0)], [seconds]
        if kind == "shifts":
            at, starts, stops = rng.uniform(0.0, 3.0) + 12.0 * line, [], []
            while at < seconds:
                work_s = rng.uniform(8.0, 20.0) + 10.0 * (number % 2)
                starts.append(at)
                stops.append(min(seconds, at + work_s))
                at += work_s + rng.uniform(1.0, 12.0)
        background = kind == "shifts" and number % REST_EVERY == 0 and line == 0
        made.append(
            Plan(
                f"{kind}-{number}",
                RATES_HZ[line],
                replan,
                number % 3 == 0,
                "background" if background else "production",
                tuple(starts),
                tuple(stops),
            )
        )
    return made


def _play(url: str, plan: Plan, began: float) -> None:
    """One robot until its last shift is over. What cannot be served is what is to be recorded."""
    noise = np.random.default_rng(abs(hash(plan.name)) % 2**32)
    frames = {camera: noise.integers(0, 256, (84, 84, 3), dtype=np.uint8) for camera in CAMERAS}
    images = {camera: encode_jpeg(frame) for camera, frame in frames.items()}
    with taktline.Robot(url, "noop", plan.name) as robot:

        def ask(*about: object, **more: object) -> object:
            return robot.ask(*about, priority=plan.priority, **more)  # type: ignore[arg-type]

        for start, stop in zip(plan.starts_s, plan.stops_s, strict=True):
            time.sleep(max(0.0, began + start - time.monotonic()))
            player = taktline.Player(ask, 1.0 / plan.rate_hz, replan_rows=plan.replan, rtc=plan.rtc)  # type: ignore[arg-type]
            player.buffer = Buffer(player.buffer.dt_s)
            tick = time.monotonic()
            while time.monotonic() < began + stop:
                if player.wants_observation():
                    player.observe(images, np.zeros(STATE_DIM), "pick up the block")
                player.next_action()
                tick = max(tick + 1.0 / plan.rate_hz, time.monotonic() - 0.5 / plan.rate_hz)
                time.sleep(max(0.0, tick - time.monotonic()))
            player.reset()


def _process(url: str, robots: list[Plan], began: float) -> None:
    with ThreadPoolExecutor(len(robots)) as pool:
        for running in [pool.submit(_play, url, plan, began) for plan in robots]:
            running.result()


def record_robots(kind: Kind, seconds: float, file: Path) -> None:
    """Runs the robots of `lines` or `shifts`, and writes what they asked."""
    engine = next(engine for engine in ENGINES if engine.name == SERVED_BY[kind])
    table = ",".join(f"{size}:{1e3 * engine.median_s(size):.3f}" for size in engine.buckets)
    context = multiprocessing.get_context("spawn")
    made = plans(kind, seconds)
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder))
        try:
            worker = deployment.start_worker("--t-sync", table, "--paced", "--rtc", "guided")
            deployment.write_routes([worker], max_batch=32)
            deployment.start_gateway("--log-level", "error")
            deployment.until_ready(1)
            began = time.monotonic() + 5.0
            children = [
                context.Process(target=_process, args=(deployment.url, made[index::PROCESSES], began))
                for index in range(PROCESSES)
            ]
            for child in children:
                child.start()
            recorder = Recorder(deployment.url, "noop")
            while any(child.is_alive() for child in children):
                time.sleep(POLL_S)
                recorder.poll()
            failed = [child.exitcode for child in children if child.exitcode]
            if failed:
                raise RuntimeError(f"processes of robots ended with {failed}")
            recorder.poll()
            about = (
                f"{len(made)} taktline.Player robots over the stream in {PROCESSES} processes"
                f" (python -m benchmarks.gateway.recorded_fleets {kind}), one worker with the batch times of"
                f" {engine.name}, the gateway beside them on the same machine"
            )
            write(file, recorder, recorder.info(), about)
        finally:
            deployment.stop()


@contextlib.contextmanager
def _demo() -> Iterator[tuple[str, Recorder]]:
    """The demo's platform, served until the block ends: its address, and a recorder of it."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        up = [str(BIN / "taktline"), "up", "deploy/examples/demo-reach.yaml", "--serve", "--port", str(port)]
        platform = Server([*up, "--logs", folder], Path(folder) / "platform.log")
        recorder = Recorder(f"http://127.0.0.1:{port}", DEMO)

        def ready() -> bool:
            try:
                return bool(recorder.info()["workers"])
            except OSError:
                return False

        try:
            until(ready, "the demo policy being served", 180.0, lambda: [platform])
            yield f"http://127.0.0.1:{port}", recorder
        finally:
            platform.stop()


def record_arms(file: Path, episodes: int) -> None:
    """Runs the demo's fleet against its policy, and writes what the arms asked."""
    with _demo() as (url, recorder):
        command = [str(BIN / "taktline-demo"), "fleet", "--url", url, "--robots", str(ARMS)]
        command += ["--episodes", str(episodes)]
        fleet = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while fleet.poll() is None:
            time.sleep(POLL_S)
            recorder.poll()
        recorder.poll()
        about = (
            f"{ARMS} simulated arms of the demo in closed loop, a process each (taktline-demo fleet), with"
            " demo/checkpoint on the CPU (taktline up deploy/examples/demo-reach.yaml), all on the same machine"
        )
        write(file, recorder, recorder.info(), about)


def record_cameras(file: Path, episodes: int) -> None:
    """Runs one arm against the demo's policy, and writes every observation as it was sent."""
    from taktline_demo.environment import ReachEnvironment
    from taktline_demo.fleet.control_loop import ControlLoop
    from taktline_demo.fleet.records import RobotReport

    sent: list[dict[str, Any]] = []
    frames: list[tuple[str, bytes]] = []

    class Noting:
        def act(self, images: Any, state: Any, instruction: str, budget_ms: float, **more: Any) -> Any:
            number = len(sent)
            sent.append({"state": state.tolist(), "instruction": instruction, "budget_ms": round(budget_ms, 1)})
            frames.extend((f"{number:03d}-{camera}.jpg", jpeg) for camera, jpeg in images.items())
            return robot.act(images, state, instruction, budget_ms, **more)

    with _demo() as (url, _), taktline.Robot(url, DEMO, "arm") as robot:
        environment = ReachEnvironment()
        environment.frames()
        loop = ControlLoop(environment, Noting(), RobotReport("arm"))
        for seed in range(episodes):
            loop.run_episode(seed)
        loop.close()
        environment.close()
    about = (
        f"one simulated arm in closed loop with demo/checkpoint through the gateway, {episodes} episodes in real time"
    )
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in [("sequence.json", json.dumps({"about": about, "sent": sent}).encode()), *frames]:
            archive.writestr(zipfile.ZipInfo(name), data)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("lines", "shifts", "arms", "cameras"))
    parser.add_argument("--seconds", type=float, default=120.0, help="of lines and shifts")
    parser.add_argument("--episodes", type=int, default=10, help="of each arm")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    file = options.output or (CAMERAS_FILE if options.kind == "cameras" else FOLDER / f"{options.kind}.json.gz")
    if options.kind == "arms":
        record_arms(file, options.episodes)
    elif options.kind == "cameras":
        record_cameras(file, options.episodes)
    else:
        record_robots(options.kind, options.seconds, file)
    print(f"{file}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
