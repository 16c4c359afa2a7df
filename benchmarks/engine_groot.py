"""GR00T N1.7 on one GPU: the engine's whole request in graphs against its floor and plain peers, by shape.

    python benchmarks/engine_groot.py [--quick | --batches 1,8,32] [--fp8] [--out DIR]
    python benchmarks/engine_groot.py --compiled [--batches 1] [--out DIR]

Random weights of the published size; frames are cut into patches and the prompt tokenised before, as in the published
measurements. Times are CUDA events around one replay of the graphs, 10 warm-ups, 50 runs. Phases are those of the
published figure: prepare (by the wall clock, until a request lies in its graphs' buffers; not part of the request's
time), backbone (vision, and text with the refinement) and the action head. Peers: benchmarks/plain_groot.py in bf16,
eager and, with --compiled, every block through torch.compile: that peer alone is measured then, and set beside the rows
of the file. What a run does not measure stays in the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import triton
from engine import Row, add_peer, capture, event_times, prepare_time, quantile, say
from floors import H200
from plain_groot import PlainGroot, PlainHead, backbone, published_config
from result_rows import save_rows
from taktline_worker.graph_capture import GraphPool
from taktline_worker.models.groot.batch import GrootRow, lay_out
from taktline_worker.models.groot.fp8 import quantise
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.profile import GrootProfile
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.synthetic import PUBLISHED, random_row, random_tensors
from taktline_worker.models.groot.weights import pack_weights
from taktline_worker.models.groot.work import phase_work

SHAPES = {"libero": (2, 156, (1, 2, 4, 8, 16, 32)), "droid": (4, 277, (1, 8))}
"""Frames and tokens of a row, and batch sizes."""
COMPARED = 4
"""Robots whose actions are compared with fp32."""
FP8_BATCHES = (1, 8, 32)
COMPILED = "plain PyTorch, torch.compile"


def error(actions: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((actions.double() - exact.double()).norm() / exact.double().norm())


def rows_of(row: GrootRow, batch: int) -> list[GrootRow]:
    """Robots with frames of their own."""
    return [random_row(PUBLISHED, len(row.grids), len(row.tokens), seed) for seed in range(batch)]


class Bench:
    """The engine's runners, the plain peer, and the rows found so far.

    Args:
        target: where the rows go.
        wanted: batch sizes; empty for each shape's own.
    """

    def __init__(self, target: Path, wanted: set[int]) -> None:
        self._target, self._wanted = target, wanted
        self._rows: list[Row] = []
        self._versions = versions()
        device = torch.device("cuda")
        tensors = random_tensors(PUBLISHED, device)
        self.eager, self._exact = (
            GrootRunner(pack_weights(tensors, PUBLISHED, [0], dtype, device), PUBLISHED)
            for dtype in (torch.bfloat16, torch.float32)
        )
        self._plain = plain_peer(tensors)

    def shape(self, name: str, runner: GrootRunner, precision: str, batches: Sequence[int], peers: set[int]) -> None:
        """Every batch size of one shape; the eager peer beside those in `peers`."""
        images, tokens, _ = SHAPES[name]
        row = random_row(PUBLISHED, images, tokens)
        sizes = [batch for batch in batches if not self._wanted or batch in self._wanted]
        graphs = GrootGraphs(runner, row, sizes)
        graphs.capture()
        say(f"{name} {precision}: {len(graphs.captured)} graphs captured")
        accuracy = self._accuracy(graphs, row)
        say(f"{name}: mean distance of {precision} (plain: bf16) from fp32 {json.dumps(accuracy)}")
        profile = GrootProfile(graphs, row, precision)
        for batch in sizes:
            times = event_times(graphs.loaded(rows_of(row, batch)), 10, 50)
            parts = {
                phase.name: quantile(event_times(capture(phase.run, 1).replay, 3, 10), 0.5)
                for phase in profile.phases(batch)
            }
            parts |= {"prepare": prepare_time(graphs, rows_of(row, batch)), "backbone": parts["vision"] + parts["text"]}
            work = phase_work(PUBLISHED, batch=batch, grids=row.grids, text=tokens - images * 64, weight_bytes=2.0)
            floors = {phase: one.floor_ms(H200.flops, H200.bytes_per_s) for phase, one in work.items()}
            found = Row(
                policy="gr00t-n1.7",
                dtype=precision,
                shape={"images": images, "tokens": tokens, "horizon": 40, "steps": 4},
                batch=batch,
                median_ms=quantile(times, 0.5),
                p99_ms=quantile(times, 0.99),
                n=len(times),
                floor_ms=sum(floors.values()),
                versions=self._versions,
                date=time.strftime("%Y-%m-%d"),
                command=f"python benchmarks/engine_groot.py{' --fp8' if precision == 'fp8' else ''}",
                details={"phases_ms": parts, "phase_floors_ms": floors, "accuracy": accuracy},
            )
            self._rows.append(found)
            shown = ", ".join(f"{phase} {ms:.2f}" for phase, ms in parts.items())
            say(f"{name} {precision} batch {batch}: {found.median_ms:.2f} ms, floor {found.floor_ms:.2f}; {shown}")
            if batch in peers:
                add_peer(found, "plain PyTorch, eager", event_times(self._plain.prepared(rows_of(row, batch)), 2, 10))
            save_rows(self._target, self._rows)

    def _accuracy(self, graphs: GrootGraphs, row: GrootRow) -> dict[str, float]:
        """Mean distances of actions from fp32."""
        found = {"ours": 0.0, "plain": 0.0}
        GraphPool(self._exact.device).compile([partial(self._exact.run, [row])])  # else one kernel after the other
        for one in rows_of(row, COMPARED):
            exact = self._exact.run([one])
            found["ours"] += error(graphs.run([one]), exact) / COMPARED
            found["plain"] += error(self._plain([one]).float().cpu(), exact) / COMPARED
        return found

    def eager_time(self, name: str) -> None:
        """Says what one request takes without a graph."""
        images, tokens, _ = SHAPES[name]
        laid = lay_out([random_row(PUBLISHED, images, tokens)], PUBLISHED).to(self.eager.device)
        times = event_times(lambda: self.eager.compute(laid), 3, 10)
        say(f"{name} batch 1, without a graph: {quantile(times, 0.5):.1f} ms")


def versions() -> dict[str, str]:
    """Of what a time depends on."""
    return {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}


def plain_peer(tensors: dict[str, torch.Tensor]) -> PlainGroot:
    """The plain model in bf16."""
    return PlainGroot(
        backbone(tensors, PUBLISHED, published_config(PUBLISHED), torch.bfloat16),
        PlainHead(tensors, PUBLISHED, 0, torch.bfloat16),
        PUBLISHED.text.image_token,
    )


def save(target: Path, rows: Sequence[object]) -> None:
    """Write the rows."""
    target.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def compiled(target: Path, batches: Sequence[int]) -> None:
    """The compiled peer beside the bf16 rows of LIBERO that the file has, and again in it."""
    plain = plain_peer(random_tensors(PUBLISHED, torch.device("cuda")))
    call = PlainGroot(plain._model, plain._head, PUBLISHED.text.image_token, compiled=True)
    for batch in batches:
        times = event_times(call.prepared(rows_of(random_row(PUBLISHED, *SHAPES["libero"][:2]), batch)), 3, 10)
        say(f"torch.compile, batch {batch}: {quantile(times, 0.5):.2f} ms")
        # Read again: a run of the engine may have written it meanwhile.
        rows = json.loads(target.read_text(encoding="utf-8"))
        kept = [row for row in rows if (row["peer"], row["batch"]) != (COMPILED, batch)]
        of = {"batch": batch, "dtype": "bf16"}
        own = next(row for row in kept if row["shape"]["images"] == 2 and of.items() <= row.items())
        second = Row(**own)
        add_peer(second, COMPILED, times)
        save(target, [*kept, asdict(second)])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--quick", action="store_true", help="batch 1 and 8 only")
    parser.add_argument("--batches", default="", help="these only, such as 1,8,32")
    parser.add_argument("--fp8", action="store_true", help="LIBERO with FP8 in the backbone too")
    parser.add_argument("--compiled", action="store_true", help="nothing but the compiled peer, at batch 1 and 32")
    options = parser.parse_args()
    wanted = {1, 8} if options.quick else {int(each) for each in options.batches.split(",") if each}
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "engine_groot.json"
    if options.compiled:
        compiled(target, sorted(wanted) or (1, 32))
        return
    bench = Bench(target, wanted)
    peers = {1, 8} if wanted else {1, 8, 32}
    for name, (_, _, batches) in SHAPES.items():
        bench.shape(name, bench.eager, "bf16", batches, peers)
        if not wanted:
            bench.eager_time(name)
    if options.fp8:
        bench.shape("libero", GrootRunner(quantise(bench.eager.weights), PUBLISHED), "fp8", FP8_BATCHES, set())
    say(f"wrote {target}")


if __name__ == "__main__":
    main()
