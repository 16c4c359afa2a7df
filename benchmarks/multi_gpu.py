"""Several GPUs of one host, each figure beside that of one GPU of the same run.

    python benchmarks/multi_gpu.py [--gpus N] [--only planner,replicas,cosmos3,vae] [--quick] [--limit-s S] [--out DIR]

planner: a V-JEPA 2-AC plan on 1, 2, 4, ... ranks of one mesh, 800 candidates and 80 elites as published; all plans must
    be the same bytes; the latency model. Three rounds on one rank and on all.
replicas: π0.5 with one replica a GPU behind one port; 32 clients, batches of up to 4, formed within 20 ms.
cosmos3: Cosmos3-Nano, official and published shape, on every form of mesh (mesh_cosmos3.py under torchrun).
vae: an imagined video decoded in one tile a rank, beside the whole on one (mesh_vae.py under torchrun).

Rows are written as they come; what would begin after --limit-s is left out, and said. NVLink multicast is left off.

Random weights of the published size, through the product's own worker and loader. Without a GPU the same runs on this
machine's cores with the tests' tiny checkpoints: that shows that it works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from random_folders import pi05_folder, planner_folder, served
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, ParallelOptions, SearchOptions
from taktline_protocol.rpc import CHANNEL_OPTIONS
from taktline_protocol.search_latency import UNIT_ON_A_GPU, units_of

CLIENTS, BATCH, WINDOW_S = 32, 4, 0.020
"""The serving setting of the paper: how many robots ask at once, a GPU's batch, and how long it may take to form."""
START = time.monotonic()


@dataclass
class ScalingRow:
    """One configuration. `scale` is its throughput (or speed) over that of one GPU."""

    part: str
    gpus: int
    median_ms: float
    per_s: float
    scale: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What the command line asked for."""

    device: torch.device
    gpus: int
    quick: bool
    folder: Path
    limit_s: float

    @property
    def sizes(self) -> list[int]:
        """Powers of two up to the number of GPUs."""
        return [size for size in (1, 2, 4, 8) if size <= self.gpus]

    def out_of_time(self, what: str) -> bool:
        """Whether nothing more may begin; says what is left out."""
        if time.monotonic() - START < self.limit_s:
            return False
        say(f"left out for want of time: {what}")
        return True


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def planner(setting: Setting) -> Iterator[ScalingRow]:
    """The published search, and three rounds of it."""
    from taktline_worker.profiling.ranks import measure

    tiny = setting.device.type == "cpu"
    options = SearchOptions(candidates=800, elites=80)
    if tiny:
        options = SearchOptions(candidates=64, elites=8, rounds=2, micro_batch=8)
    config = EngineConfig(
        policy="planner",
        model=ModelConfig(
            family="vjepa2-ac", path=str(planner_folder(setting.folder / "planner", setting.device)), revision="random"
        ),
        engine=EngineOptions(
            device=setting.device.type, precision="fp32" if tiny else "bf16", buckets=(1,), search=options
        ),
    )
    units = units_of(options.candidates, options.micro_batch or UNIT_ON_A_GPU)
    assert units >= setting.sizes[-1], f"{units} units leave some of {setting.sizes[-1]} ranks without work"
    for rounds, sizes in ((options.rounds, setting.sizes), (3, sorted({1, setting.sizes[-1]}))):
        if setting.out_of_time(f"planner, {rounds} rounds"):
            return
        times = measure(config, sizes, 1, say, rounds=rounds)
        assert times.plans_equal, "meshes of different sizes found different plans"
        alone = times.measurements[0].seconds
        details: dict[str, Any] = {"rounds": rounds, "candidates": times.candidates, "plans_equal": True}
        if len(sizes) >= 3:
            details["model"] = asdict(times.model)
        for one in times.measurements:
            name = f"planner, {rounds} rounds"
            yield ScalingRow(name, one.ranks, 1e3 * one.seconds, 1 / one.seconds, alone / one.seconds, details)


def observation(index: int, views: tuple[str, ...], state: int, side: int = 224) -> worker_pb2.InferItem:
    """A request of client `index`: raw frames of its own."""
    frames = np.random.default_rng(index).integers(0, 256, (len(views), side, side, 3), dtype=np.uint8)
    return worker_pb2.InferItem(
        request_id=f"client-{index}",
        images={
            name: worker_pb2.Image(encoding="raw", data=frame.tobytes(), shape=frame.shape)
            for name, frame in zip(views, frames, strict=True)
        },
        state=worker_pb2.Tensor(dtype="float32", shape=[state], data=np.zeros(state, "<f4").tobytes()),
        instruction="pick up the block",
        seed=index,
    )


class Window:
    """Forms batches of up to `BATCH` within `WINDOW_S` of the first member, and keeps `replicas` of them in flight."""

    def __init__(self, stub: Any, policy: str, replicas: int) -> None:
        self._infer, self._policy = stub.Infer, policy
        self._queue: asyncio.Queue[tuple[worker_pb2.InferItem, asyncio.Future[None]]] = asyncio.Queue()
        self._free = asyncio.Semaphore(replicas)
        self.batches: list[int] = []

    async def ask(self, item: worker_pb2.InferItem) -> None:
        """Returns when the item's actions are there."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((item, answered))
        await answered

    async def run(self) -> None:
        """Until cancelled."""
        running = set()
        while True:
            await self._free.acquire()
            batch = [await self._queue.get()]
            end = time.monotonic() + WINDOW_S
            while len(batch) < BATCH and (left := end - time.monotonic()) > 0:
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                except TimeoutError:
                    break
            task = asyncio.create_task(self._send(batch))
            running.add(task)
            task.add_done_callback(running.discard)

    async def _send(self, batch: list[tuple[worker_pb2.InferItem, asyncio.Future[None]]]) -> None:
        self.batches.append(len(batch))
        try:
            response = await self._infer(
                worker_pb2.InferRequest(policy=self._policy, items=[item for item, _ in batch]), timeout=120
            )
            for result, (_, answered) in zip(response.results, batch, strict=True):
                if result.HasField("error"):
                    answered.set_exception(RuntimeError(result.error.message))
                else:
                    answered.set_result(None)
        except grpc.RpcError as error:
            for _, answered in batch:
                answered.set_exception(RuntimeError(str(error)))
        finally:
            self._free.release()


async def load(address: str, config: EngineConfig, views: tuple[str, ...], duration_s: float) -> dict[str, float]:
    """Closed-loop clients for `duration_s` after a warm-up of a fifth of it."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        window = Window(worker_pb2_grpc.WorkerStub(channel), config.policy, config.engine.parallel.dp)
        former = asyncio.create_task(window.run())
        begin = time.monotonic() + duration_s / 5
        end = begin + duration_s
        latencies: list[float] = []

        async def client(index: int) -> None:
            item = observation(index, views, 8)
            while (asked := time.monotonic()) < end:
                await window.ask(item)
                now = time.monotonic()
                if begin <= now <= end:
                    latencies.append(1e3 * (now - asked))

        await asyncio.gather(*(client(index) for index in range(CLIENTS)))
        former.cancel()
    if not latencies:
        raise SystemExit(f"no client had an answer within {duration_s:g} s")
    return {
        "per_s": len(latencies) / duration_s,
        "median_ms": float(np.median(latencies)),
        "p99_ms": float(np.quantile(latencies, 0.99)),
        "answers": len(latencies),
        "mean_batch": float(np.mean(window.batches)),
    }


def replicas(setting: Setting) -> Iterator[ScalingRow]:
    """π0.5 with data parallelism: throughput and latency of the paper's serving setting."""
    tiny = setting.device.type == "cpu"
    folder = pi05_folder(setting.folder / "pi05", setting.device)
    alone = 0.0
    for size in setting.sizes:
        if setting.out_of_time(f"replicas on {size}"):
            return
        config = EngineConfig(
            policy="pi05",
            model=ModelConfig(family="pi05", path=str(folder), revision="random"),
            engine=EngineOptions(
                device=setting.device.type,
                precision="fp32" if tiny else "bf16",
                buckets=(1, 2, BATCH),
                solver_steps=1 if tiny else None,
                frame_cache_mb=0,
                parallel=ParallelOptions(dp=size),
            ),
        )
        say(f"π0.5: loading {size} replica{'s' if size > 1 else ''}")
        with served(config, setting.folder) as address:
            views = tuple(f"{name}_0_rgb" for name in ("base", "left_wrist", "right_wrist"))
            found = asyncio.run(load(address, config, views, 4.0 if setting.quick else 15.0))
        alone = alone or found["per_s"]
        yield ScalingRow("replicas", size, found.pop("median_ms"), found["per_s"], found.pop("per_s") / alone, found)


def cosmos3(setting: Setting) -> Iterator[ScalingRow]:
    """The denoising loop of both shapes, split by guidance branch, by matrices and by tokens."""
    tiny = setting.device.type == "cpu"
    for size in reversed(setting.sizes[1:]):
        if setting.out_of_time(f"cosmos3 on {size}"):
            return
        out = setting.folder / f"cosmos3-{size}"
        flags = ["--only", "cosmos3-nano,cosmos3-nano-paper", "--out", str(out)]
        flags += ["--tiny"] if tiny else ["--runs", "5" if setting.quick else "10"]
        _torchrun("mesh_cosmos3.py", size, flags)
        for row in json.loads((out / f"mesh_cosmos3_{size}.json").read_text()):
            form = row["details"]
            name = f"{row['policy'].removeprefix('cosmos3-')} {form['cfg']}x{form['tp']} {form['split']}"
            assert form["ranks_hold_the_same_bits"], f"the ranks of {name} went apart"
            yield ScalingRow(name, size, row["median_ms"], 1e3 / row["median_ms"], row["ratio"], form)


def decoding(setting: Setting) -> Iterator[ScalingRow]:
    """An imagined video in one tile a rank."""
    for size in reversed(setting.sizes[1:]):
        if setting.out_of_time(f"vae on {size}"):
            return
        out = setting.folder / f"vae-{size}"
        _torchrun("mesh_vae.py", size, ["--runs", "1" if setting.quick else "3", "--out", str(out)])
        for row in json.loads((out / f"mesh_vae_{size}.json").read_text()):
            yield ScalingRow(f"vae, {row['preset']}", size, row["median_ms"], 1e3 / row["median_ms"], row["ratio"], row)


def _torchrun(script: str, size: int, flags: list[str]) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    subprocess.run([sys.executable, *launch, str(Path(__file__).with_name(script)), *flags], check=True)


PARTS: dict[str, Callable[[Setting], Iterator[ScalingRow]]] = {
    "planner": planner,
    "replicas": replicas,
    "cosmos3": cosmos3,
    "vae": decoding,
}


def save(rows: list[ScalingRow], out: Path, gpus: int, device_name: str) -> Path:
    """Writes what there is so far, so that a run that is ended early keeps it."""
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "device": device_name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python benchmarks/multi_gpu.py", *sys.argv[1:]]),
        "rows": [asdict(row) for row in rows],
    }
    target = out / f"multi_gpu_x{gpus}.json"
    target.write_text(json.dumps(content, indent=1) + "\n")
    return target


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="how many to use (default: all; without a GPU 2 processes)")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--limit-s", type=float, default=420.0, help="nothing begins later (%(default)s s)")
    parser.add_argument("--out", type=Path, help="folder (benchmarks/results/h200; needed where there is no GPU)")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    visible = torch.cuda.device_count()
    if options.out is None and not visible:
        parser.error("without a GPU name a folder with --out: these times are no results")
    out = options.out or Path("benchmarks/results/h200")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if visible and options.gpus > visible:
        parser.error(f"--gpus {options.gpus}, and {visible} are visible")
    device = torch.device("cuda" if visible else "cpu")
    device_name = torch.cuda.get_device_name() if visible else "cpu"
    rows: list[ScalingRow] = []
    # A GPU's worth of random weights is 7 GB: shared memory spares the disk.
    fast = Path("/dev/shm") if visible and Path("/dev/shm").is_dir() else None  # noqa: S108
    with tempfile.TemporaryDirectory(dir=fast) as name:
        setting = Setting(device, options.gpus or visible or 2, options.quick, Path(name), options.limit_s)
        for part in wanted:
            for row in PARTS[part](setting):
                rows.append(row)
                target = save(rows, out, setting.gpus, device_name)
                say(f"{row.part} on {row.gpus}: {row.median_ms:.1f} ms, {row.per_s:.2f}/s, {row.scale:.2f} x one")
    print(f"\n{'part':<24} {'GPUs':>4} {'median ms':>10} {'per s':>9} {'x one':>6}   on {device_name}")
    for row in rows:
        print(f"{row.part:<24} {row.gpus:>4} {row.median_ms:>10.1f} {row.per_s:>9.2f} {row.scale:>6.2f}")
    if rows:
        say(f"wrote {target}")


if __name__ == "__main__":
    main()
