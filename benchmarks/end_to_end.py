"""One policy end to end: robots with JPEG cameras over the stream, the gateway, one worker; what each hop costs.

    python benchmarks/end_to_end.py [--clients 1,8,32] [--seconds 10] [--out DIR]

π0.5 of the published size with random weights on a GPU; without one the tests' tiny policy, which shows that the script
works and no more. Robots ask again as soon as they have their chunk; no frame is sent twice. For each number of robots:
the round trip, the medians of its terms and of each hop, and the share of time that the engine ran; beside them the
engine's own T_sync table.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import taktline
import torch
from PIL import Image
from random_folders import pi05_folder, served
from taktline_protocol import metrics
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.gateway.processes import Deployment, free_port

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
BUDGET_MS = 20_000.0
WARM_UP_SHARE = 0.2
HOPS = ("admission", "queue", "batch", "preprocess", "engine", "postprocess", "reply")
_numbers = itertools.count()
"""Of the frames sent so far, by any number of robots."""


def pictures(seed: int) -> dict[str, bytes]:
    """A smooth 640x480 JPEG for each camera."""
    rng = np.random.default_rng(seed)
    found = {}
    for name in CAMERAS:
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        stream = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(stream, "JPEG", quality=85)
        found[name] = stream.getvalue()
    return found


def fresh(frame: bytes, number: int) -> bytes:
    """The same picture in other bytes, as a comment tells: no cache has seen it, and it is decoded like a new one."""
    return frame[:2] + b"\xff\xfe\x00\x06" + number.to_bytes(4, "big") + frame[2:]


def hops(url: str, seconds: float) -> dict[str, float]:
    """Medians of what the gateway's timeline shows of the last seconds, in ms; each worker's phases among them."""
    with urllib.request.urlopen(f"{url}/v1/policies/pi05/timeline", timeout=10) as answer:  # noqa: S310
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


async def ask(url: str, robots: int, seconds: float, metrics_address: str) -> dict[str, Any]:
    """Robots in a closed loop for `seconds` after a warm-up."""
    chunks: list[tuple[taktline.Chunk, float]] = []
    shown = [pictures(seed) for seed in range(8)]
    begin = time.monotonic() + WARM_UP_SHARE * seconds
    end = begin + seconds

    async def robot(index: int) -> None:
        async with taktline.AsyncRobot(url, "pi05", f"robot-{index}") as arm:
            while time.monotonic() < end:
                number = next(_numbers)
                frames = {name: fresh(frame, number) for name, frame in shown[number % 8].items()}
                asked = time.monotonic()
                chunk = await arm.act(frames, np.zeros(8, np.float32), "pick up the block", BUDGET_MS)
                if asked >= begin:
                    chunks.append((chunk, 1e3 * (time.monotonic() - asked)))

    async def engine_share() -> float:
        await asyncio.sleep(begin - time.monotonic())
        before, at = await asyncio.to_thread(busy_s, metrics_address), time.monotonic()
        await asyncio.sleep(max(0.0, end - 0.1 - time.monotonic()))
        return (await asyncio.to_thread(busy_s, metrics_address) - before) / (time.monotonic() - at)

    share, *_ = await asyncio.gather(engine_share(), *(robot(index) for index in range(robots)))
    if not chunks:
        raise SystemExit(f"no robot had an answer within {seconds:g} s")
    timings = [chunk.timings for chunk, _ in chunks]
    return {
        "robots": robots,
        "per_s": len(chunks) / seconds,
        "round_trip_ms": median(ms for _, ms in chunks),
        "p99_ms": float(np.quantile([ms for _, ms in chunks], 0.99)),
        "queue_ms": median(one.queue_ms for one in timings),
        "transfer_ms": median(one.transfer_ms for one in timings),
        "inference_ms": median(one.inference_ms for one in timings),
        "batches": dict(sorted(Counter(chunk.batch_size for chunk, _ in chunks).items())),
        "engine_share": share,
        "hops_ms": hops(url, seconds),
    }


def save(rows: list[dict[str, Any]], t_sync: Any, out: Path) -> Path:
    """Writes what there is so far, so that a run that is ended early keeps it."""
    content = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/end_to_end.py",
        "t_sync": t_sync,
        "rows": sorted(rows, key=lambda row: int(row["robots"])),
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / "end_to_end.json"
    target.write_text(json.dumps(content, indent=1) + "\n")
    return target


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", default="1,2,4,8,16,32", help="numbers of robots (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured time of each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder (%(default)s)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = device.type == "cpu"
    fast = Path("/dev/shm") if not tiny and Path("/dev/shm").is_dir() else None  # noqa: S108
    rows = []
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(dir=fast) as name:
        folder = Path(name)
        config = EngineConfig(
            policy="pi05",
            model=ModelConfig(family="pi05", path=str(pi05_folder(folder / "pi05", device)), revision="random"),
            engine=EngineOptions(
                device=device.type,
                precision="fp32" if tiny else "bf16",
                buckets=(1, 2, 4, 8, 16, 32),
                solver_steps=1 if tiny else None,
            ),
        )
        metrics_address = f"127.0.0.1:{free_port()}"
        say("the checkpoint is written; the worker loads, captures and measures it")
        with served(config, folder, "--metrics-listen", metrics_address) as address:
            deployment = Deployment(folder)
            deployment.write_routes([address], policy="pi05", max_batch=32)
            deployment.start_gateway()
            try:
                deployment.until_ready(1, "pi05", 120)
                say("the gateway serves")
                with urllib.request.urlopen(f"{deployment.url}/v1/policies/pi05", timeout=10) as answer:  # noqa: S310
                    stated = json.load(answer)
                for robots in map(int, options.clients.split(",")):
                    rows.append(asyncio.run(ask(deployment.url, robots, options.seconds, metrics_address)))
                    save(rows, stated.get("t_sync"), options.out)
                    say(json.dumps(rows[-1]))
            finally:
                deployment.stop()
    target = save(rows, stated.get("t_sync"), options.out)
    heads = ("robots", "per_s", "round_trip_ms", "p99_ms", "queue_ms", "transfer_ms", "inference_ms", "engine_share")
    print(" ".join(f"{head:>13}" for head in heads))
    for row in rows:
        print(" ".join(f"{row[head]:>13.2f}" for head in heads))
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
