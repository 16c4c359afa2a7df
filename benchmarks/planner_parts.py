"""What each kernel of a planner's layer-step in bf16 takes while it holds the GPU at its power limit: us, mJ, clock.

A layer-step is one block on one frame of a unit of candidates; a plan of 10 rounds of 800 in units of 100 has
10 x 8 x 2 x 24 = 3,840 of them. Each kernel runs by itself on rows drawn at random, from a CUDA graph, for a second:
a burst of a millisecond would run at a clock that the power limit does not let a plan keep.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from engine import capture, say
from planner_search import SETTINGS
from power import Counters
from taktline_kernels import gpu
from taktline_kernels.ops import frame_products as products
from taktline_kernels.ops import frames as ops
from taktline_kernels.ops.frame_products import Weights
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from torch import Tensor

LOAD_S = 0.7
SETTLED_S = 0.2
"""After this long the clock is what the power limit leaves."""
CALLS = 50
"""Of one graph."""


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel under load.

    Attributes:
        share: how often it runs in a layer-step.
        us: of one call.
        mj: of one call; None where the driver counts no energy, as `watts` and `mhz`.
        tflops: of its multiply-adds, 2 FLOP each; 0 for what is no product.
    """

    share: float
    us: float
    mj: float | None
    watts: float | None
    mhz: float | None
    tflops: float


def parts(world: VJepa2World) -> dict[str, dict[str, float | None]]:
    """Every kernel of a layer-step as `FusedPredictor` calls it, and their sum for a layer-step and a plan."""
    a, m, device = world.architecture, world.micro_batch, world.device
    rows, width, mlp = m * a.frame_tokens, a.width, a.mlp

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    x, other, hidden, wide = rand(rows, width), rand(rows, width), rand(rows, mlp), rand(rows, 3 * width)
    frames = rand(2, rows, 3 * width)
    kept = ops.split(torch.randn(rows, width, device=device))
    out, fc1, fc2 = (rand(n, k) / k**0.5 for n, k in ((width, width), (mlp, width), (width, mlp)))
    bias, vector = rand(mlp), torch.randn(width, device=device)
    turned = Weights.of(rand(3 * width, width) / width**0.5, torch.randn(3 * width, device=device)).in_pairs()
    angles = torch.randn(2, a.tokens, a.head_dim, device=device)
    eps, dtype = 1e-6, torch.bfloat16
    calls: dict[str, tuple[float, float, Callable[[], object]]] = {
        "fc2": (1, rows * mlp * width, lambda: torch.mm(hidden, fc2.t())),
        "fc1 with GELU": (1, rows * mlp * width, lambda: gpu.linear_gelu(x, fc1, bias)),
        "q, k, v, turned": (
            1,
            rows * 3 * width * width,
            lambda: products.frame_turned_product(x, turned, angles, m, wide),
        ),
        "output projection": (1, rows * width * width, lambda: torch.mm(x, out.t())),
        "attention, one frame": (0.5, 0, lambda: ops.frame_attention(frames[:1], m, a.heads)),
        "attention, two frames": (0.5, 0, lambda: ops.frame_attention(frames, m, a.heads)),
        "norm before the attention": (
            1,
            0,
            lambda: ops.frame_norm(kept, (x, other), vector, vector, vector, eps, dtype, keep=kept),
        ),
        "norm before the MLP": (1, 0, lambda: ops.frame_norm(kept, (x,), vector, vector, vector, eps, dtype)),
    }
    counters = Counters()
    found = {name: _under_load(call, share, 2 * macs, counters) for name, (share, macs, call) in calls.items()}
    for name, part in found.items():
        load = f"{part.mj or 0:6.1f} mJ {part.watts or 0:4.0f} W {part.mhz or 0:5.0f} MHz {part.tflops:4.0f} TFLOP/s"
        say(f"{name:<26} {part.us:6.1f} us {load}")
    layer_us = sum(part.share * part.us for part in found.values())
    rows_of_table = {name: asdict(part) for name, part in found.items()}
    if all(part.mj is not None for part in found.values()):
        layer_mj = sum(part.share * (part.mj or 0.0) for part in found.values())
        units = SETTINGS.rounds * -(-SETTINGS.candidates // m)
        steps = units * SETTINGS.horizon * a.depth
        rows_of_table["sum of a layer-step"] = {"us": layer_us, "mj": layer_mj}
        rows_of_table["sum of a plan"] = {"layer_steps": steps, "joules": steps * layer_mj / 1000.0}
        joules = rows_of_table["sum of a plan"]["joules"]
        say(f"a layer-step {layer_us:.0f} us, {layer_mj:.0f} mJ; a plan of {steps} of them {joules:.0f} J")
    return rows_of_table


def _under_load(call: Callable[[], object], share: float, flops: float, counters: Counters) -> Part:
    def calls() -> None:
        for _ in range(CALLS):
            call()

    graph = capture(calls, 1)
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    replays = max(2, round(LOAD_S / (time.perf_counter() - began)))
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began = time.perf_counter()
    first.record()
    for _ in range(replays):
        graph.replay()
    last.record()
    steps: list[tuple[float, float]] = []
    clocks: list[float] = []
    while not last.query():
        joules, megahertz = counters.joules(), counters.megahertz()
        now = time.perf_counter()
        if now - began > SETTLED_S and megahertz is not None:
            clocks.append(megahertz)
        if now - began > SETTLED_S and joules is not None and (not steps or joules != steps[-1][1]):
            steps.append((now, joules))
        time.sleep(0.001)
    last.synchronize()
    us = 1000.0 * first.elapsed_time(last) / (replays * CALLS)
    watts = None
    if len(steps) > 2:  # the first value is older than its reading, by less than one step of the counter
        (start, before), (end, after) = steps[1], steps[-1]
        watts = (after - before) / (end - start)
    return Part(
        share=share,
        us=us,
        mj=None if watts is None else watts * us / 1000.0,
        watts=watts,
        mhz=statistics.median(clocks) if clocks else None,
        tflops=flops / us / 1e6,
    )
