"""T_sync of π0.5's cheaper levels: fewer solver steps and shorter chunks beside full quality, in turns on one GPU.

    python benchmarks/engine_levels.py [--out DIR]

Random weights of the published size, bf16, three cameras, 64 prompt tokens; each level has the graphs that a worker
with `cheaper_steps` and `shorter_horizons` captures. The peer of every row is full quality, replayed in the same turn.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
from dataclasses import replace
from pathlib import Path

import torch
import triton
from result_rows import Row, save_rows
from taktline_worker.models.pi.profile import PiProfile
from taktline_worker.models.pi.runners import make_runner
from taktline_worker.models.pi.synthetic import PI05, conventions, stream_random_tensors
from taktline_worker.models.pi.weights import BF16_VISION, fewer_steps, pack_weights
from taktline_worker.profiling.timing import measure_roofs

HORIZON, STEPS, PROMPT, VIEWS = 50, 10, 64, 3
LEVELS = ((HORIZON, STEPS), (25, STEPS), (10, STEPS), (HORIZON, 5))
BATCHES = (1, 8, 32)
TURNS, WARM = 23, 3


def main() -> None:
    """Measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    plan = replace(conventions(VIEWS, HORIZON, STEPS), prompt_tokens=PROMPT)
    weights = pack_weights(stream_random_tensors(PI05, device), PI05, plan, BF16_VISION, device)
    roofs = measure_roofs(device, torch.bfloat16)
    profiles, memory = {}, {}
    for horizon, steps in LEVELS:
        before = torch.cuda.memory_allocated()
        own = weights if steps == STEPS else fewer_steps(weights, steps)
        runner = make_runner(own, PI05, replace(plan, horizon=horizon), BATCHES, "bf16")
        memory[horizon, steps] = torch.cuda.memory_allocated() - before
        profiles[horizon, steps] = PiProfile(runner, PI05, horizon, steps, VIEWS, PROMPT, "bf16")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    rows = []
    for batch in BATCHES:
        calls = {level: profile.whole(batch) for level, profile in profiles.items()}
        times: dict[tuple[int, int], list[float]] = {level: [] for level in LEVELS}
        for turn in range(TURNS):
            for level, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                if turn >= WARM:
                    times[level].append(start.elapsed_time(end))
        full = statistics.median(times[LEVELS[0]])
        for level, each in times.items():
            work = profiles[level].work(batch).values()
            floor_s = sum(max(part.flops / roofs.flops_per_s, part.bytes / roofs.bytes_per_s) for part in work)
            median = statistics.median(each)
            rows.append(
                Row(
                    "pi05",
                    profiles[level].shape,
                    batch,
                    median,
                    sorted(each)[int(0.99 * (len(each) - 1))],
                    len(each),
                    1e3 * floor_s,
                    versions,
                    datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                    peer="full quality, in turns",
                    peer_median_ms=full,
                    ratio=full / median,
                    bench="engine-levels",
                    command="python benchmarks/engine_levels.py",
                    details={"level_bytes": memory[level]},
                )
            )
            name = f"horizon {level[0]}, {level[1]} steps"
            print(f"B={batch:<3} {name:<24}{median:8.3f} ms, {median / full:.3f} of full quality", flush=True)
    if options.out is not None:
        save_rows(options.out / "engine_pi05_levels.json", rows)


if __name__ == "__main__":
    main()
