"""The V-JEPA 2-AC planner on one GPU or several: plans, energies' agreement with fp32, parts, and the plain peer.

    python benchmarks/planner.py [--parts] [--peer] [--fleet] [--out DIR]
    torchrun --standalone --nproc-per-node 2 benchmarks/planner.py [--out DIR]

Random weights of the published size. A plan is timed from latents to the plan's tensors on the device, by the wall
clock between two synchronisations, after a warm-up plan of three rounds. Under torchrun the ranks share one search, and
rank 0 also plans alone: both plans must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from engine import Row, event_times, say
from planner_fleet import fleet_times
from random_vjepa2 import random_checkpoint
from taktline_kernels.ops import frames as ops
from taktline_worker.models.vjepa2_ac import modules
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import BF16, FP32, CheckpointFile, VJepa2Weights, pack_weights
from taktline_worker.planning.mesh import Mesh, OneRank, ProcessGroupMesh
from taktline_worker.planning.search import Plan, Problem, search
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene
from torch import Tensor
from torch import distributed as dist

SETTINGS = SearchSettings(candidates=800, rounds=10, elites=80, horizon=2)
MICRO_BATCH = 100
FLOPS_A_CANDIDATE = 334.2e9
"""Both steps with cached keys and values, matrix products and attention; 2 FLOP a multiply-add."""
ROOF_FLOPS = {"bf16": 790e12, "fp8": 1580e12}


def scene_of(world: VJepa2World, seed: int = 3) -> Scene:
    """A scene of random latents, normed as encoded ones are: the encoder is a thousandth of a plan."""
    generator = torch.Generator().manual_seed(seed)
    a = world.architecture
    latent, goal = torch.randn(2, a.tokens, a.encoder_width, generator=generator).to(world.device)
    pose = torch.tensor([0.4, 0.1, 0.3, 3.1, 0.05, -0.4, 0.2], device=world.device)
    return Scene(modules.latent_norm(latent), modules.latent_norm(goal), pose)


def plan_seconds(
    world: VJepa2World, problems: list[Problem], mesh: Mesh, runs: int, warm_ups: int = 1
) -> tuple[list[float], list[Plan]]:
    """Sorted seconds of `runs` searches after the warm-ups, and the last one's plans."""
    times = []
    for index in range(warm_ups + runs):
        torch.cuda.synchronize()
        began = time.perf_counter()
        plans = search(world, problems, mesh)
        torch.cuda.synchronize()
        if index >= warm_ups:
            times.append(time.perf_counter() - began)
    return sorted(times), plans


class PowerMeter:
    """Mean watts of the GPU while inside, as the driver reports them."""

    def __enter__(self) -> PowerMeter:
        self._watts: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def watts(self) -> float | None:
        """None where the driver gave no figure."""
        return statistics.fmean(self._watts) if self._watts else None

    def _sample(self) -> None:
        if shutil.which("nvidia-smi") is None:
            say("no nvidia-smi here: no watts")
            return
        which = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # the machine may have others
        query = ["nvidia-smi", "-i", which, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.2):
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                self._watts.append(float(answer.stdout.split()[0]))


def energies_of(world: VJepa2World, scene: Scene, sets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Energies (candidates,) of each set (candidates, horizon, 7)."""
    prepared = world.prepare(scene)
    found = {name: torch.empty(len(actions), device=world.device) for name, actions in sets.items()}
    for name, actions in sets.items():
        for start in range(0, len(actions), world.micro_batch):
            part = slice(start, start + world.micro_batch)
            world.score(prepared, actions[part], found[name][part])
    return found


def agreement(found_energies: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    """How energies rank the candidates of each set beside the fp32 statement's."""
    found: dict[str, Any] = {}
    for name, ours in found_energies.items():
        theirs = exact[name]
        ranks = torch.stack([one.argsort().argsort().double() for one in (ours, theirs)])
        elites = max(1, len(ours) * SETTINGS.elites // SETTINGS.candidates)
        best = [set(one.argsort(stable=True)[:elites].tolist()) for one in (ours, theirs)]
        found[name] = {
            "pearson": float(torch.corrcoef(torch.stack((ours, theirs)).double())[0, 1]),
            "spearman": float(torch.corrcoef(ranks)[0, 1]),
            "candidates": len(ours),
            "elites": elites,
            "elites_in_common": len(best[0] & best[1]),
            "mean_signed_error": float((ours - theirs).mean()),
            "spread": float(theirs.std()),
        }
    return found


def recorded_rounds(world: VJepa2World, scene: Scene, rounds: tuple[int, ...]) -> dict[str, Tensor]:
    """The actions that a search scored in some of its rounds."""
    kept: dict[str, Tensor] = {}

    def observe(_: int, number: int, actions: Tensor, energies: Tensor) -> None:
        del energies
        if number in rounds:
            kept[f"round {number + 1}"] = actions.clone()

    search(world, [Problem(scene, replace(SETTINGS, rounds=max(rounds) + 1))], observer=observe)
    return kept


def parts(world: VJepa2World) -> dict[str, float]:
    """Milliseconds of each operation of a block, second frame, and of products in other forms."""
    a, m = world.architecture, world.micro_batch
    rows, width, mlp = m * a.frame_tokens, a.width, a.mlp
    device = world.device

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    x, hidden, wide = rand(rows, width), rand(rows, mlp), rand(rows, 3 * width)
    frames = rand(2, rows, 3 * width)
    stream = torch.randn(rows, width, device=device)
    kept = ops.split(stream)
    weight = {
        name: rand(n, k) / k**0.5
        for name, n, k in (("qkv", 3 * width, width), ("out", width, width), ("fc1", mlp, width), ("fc2", width, mlp))
    }
    bias, vector = torch.randn(mlp, device=device).bfloat16(), torch.randn(width, device=device)
    cos = torch.randn(a.frame_tokens, a.head_dim, device=device)
    angles = torch.randn(2, 2, a.tokens, a.head_dim, device=device)
    paired, wide_bias = ops.pair_rows(weight["qkv"]), torch.randn(3 * width, device=device)
    quantised = {name: ops.quantise_rows(value) for name, value in weight.items()}
    x8, hidden8 = ops.quantise_rows(x), ops.quantise_rows(hidden)
    fp32 = torch.float32

    def scaled(inputs: tuple[Tensor, Tensor], name: str) -> Callable[[], object]:
        values, scales = quantised[name]
        return lambda: torch._scaled_mm(
            inputs[0], values.t(), inputs[1], scales.t().contiguous(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    calls: dict[str, Callable[[], object]] = {
        "qkv": lambda: torch.mm(x, weight["qkv"].t()),
        "out": lambda: torch.mm(x, weight["out"].t()),
        "fc1": lambda: torch.mm(x, weight["fc1"].t()),
        "fc2": lambda: torch.mm(hidden, weight["fc2"].t()),
        "fc1 gelu epilogue": lambda: torch._addmm_activation(bias, x, weight["fc1"].t(), use_gelu=True),
        "out onto fp32": lambda: torch.addmm(stream, x, weight["out"].t(), out_dtype=fp32),
        "fc2 onto fp32": lambda: torch.addmm(stream, hidden, weight["fc2"].t(), out_dtype=fp32),
        "qkv fp8": scaled(x8, "qkv"),
        "fc1 fp8": scaled(x8, "fc1"),
        "fc2 fp8": scaled(hidden8, "fc2"),
        "norm and keep": lambda: ops.frame_norm(kept, (x, x), vector, vector, vector, 1e-6, torch.bfloat16, keep=kept),
        "norm and add": lambda: ops.frame_norm(kept, (x,), vector, vector, vector, 1e-6, torch.bfloat16),
        "norm and add fp8": lambda: ops.frame_norm(kept, (x,), vector, vector, vector, 1e-6, ops.FP8),
        "norm": lambda: ops.frame_norm(stream, (), vector, vector, vector, 1e-6, torch.bfloat16),
        "rotate": lambda: ops.frame_rotate(wide, cos, cos, m),
        "gelu fp8": lambda: ops.frame_gelu(hidden, bias, ops.FP8),
        "qkv turned": lambda: ops.frame_turned_product(x, paired, wide_bias, angles[1], m, wide),
        "attention, 1 frame": lambda: ops.frame_attention(frames[:1], m, a.heads),
        "attention, 2 frames": lambda: ops.frame_attention(frames, m, a.heads),
    }
    from taktline_kernels.triton_impl import frame_attention
    from taktline_kernels.triton_impl import frames as kernels

    for block_m, block_n, warps, stages in (
        (128, 64, 4, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 4, 2),
        (256, 64, 8, 2), (256, 64, 8, 3), (64, 64, 4, 3),
    ):  # fmt: skip
        config = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        calls[f"attention {block_m}x{block_n}, {warps} warps, {stages} stages"] = (
            lambda config=config: frame_attention.attention(frames, m, a.heads, None, config)  # type: ignore[misc]
        )
    for together, warps in ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4)):
        config = {"rows": together, "num_warps": warps}
        calls[f"norm and add, {together} rows, {warps} warps"] = (
            lambda config=config: kernels.norm(kept, (x, x), vector, vector, vector, 1e-6, torch.bfloat16, kept, config)  # type: ignore[misc]
        )
    for warps in (2, 4, 8):
        config = {"num_warps": warps}
        calls[f"rotate, {warps} warps"] = (
            lambda config=config: kernels.rotate(wide, cos, cos, m, config)  # type: ignore[misc]
        )
        calls[f"gelu fp8, {warps} warps"] = lambda config=config: kernels.gelu(hidden, bias, ops.FP8, config)  # type: ignore[misc]
    found = {}
    for name, call in calls.items():
        try:
            times = event_times(call, 3, 15)
        except Exception as error:  # a form that this version of PyTorch lacks is a line of the table, not the end
            say(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        found[name] = times[len(times) // 2]
        say(f"{name:<40} {1000 * found[name]:9.1f} us")
    return found


def peer_rounds(checkpoint: CheckpointFile, scene: Scene, actions: Tensor, compiled: bool) -> dict[str, float]:
    """Seconds of one round of all candidates by the plain statement, in each precision."""
    from plain_vjepa2 import PlainPredictor, score

    model = PlainPredictor(checkpoint.architecture, checkpoint.predictor, SETTINGS.horizon)

    def timed(call: Callable[[], object]) -> float:
        score(model, scene.latent, scene.goal, scene.pose, actions[:16])  # kernels load
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def run() -> object:
        return score(model, scene.latent, scene.goal, scene.pose, actions)

    found = {}
    found["fp32"] = timed(run)
    say(f"peer fp32: {found['fp32']:.2f} s a round")
    torch.backends.cuda.matmul.allow_tf32 = True
    found["tf32"] = timed(run)
    torch.backends.cuda.matmul.allow_tf32 = False
    say(f"peer tf32: {found['tf32']:.2f} s a round")
    with torch.autocast("cuda", torch.bfloat16):
        found["bf16"] = timed(run)
        say(f"peer bf16 autocast: {found['bf16']:.2f} s a round")
        if compiled:
            for block in model.blocks:
                block.compile(dynamic=False)
            run()
            found["bf16 compiled"] = timed(run)
            say(f"peer bf16 compiled: {found['bf16 compiled']:.2f} s a round")
    return found


def row(dtype: str, seconds: list[float], settings: SearchSettings, gpus: int, **details: Any) -> Row:
    """One line of the results."""
    floor = settings.candidates * settings.rounds * FLOPS_A_CANDIDATE / ROOF_FLOPS[dtype] / gpus
    return Row(
        bench="planner",
        policy="vjepa2-ac",
        shape={name: getattr(settings, name) for name in ("candidates", "rounds", "elites", "horizon")},
        batch=int(details.pop("robots", 1)),
        dtype=dtype,
        gpus=gpus,
        median_ms=1000 * statistics.median(seconds),
        p99_ms=1000 * seconds[-1],
        n=len(seconds),
        floor_ms=1000 * floor,
        versions={"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)},
        date=time.strftime("%Y-%m-%d"),
        command="benchmarks/planner.py",
        details={"micro_batch": MICRO_BATCH, "max_step_m": settings.max_step_m} | details,
    )


def make_world(weights: VJepa2Weights, checkpoint: CheckpointFile, quantised: bool = False) -> VJepa2World:
    """A captured world of the benchmark's unit."""
    world = VJepa2World(weights, checkpoint.architecture, MICRO_BATCH, SETTINGS.horizon, quantised=quantised)
    world.capture()
    return world


def fleet_rows(world: VJepa2World, dtype: str, rounds: int, runs: int) -> list[Row]:
    """Plans of a few rounds for several robots at once."""
    settings = replace(SETTINGS, rounds=rounds)
    rows = []
    for one in fleet_times(world, lambda index: Problem(scene_of(world, 10 + index), settings, seed=index), runs):
        assert one.equal, f"a plan of {one.robots} robots side by side differs from the one its robot gets alone"
        found = {"robots": one.robots, "plans_per_s": one.plans_per_s, "bit_equal": one.equal}
        rows.append(row(dtype, list(one.seconds), settings, 1, **found))
        say(f"{dtype}: {one.robots} robots, {one.plans_per_s:.2f} plans a second")
    return rows


def on_one(options: argparse.Namespace, device: torch.device, save: Callable[[list[Row]], None]) -> list[Row]:
    """Everything that one GPU answers; `save` gets what there is so far."""
    checkpoint = random_checkpoint(device)
    rounded, full = pack_weights(checkpoint, BF16, device), pack_weights(checkpoint, FP32, device)
    world = make_world(rounded, checkpoint)
    scene = scene_of(world)
    say("worlds are captured")
    rows: list[Row] = []
    extra = parts(world) if options.parts else {}
    recorded = recorded_rounds(world, scene, (0, 4))
    sets = {name: actions[: options.exact] for name, actions in recorded.items()}
    exact = energies_of(
        VJepa2World(full, checkpoint.architecture, MICRO_BATCH, SETTINGS.horizon, fused=False), scene, sets
    )
    del full
    gc.collect()
    torch.cuda.empty_cache()
    say("energies in fp32")
    problem = Problem(scene, SETTINGS)
    mesh = OneRank()
    reference: float | None = None
    for dtype in ("bf16", "fp8"):
        if dtype == "fp8":
            del world
            gc.collect()
            world = make_world(rounded, checkpoint, quantised=True)
        torch.cuda.reset_peak_memory_stats()
        short = replace(SETTINGS, rounds=3)
        short_seconds, _ = plan_seconds(world, [Problem(scene, short)], mesh, options.runs)
        with PowerMeter() as meter:
            seconds, _ = plan_seconds(world, [problem], mesh, options.runs, warm_ups=0)
        median = statistics.median(seconds)
        reference = reference or median
        details: dict[str, Any] = {
            "agreement": agreement(energies_of(world, scene, sets), exact),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "watts": meter.watts,
            "joules": None if meter.watts is None else meter.watts * median,
            "times_bf16": median / reference,
            "parts_ms": extra if dtype == "bf16" else {},
        }
        rows.append(row(dtype, seconds, SETTINGS, 1, **details))
        say(f"{dtype}: {median:.3f} s a plan, floor {rows[-1].floor_ms / 1000:.3f}; {json.dumps(details['agreement'])}")
        rows.append(row(dtype, short_seconds, short, 1))
        say(f"{dtype}: {rows[-1].median_ms / 1000:.3f} s a plan of three rounds; {details['watts']} W")
        save(rows)
    del world
    gc.collect()
    torch.cuda.empty_cache()
    if options.peer:
        peers = peer_rounds(checkpoint, scene, recorded["round 1"], options.compiled)
        for index, one in enumerate(rows):
            if one.shape["rounds"] == SETTINGS.rounds and one.batch == 1:
                best = min(peers.values()) * SETTINGS.rounds * 1000
                rows[index] = replace(
                    one,
                    peer="plain PyTorch, whole prefix, "
                    + min(peers, key=lambda name: peers[name])
                    + " (one round x 10)",
                    peer_median_ms=best,
                    ratio=best / one.median_ms,
                    details=one.details | {"peer_round_s": peers},
                )
                say(f"{one.dtype}: {rows[index].ratio:.2f} times as fast as the fastest peer")
        save(rows)
    if options.fleet:
        for dtype in ("fp8", "bf16"):
            world = make_world(rounded, checkpoint, quantised=dtype == "fp8")
            rows += fleet_rows(world, dtype, options.fleet_rounds, max(1, options.runs // 3))
            save(rows)
            del world
            gc.collect()
    return rows


def on_several(rank: int, size: int, runs: int, save: Callable[[list[Row]], None]) -> list[Row]:
    """The same plan on all ranks of a torchrun and on rank 0 alone."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mesh = ProcessGroupMesh(control=dist.new_group(backend="gloo"))
    checkpoint = random_checkpoint(device)
    weights = pack_weights(checkpoint, BF16, device)
    rows: list[Row] = []
    for dtype in ("bf16", "fp8"):
        world = make_world(weights, checkpoint, quantised=dtype == "fp8")
        scene = scene_of(world)
        for rounds, warm_ups in ((3, 1), (SETTINGS.rounds, 0)):
            settings = replace(SETTINGS, rounds=rounds)
            problem = Problem(scene, settings)
            dist.barrier()
            seconds, shared = plan_seconds(world, [problem], mesh, runs, warm_ups)
            if rank == 0:
                alone, single = plan_seconds(world, [problem], OneRank(), 1, warm_ups=0)
                equal = torch.equal(shared[0].actions, single[0].actions)
                equal = equal and torch.equal(shared[0].energies, single[0].energies)
                assert equal, "plans differ between one rank and several"
                speedup = alone[0] / statistics.median(seconds)
                rows.append(row(dtype, seconds, settings, size, one_gpu_s=alone[0], speedup=speedup, bit_equal=equal))
                save(rows)
                say(f"{dtype}, {rounds} rounds on {size}: {rows[-1].median_ms:.0f} ms, {speedup:.3f} times one GPU")
            dist.barrier()
        del world
        gc.collect()
    dist.destroy_process_group()
    return rows


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="time each operation alone")
    parser.add_argument("--peer", action="store_true", help="time a round of the plain statement too")
    parser.add_argument("--compiled", action="store_true", help="the peer's blocks through torch.compile as well")
    parser.add_argument("--fleet", action="store_true", help="plans a second for 1, 2, 4 and 8 robots at once")
    parser.add_argument("--fleet-rounds", type=int, default=3, metavar="N", help="rounds of a plan of the fleet")
    parser.add_argument(
        "--exact", type=int, default=SETTINGS.candidates, metavar="N", help="candidates of a round scored in fp32 too"
    )
    parser.add_argument("--runs", type=int, default=5, help="timed plans of each kind")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    options = parser.parse_args()
    if options.exact <= 0 or options.exact % MICRO_BATCH:
        parser.error(f"--exact must be a multiple of {MICRO_BATCH}")
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    target = options.out / ("planner.json" if size == 1 else f"planner_x{size}.json")
    options.out.mkdir(parents=True, exist_ok=True)

    def save(rows: list[Row]) -> None:
        target.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")

    rows = on_several(rank, size, options.runs, save) if size > 1 else on_one(options, torch.device("cuda"), save)
    if rank == 0:
        save(rows)
        say(f"wrote {target}")


if __name__ == "__main__":
    main()
