"""GR00T N1.7 on one GPU: the engine's whole request in a graph against its floor and plain peers, by shape.

    python benchmarks/engine_groot.py [--quick | --batches 1,8,32] [--out DIR]

Random weights of the published size; frames are cut into patches and the prompt tokenised before, as in the published
measurements. Times are CUDA events around one replay, 10 warm-ups, 50 runs. Peers: benchmarks/plain_groot.py in bf16,
eager and with every block through torch.compile.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch
import triton
from engine import Row, add_peer, capture, event_times, quantile, say
from floors import H200
from plain_groot import PlainGroot, PlainHead, backbone, published_config
from taktline_worker.models.groot.batch import GrootRow, lay_out
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.profile import GrootProfile
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.synthetic import PUBLISHED, random_row, random_tensors
from taktline_worker.models.groot.weights import pack_weights
from taktline_worker.models.groot.work import phase_work

SHAPES = {"libero": (2, 156, (1, 2, 4, 8, 16, 32)), "droid": (4, 277, (1, 8))}
"""Frames and tokens of a row, and batch sizes."""


def error(actions: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((actions.double() - exact.double()).norm() / exact.double().norm())


def rows_of(row: GrootRow, batch: int) -> list[GrootRow]:
    """Robots with frames of their own."""
    return [random_row(PUBLISHED, len(row.grids), len(row.tokens), seed) for seed in range(batch)]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8 only, no compiled peer")
    parser.add_argument("--batches", default="", help="these only, such as 1,8,32; peers at 1 and 8, none compiled")
    options = parser.parse_args()
    wanted = {1, 8} if options.quick else {int(each) for each in options.batches.split(",") if each}
    device = torch.device("cuda")
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    tensors = random_tensors(PUBLISHED, device)
    eager = GrootRunner(pack_weights(tensors, PUBLISHED, [0], torch.bfloat16, device), PUBLISHED)
    exact = GrootRunner(pack_weights(tensors, PUBLISHED, [0], torch.float32, device), PUBLISHED)
    plain = PlainGroot(
        backbone(tensors, PUBLISHED, published_config(PUBLISHED), torch.bfloat16),
        PlainHead(tensors, PUBLISHED, 0, torch.bfloat16),
        PUBLISHED.text.image_token,
    )
    del tensors
    rows: list[Row] = []
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "engine_groot.json"

    def save() -> None:
        target.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")

    for shape, (images, tokens, batches) in SHAPES.items():
        row = random_row(PUBLISHED, images, tokens)
        sizes = [batch for batch in batches if not wanted or batch in wanted]
        graphs = GrootGraphs(eager, row, sizes)
        graphs.capture()
        say(f"{shape}: {len(graphs.captured)} graphs captured")
        found = [one.run(rows_of(row, 1)) for one in (graphs, exact)]
        official = plain(rows_of(row, 1)).float().cpu()
        accuracy = {"ours": error(found[0], found[1]), "plain": error(official, found[1])}
        say(f"{shape}: distance of bf16 from fp32 {json.dumps(accuracy)}")
        profile = GrootProfile(graphs, row, "bf16")
        for batch in sizes:
            times = event_times(graphs.loaded(rows_of(row, batch)), 10, 50)
            parts = {
                phase.name: quantile(event_times(capture(phase.run, 1).replay, 3, 10), 0.5)
                for phase in profile.phases(batch)
            }
            work = phase_work(PUBLISHED, batch=batch, grids=row.grids, text=tokens - images * 64, weight_bytes=2.0)
            floors = {name: one.floor_ms(H200.flops, H200.bytes_per_s) for name, one in work.items()}
            rows.append(
                Row(
                    policy="gr00t-n1.7",
                    shape={"images": images, "tokens": tokens, "horizon": 40, "steps": 4},
                    batch=batch,
                    median_ms=quantile(times, 0.5),
                    p99_ms=quantile(times, 0.99),
                    n=len(times),
                    floor_ms=sum(floors.values()),
                    versions=versions,
                    date=time.strftime("%Y-%m-%d"),
                    command="python benchmarks/engine_groot.py",
                    details={"phases_ms": parts, "phase_floors_ms": floors, "accuracy": accuracy},
                )
            )
            shown = ", ".join(f"{name} {ms:.2f}" for name, ms in parts.items())
            say(f"{shape} batch {batch}: {rows[-1].median_ms:.2f} ms, floor {rows[-1].floor_ms:.2f}; {shown}")
            if batch in ((1, 8) if options.batches else (1, 8, 32)):
                add_peer(rows[-1], "plain PyTorch, eager", event_times(plain.prepared(rows_of(row, batch)), 2, 10))
            save()
        if not options.batches:
            laid = lay_out(rows_of(row, 1), PUBLISHED).to(device)
            times = event_times(lambda laid=laid: eager.compute(laid), 3, 10)  # type: ignore[misc]
            say(f"{shape} batch 1, eager: {quantile(times, 0.5):.1f} ms")
        del graphs
    if not wanted:
        compiled = PlainGroot(plain._model, plain._head, PUBLISHED.text.image_token, compiled=True)
        for batch in (1, 32):
            own = next(row for row in rows if row.batch == batch and row.shape["images"] == 2)
            call = compiled.prepared(rows_of(random_row(PUBLISHED, 2, 156), batch))
            second = Row(**asdict(own))
            add_peer(second, "plain PyTorch, torch.compile", event_times(call, 3, 10))
            rows.append(second)
            save()
    say(f"wrote {target}")


if __name__ == "__main__":
    main()
