"""An imagined video decoded in tiles on all ranks, beside the whole of it on one: the same weights, latents and run.

    torchrun --nproc-per-node N benchmarks/mesh_vae.py [--presets official,paper] [--runs 5] [--out DIR]

Random weights of the published size in bf16. Times are the clock of rank 0 between two synchronisations, the gathering
of the tiles included; a warm-up of each goes before. Without a GPU the same runs over gloo at a fraction of the widths:
that shows that it works, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from taktline_worker.models.cosmos3 import vae
from taktline_worker.models.cosmos3.request import PRESETS
from taktline_worker.models.cosmos3.vae_tiles import decode_tiled, gather_to_first
from torch import Tensor
from torch import distributed as dist
from vae_tiles import random_vae


def seconds(call: Callable[[], Tensor | None], runs: int, device: torch.device) -> tuple[list[float], Tensor | None]:
    """Sorted times of `runs` calls after one, and what the last one gave."""
    times, found = [], None
    for index in range(runs + 1):
        found = None
        dist.barrier()
        begin = time.perf_counter()
        found = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if index:
            times.append(time.perf_counter() - begin)
    return sorted(times), found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="official,paper")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, widths, dtype = torch.device("cpu"), "small", torch.float32
    if torch.cuda.is_available():
        device, widths, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "published", torch.bfloat16
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    weights = random_vae(widths, device, dtype=dtype)
    gather = gather_to_first()
    rows: list[dict[str, Any]] = []
    for name in options.presets.split(","):
        frames, height, width = PRESETS[name].latent_grid
        if device.type == "cpu":
            frames = min(frames, 2)
        draw = torch.Generator().manual_seed(1)
        latents = torch.randn(1, 48, frames, height, width, generator=draw).to(device, dtype)
        with torch.inference_mode():
            alone, whole = seconds(lambda latents=latents: vae.decode(weights, latents), options.runs, device)
            tiled, joined = seconds(
                lambda latents=latents: decode_tiled(weights, latents, rank, size, gather), options.runs, device
            )
        if rank:
            continue
        assert whole is not None
        assert joined is not None
        took, one = 1e3 * statistics.median(tiled), 1e3 * statistics.median(alone)
        rows.append(
            {
                "preset": name,
                "gpus": size,
                "latent_frames": frames,
                "median_ms": took,
                "one_gpu_ms": one,
                "ratio": one / took,
                "largest_difference": float((joined.float() - whole.float()).abs().max()),
                "dtype": str(dtype).removeprefix("torch."),
                "n": options.runs,
            }
        )
        print(f"{name}: {took:.0f} ms in {size} tiles, {one:.0f} whole: {one / took:.2f}x", flush=True)
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"mesh_vae_{size}.json").write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
