"""One policy end to end: robots with cameras over the stream, `taktline up`'s gateway and worker; what each hop costs.

    python benchmarks/end_to_end.py [--clients 1,8] [--seconds 2,10] [--fit worker,robot] [--folder DIR] [--out DIR]

π0.5 of the published size with random weights, in openpi's layout, on a GPU; without one the tests' tiny policy, which
shows that the script works and no more. Robots ask again as soon as they have their chunk; no frame is sent twice, and
no state. Their three cameras deliver 640x480: `worker` sends JPEGs as cameras make them, which the worker decodes and
scales down; with `robot` the SDK fits each picture to the policy's size first and sends that as a JPEG.

For each: the round trip, what the robot itself took of it before sending, the medians of the terms and of each hop, and
the share of time that the engine ran; beside them the engine's own T_sync table.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import io
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import taktline
import torch
from numpy.typing import NDArray
from PIL import Image
from random_folders import PI_CAMERAS, openpi_folder
from taktline_protocol import metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gateway.processes import free_port

POLICY = "pi05"
BUDGET_MS = 20_000.0
WARM_UP_SHARE = 0.2
SCENES = 8
NOISE = 4.0
"""Deviation of a pixel, in grey levels: without a sensor's noise a JPEG is half as long, and decoded the faster."""
START_LIMIT_S = 300.0
METRICS_PORT = 9464
LOOK_S = 0.003
FITS = ("worker", "robot")
HOPS = ("admission", "queue", "batch", "preprocess", "engine", "postprocess", "reply")
_numbers = itertools.count()
"""Of the observations so far, by any number of robots."""


@functools.cache
def scene(seed: int) -> dict[str, NDArray[np.uint8]]:
    """A 640x480 picture for each camera, smooth but for the noise."""
    draw = np.random.default_rng(seed)
    found = {}
    for name in PI_CAMERAS:
        coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), np.float32)
        found[name] = (smooth + draw.normal(0, NOISE, smooth.shape)).clip(0, 255).astype(np.uint8)
    return found


def as_jpeg(picture: NDArray[np.uint8]) -> bytes:
    """As a camera delivers it."""
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=85)
    return stream.getvalue()


def fresh(frame: bytes | NDArray[np.uint8], number: int) -> bytes | NDArray[np.uint8]:
    """The same picture in other bytes, so that nothing that was kept of it helps: another comment, another corner."""
    mark = number.to_bytes(4, "big")
    if isinstance(frame, bytes):
        return frame[:2] + b"\xff\xfe\x00\x06" + mark + frame[2:]
    changed = frame.copy()
    changed[:16, :16] = np.frombuffer(mark, np.uint8)[1:]
    return changed


def hops(url: str, seconds: float) -> dict[str, float]:
    """Medians of what the gateway's timeline shows of the last seconds, in ms; each worker's phases among them."""
    with urllib.request.urlopen(f"{url}/v1/policies/{POLICY}/timeline", timeout=10) as answer:  # noqa: S310
        events = json.load(answer)["traceEvents"]
    found: dict[str, list[float]] = {}
    events = [event for event in events if event["ph"] == "X" and event["name"] in HOPS]
    since = max((event["ts"] for event in events), default=0.0) - 1e6 * seconds  # fewer robots were before
    for event in events:
        if event["ts"] >= since:
            found.setdefault(event["name"], []).append(event["dur"] / 1e3)
    return {name: median(found[name]) for name in HOPS if name in found}


def busy_s(address: str) -> float:
    """Seconds that the worker's engine has run so far."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metrics.WORKER_BUSY))


async def ask(url: str, robots: int, seconds: float, metrics_address: str, fit: str) -> dict[str, Any]:
    """Robots in a closed loop for `seconds` after a warm-up."""
    chunks: list[tuple[taktline.Chunk, float]] = []
    scenes = [scene(seed) for seed in range(SCENES)]
    on_robot = fit == "robot"
    shown: list[dict[str, Any]] = (
        [*scenes] if on_robot else [{name: as_jpeg(picture) for name, picture in one.items()} for one in scenes]
    )
    options: dict[str, Any] = {"fit_frames": True, "jpeg_quality": 95} if on_robot else {}
    begin = time.monotonic() + WARM_UP_SHARE * seconds
    end = begin + seconds

    async def robot(index: int) -> None:
        async with taktline.AsyncRobot(url, POLICY, f"robot-{index}", **options) as arm:
            while time.monotonic() < end:
                number = next(_numbers)
                frames = {name: fresh(frame, number) for name, frame in shown[number % SCENES].items()}
                state = np.sin(number + np.arange(8))
                asked = time.monotonic()
                chunk = await arm.act(frames, state, "pick up the block", BUDGET_MS)
                if asked >= begin:
                    chunks.append((chunk, 1e3 * (time.monotonic() - asked)))

    async def batch_ends() -> tuple[float, float]:
        """The engine's seconds so far, as of the instant at which a batch has ended: they are counted by the batch."""
        first = now = await asyncio.to_thread(busy_s, metrics_address)
        while now == first:
            await asyncio.sleep(LOOK_S)
            now = await asyncio.to_thread(busy_s, metrics_address)
        return now, time.monotonic()

    async def engine_share() -> float:
        await asyncio.sleep(begin - time.monotonic())
        before, since = await batch_ends()
        await asyncio.sleep(max(0.0, since + 0.8 * seconds - time.monotonic()))
        after, until = await batch_ends()
        return (after - before) / (until - since)

    share, *_ = await asyncio.gather(engine_share(), *(robot(index) for index in range(robots)))
    if not chunks:
        raise SystemExit(f"no robot had an answer within {seconds:g} s")
    timings = [chunk.timings for chunk, _ in chunks]
    trips = [ms for _, ms in chunks]
    on_way = [one.transfer_ms + one.queue_ms + one.inference_ms for one in timings]
    return {
        "fit": fit,
        "robots": robots,
        "seconds": seconds,
        "per_s": len(chunks) / seconds,
        "round_trip_ms": median(trips),
        "p99_ms": float(np.quantile(trips, 0.99)),
        "robot_ms": median(trip - rest for trip, rest in zip(trips, on_way, strict=True)),
        "queue_ms": median(one.queue_ms for one in timings),
        "transfer_ms": median(one.transfer_ms for one in timings),
        "inference_ms": median(one.inference_ms for one in timings),
        "batches": dict(sorted(Counter(chunk.batch_size for chunk, _ in chunks).items())),
        "engine_share": share,
        "hops_ms": hops(url, seconds),
    }


def deployment(checkpoint: Path, tiny: bool) -> dict[str, Any]:
    """The PolicyDeployment."""
    return {
        "apiVersion": "taktline.dev/v1alpha1",
        "kind": "PolicyDeployment",
        "metadata": {"name": POLICY},
        "spec": {
            "model": {"family": POLICY, "source": {"path": str(checkpoint)}},
            "engine": {
                "precision": "fp32" if tiny else "bf16",
                "buckets": [1, 2, 4, 8, 16, 32],
                **({"solverSteps": 1} if tiny else {}),
            },
            "pools": [
                {"name": "here", "accelerator": "cpu" if tiny else "h200", "minReplicas": 1, "maxReplicas": 1},
            ],
            "slo": {"controlBudgetMs": BUDGET_MS, "onTimeObjective": 0.99},
            "batching": {"maxBatch": 32, "maxWaitMs": 0},
        },
    }


@contextmanager
def up(content: dict[str, Any], folder: Path) -> Iterator[tuple[str, str]]:
    """`taktline up --serve`: the gateway's URL and the address of the worker's metrics."""
    file = folder / "deployment.yaml"
    file.write_text(json.dumps(content))  # which is YAML, too
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = shutil.which("taktline", path=search) or "taktline"
    logs, port, said = folder / "logs", free_port(), folder / "up.log"
    with said.open("w") as stream:
        process = subprocess.Popen(
            [command, "up", str(file), "--serve", "--port", str(port), "--logs", str(logs)], stderr=stream
        )
    try:
        until = time.monotonic() + START_LIMIT_S
        while f"serving {POLICY}" not in said.read_text():
            if process.poll() is not None or time.monotonic() > until:
                tails = [said, *logs.rglob("*.log")]
                raise SystemExit("\n".join(f"--- {log}\n{log.read_text()[-2000:]}" for log in tails))
            time.sleep(0.05)
        targets = json.loads((logs / "routes.json").read_text())["routes"][0]["targets"]
        host = targets[0]["address"].rpartition(":")[0]
        yield f"http://127.0.0.1:{port}", f"{host}:{METRICS_PORT}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def save(rows: list[dict[str, Any]], t_sync: Any, out: Path) -> Path:
    """Writes what there is so far, so that a run that is ended early keeps it."""
    content = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "kernel": platform.release(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/end_to_end.py",
        "t_sync": t_sync,
        "rows": sorted(rows, key=lambda row: (-FITS.index(str(row["fit"])), int(row["robots"]))),
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / "end_to_end.json"
    target.write_text(json.dumps(content, indent=1) + "\n")
    return target


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,2,4,8,16,32", help="numbers of robots (%(default)s)")
    parser.add_argument("--seconds", default="10", help="measured time, of all or of each number (%(default)s)")
    parser.add_argument("--fit", default=",".join(FITS), help="who fits the frames (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep the random checkpoint here, and take it where it is there")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder (%(default)s)")
    options = parser.parse_args()
    fits = options.fit.split(",")
    if not set(fits) <= set(FITS):
        parser.error(f"--fit takes {' and '.join(FITS)}")
    clients = [int(number) for number in options.clients.split(",")]
    seconds = [float(number) for number in options.seconds.split(",")]
    seconds *= len(clients) if len(seconds) == 1 else 1
    if len(seconds) != len(clients):
        parser.error("--seconds takes one number, or one for each of --clients")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = device.type == "cpu"
    fast = Path("/dev/shm") if not tiny and Path("/dev/shm").is_dir() else None  # noqa: S108
    rows: list[dict[str, Any]] = []
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(dir=fast) as name:
        checkpoint: Path = options.folder or Path(name) / "checkpoint"
        if not (checkpoint / "taktline.json").exists():  # which is written last
            openpi_folder(checkpoint, device)
        torch.cuda.empty_cache()
        say("the checkpoint is written; the worker loads, captures and measures it")
        with up(deployment(checkpoint.resolve(), tiny), Path(name)) as (url, address):
            say("the gateway serves")
            with urllib.request.urlopen(f"{url}/v1/policies/{POLICY}", timeout=10) as answer:  # noqa: S310
                stated = json.load(answer)
            for (robots, length), fit in itertools.product(zip(clients, seconds, strict=True), fits):
                rows.append(asyncio.run(ask(url, robots, length, address, fit)))
                save(rows, stated.get("t_sync"), options.out)
                say(json.dumps(rows[-1]))
    target = save(rows, stated.get("t_sync"), options.out)
    heads = ("robots", "per_s", "round_trip_ms", "p99_ms", "robot_ms", "queue_ms", "transfer_ms", "inference_ms")
    print(f"{'fit':>8}", " ".join(f"{head:>13}" for head in (*heads, "preprocess", "engine_share")))
    for row in rows:
        values = [*(row[head] for head in heads), row["hops_ms"].get("preprocess", 0.0), row["engine_share"]]
        print(f"{row['fit']:>8}", " ".join(f"{value:>13.2f}" for value in values))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
