"""MiniCPM-RobotManip on one GPU: the engine's whole request in a graph against its floor and a plain peer, by views.

    python benchmarks/engine_minicpm.py [--quick | --batches 8,32] [--fp8] [--compiled] [--out DIR]

Random weights of the published size; frames are cut into patches and the prompt tokenised before. Times are CUDA events
around one replay, 10 warm-ups, 50 runs, 20 from 16 robots on. Phases are those of the published figure: prepare (by the
wall clock, until a request lies in its graph's buffers; not part of the request's time), backbone (vision and text) and
the action head. The peer is benchmarks/plain_minicpm.py with its backbone in bf16 at batch 1, eager, and with
--compiled, for two views and last, every block through torch.compile. Where flash-linear-attention is installed,
`transformers` runs the peer's delta rule through it, and the peer's name says so. What a run does not measure stays in
the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton
from engine import Row, add_peer, capture, event_times, prepare_time, quantile, say
from floors import H200
from plain_minicpm import PlainHead, PlainMiniCpm, backbone, head_tensors, published_config
from result_rows import save_rows
from taktline_worker.graph_capture import GraphPool
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow
from taktline_worker.models.minicpm_robot.fp8 import quantise
from taktline_worker.models.minicpm_robot.graphs import MiniCpmGraphs
from taktline_worker.models.minicpm_robot.profile import MiniCpmProfile
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from taktline_worker.models.minicpm_robot.synthetic import IMAGE_TOKEN, PUBLISHED, random_row, random_tensors
from taktline_worker.models.minicpm_robot.weights import pack_weights
from taktline_worker.models.minicpm_robot.work import phase_work
from torch import Tensor

VIEWS, TEXT = (1, 2, 3), 28
COMPARED = 4
"""Robots whose actions are compared with fp32: one distance alone scatters by a third."""
FLA = ", flash-linear-attention" if importlib.util.find_spec("fla") else ""
EAGER, COMPILED = f"plain PyTorch, eager{FLA}", f"plain PyTorch, torch.compile{FLA}"
LARGER, LARGER_VIEWS = (2, 4, 8, 16, 32), 2


def rows_of(views: int, batch: int) -> list[MiniCpmRow]:
    """Robots with frames of their own."""
    return [random_row(PUBLISHED, views, TEXT, seed) for seed in range(batch)]


def on_device(row: MiniCpmRow, device: torch.device) -> MiniCpmRow:
    """The row with its tensors there."""
    return replace(row, patches=row.patches.to(device), state=row.state.to(device), noise=row.noise.to(device))


def plain_peer(tensors: dict[str, Tensor], *, compiled: bool = False) -> PlainMiniCpm:
    """The peer with its backbone in bf16."""
    model = backbone(tensors, PUBLISHED, published_config(PUBLISHED, IMAGE_TOKEN), torch.bfloat16)
    head = PlainHead(head_tensors(tensors), PUBLISHED.head.heads, PUBLISHED.head.horizon)
    return PlainMiniCpm(model, head, compiled=compiled)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--quick", action="store_true", help="batch 1 only")
    parser.add_argument("--batches", default="", help="these larger ones only, such as 8,32")
    parser.add_argument("--fp8", action="store_true", help="two views at batch 1 with FP8 in the backbone too")
    parser.add_argument("--compiled", action="store_true", help="the compiled peer of two views, too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "engine_minicpm.json"
    device = torch.device("cuda")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    tensors = random_tensors(PUBLISHED, device)
    eager, exact = (
        MiniCpmRunner(pack_weights(tensors, PUBLISHED, [0], dtype, device), PUBLISHED, IMAGE_TOKEN)
        for dtype in (torch.bfloat16, torch.float32)
    )
    plain = plain_peer(tensors)
    rows: list[Row] = []
    # Of what is compared with fp32, before anything waits for its kernels one by one.
    GraphPool(device).compile(partial(exact.run, rows_of(views, 1)) for views in VIEWS)

    def measure(runner: MiniCpmRunner, precision: str, views: int, sizes: tuple[int, ...]) -> None:
        row = random_row(PUBLISHED, views, TEXT)
        graphs = MiniCpmGraphs(runner, row, sizes)
        graphs.capture()
        here = on_device(row, device)
        accuracy: dict[str, float] = {}
        profile = MiniCpmProfile(graphs, row, precision)
        for batch in sizes:
            robots = rows_of(views, batch)
            times = event_times(graphs.loaded(robots), 10, 50 if batch < 16 else 20)
            parts = {
                phase.name: quantile(event_times(capture(phase.run, 1).replay, 3, 10), 0.5)
                for phase in profile.phases(batch)
            }
            prepare = prepare_time(graphs, robots)
            parts |= {"prepare": prepare, "backbone": parts["vision"] + parts["text"]}
            text = len(row.tokens) - views * PUBLISHED.vision.image_tokens
            work = phase_work(PUBLISHED, batch=batch, images=views, text=text, weight_bytes=2.0)
            floors = {name: one.floor_ms(H200.flops, H200.bytes_per_s) for name, one in work.items()}
            rows.append(
                Row(
                    policy="minicpm-robot",
                    dtype=precision,
                    shape=profile.shape,
                    batch=batch,
                    median_ms=quantile(times, 0.5),
                    p99_ms=quantile(times, 0.99),
                    n=len(times),
                    floor_ms=sum(floors.values()),
                    versions=versions,
                    date=time.strftime("%Y-%m-%d"),
                    command=f"python benchmarks/engine_minicpm.py{' --fp8' if precision == 'fp8' else ''}",
                    details={"phases_ms": parts, "phase_floors_ms": floors, "accuracy": accuracy},
                )
            )
            shown = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
            say(f"{views} views, batch {batch}: {rows[-1].median_ms:.2f} ms, floor {rows[-1].floor_ms:.2f}; {shown}")
            if batch == 1 and precision == "bf16":
                add_peer(rows[-1], EAGER, event_times(lambda: plain(here), 2, 10))
            save_rows(target, rows)
        for one in rows_of(views, COMPARED if sizes[0] == 1 else 0):  # the rows above hold the same mapping
            reference = exact.run([one])[0]
            for name, found in (("ours", graphs.run([one])[0]), ("plain", plain(on_device(one, device)).cpu())):
                distance = float((found - reference).norm() / reference.norm())
                accuracy[name] = accuracy.get(name, 0.0) + distance / COMPARED
        if accuracy:
            say(
                f"{views} views: mean distance of {precision} (plain: bf16) from fp32 over {COMPARED} robots {accuracy}"
            )
            save_rows(target, rows)

    for views in VIEWS:
        measure(eager, "bf16", views, (1,))
    if options.fp8:
        bytes_of = MiniCpmRunner(quantise(eager.weights), PUBLISHED, IMAGE_TOKEN)
        measure(bytes_of, "fp8", 2, (1,))
    larger = tuple(int(each) for each in options.batches.split(",") if each) or LARGER
    if not options.quick:
        # One by one: each stands in the file as soon as it has run.
        for size in larger:
            measure(eager, "bf16", LARGER_VIEWS, (size,))
    if options.compiled:
        compiled = plain_peer(tensors, compiled=True)
        here = on_device(random_row(PUBLISHED, LARGER_VIEWS, TEXT), device)
        times = event_times(lambda: compiled(here), 3, 10)
        say(f"{LARGER_VIEWS} views, batch 1: {COMPILED} {quantile(times, 0.5):.1f} ms")
        (own,) = [row for row in rows if (row.shape["views"], row.batch, row.dtype) == (LARGER_VIEWS, 1, "bf16")]
        rows.append(replace(own))
        add_peer(rows[-1], COMPILED, times)
        save_rows(target, rows)
    say(f"wrote {target}")


if __name__ == "__main__":
    main()
