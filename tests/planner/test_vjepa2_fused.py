"""The fused predictor: the golden energies, the plain statement's plans, and on a GPU its captured units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_kernels.ops import frame_products as products
from taktline_worker.models.vjepa2_ac.config import (
    VJepa2Architecture,
    expected_encoder_shapes,
    expected_predictor_shapes,
)
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.models.vjepa2_ac.weights import (
    BF16,
    FP32,
    CheckpointFile,
    Precision,
    open_checkpoint,
    pack_weights,
)
from taktline_worker.planning.search import Problem, search
from taktline_worker.planning.world import Scene
from torch import Tensor

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: graphs are captured there only")


def make(kit: Any, precision: Precision, device: str = "cpu", **options: Any) -> VJepa2World:
    checkpoint = open_checkpoint(kit.files["full"], kit.stated["full"])
    weights = pack_weights(checkpoint, precision, torch.device(device))
    return VJepa2World(weights, checkpoint.architecture, 64, 2, **options)


def golden_round(golden: Path, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    case = load_file(golden / "full" / "cem_main.safetensors")
    return case["actions"][number].to(device), case["energies"][number].to(device)


def correlation(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((first, second)).double())[0, 1])


@pytest.mark.parametrize("number", [0, 3])
def test_energies_are_the_golden_ones_in_fp32(golden: Path, kit: Any, number: int) -> None:
    world = make(kit, FP32, fused=True)
    actions, expected = golden_round(golden, number, world.device)
    energies = torch.full((64,), torch.nan)
    world.score(world.prepare(kit.scene(world)), actions, energies)
    assert kit.distance(energies, expected) < 1e-6


def test_a_whole_search_is_the_plain_one_in_fp32(kit: Any) -> None:
    plain, fused = make(kit, FP32), make(kit, FP32, fused=True)
    plans = [search(one, [Problem(kit.scene(one), kit.settings("main"))])[0] for one in (plain, fused)]
    assert kit.distance(plans[1].actions, plans[0].actions) < 1e-5


def test_rounding_ranks_as_fp32_does(golden: Path, kit: Any) -> None:
    found = {}
    for name, options in {"bf16": {}, "fp8": {"quantised": True}}.items():
        world = make(kit, BF16, fused=True, **options)
        actions, expected = golden_round(golden, 0, world.device)
        energies = torch.empty(64)
        world.score(world.prepare(kit.scene(world)), actions, energies)
        found[name] = correlation(energies, expected)
    # Eight bits of a matrix two heads wide average over little; the published size is measured in the benchmarks.
    assert 0.999 <= found["bf16"] < 1.0
    assert 0.95 <= found["fp8"] < found["bf16"]


def random_model(image_size: int, width: int, generator: torch.Generator) -> CheckpointFile:
    """Random weights of three predictor blocks in heads of 64."""
    architecture = VJepa2Architecture(
        image_size=image_size,
        patch_size=16,
        encoder_width=128,
        encoder_depth=1,
        encoder_heads=2,
        encoder_mlp=256,
        width=width,
        depth=3,
        heads=width // 64,
        mlp=4 * width,
    )

    def tower(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {
            name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
            + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
            for name, shape in shapes.items()
        }

    encoder, predictor = expected_encoder_shapes(architecture), expected_predictor_shapes(architecture)
    return CheckpointFile(Path("random"), tower(encoder), tower(predictor), architecture)


@pytest.mark.parametrize("quantised", [False, True])
def test_rotation_and_gelu_in_the_products_change_little(monkeypatch: pytest.MonkeyPatch, quantised: bool) -> None:
    """The blocks as a GPU with those kernels runs them, through the references, beside the blocks of others."""
    generator = torch.Generator().manual_seed(8)
    checkpoint = random_model(64, 128, generator)
    latent, goal = torch.randn(2, 16, 128, generator=generator)
    scene = Scene(latent, goal, torch.tensor([0.4, 0.1, 0.3, 3.1, 0.05, -0.4, 0.2]))
    actions = torch.randn(8, 2, 7, generator=generator)
    exact = VJepa2World(pack_weights(checkpoint, FP32, torch.device("cpu")), checkpoint.architecture, 8, 2)
    energies = {"exact": torch.empty(8)}
    exact.score(exact.prepare(scene), actions, energies["exact"])
    for in_one in (False, True):
        for name in ("turns_in_one", "gelu_in_one"):
            monkeypatch.setattr(products, name, lambda *shape, in_one=in_one: in_one)
        weights = pack_weights(checkpoint, BF16, torch.device("cpu"))
        world = VJepa2World(weights, checkpoint.architecture, 8, 2, fused=True, quantised=quantised)
        found = energies[f"in one {in_one}"] = torch.empty(8)
        world.score(world.prepare(scene), actions, found)
    errors = {name: float((one - energies["exact"]).norm()) for name, one in energies.items()}
    assert 0 < errors["in one True"] < 1.5 * errors["in one False"]
    assert not torch.equal(energies["in one True"], energies["in one False"])
    assert errors["in one False"] < 0.02 * float(energies["exact"].norm())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("precision", "bar"), [("bf16", 2e-3), ("fp8", 2e-2)])
def test_the_published_width_goes_through_the_fused_kernels(precision: str, bar: float) -> None:
    generator = torch.Generator().manual_seed(4)
    checkpoint = random_model(256, 1024, generator)
    architecture = checkpoint.architecture
    device = torch.device("cuda")
    exact = VJepa2World(pack_weights(checkpoint, FP32, device), architecture, 32, 3, fused=False)
    world = VJepa2World(pack_weights(checkpoint, BF16, device), architecture, 32, 3, quantised=precision == "fp8")
    latent, goal = torch.randn(2, 256, 128, generator=generator).to(device)
    pose = torch.tensor([0.4, 0.1, 0.3, 3.1, 0.05, -0.4, 0.2], device=device)
    actions = torch.randn(32, 3, 7, generator=generator).to(device)
    found = {}
    for name, one in {"exact": exact, "eager": world}.items():
        found[name] = torch.empty(32, device=device)
        one.score(one.prepare(Scene(latent, goal, pose)), actions, found[name])
    assert float(((found["eager"] - found["exact"]) / found["exact"]).abs().max()) < bar
    world.capture()
    captured = torch.empty(32, device=device)
    world.score(world.prepare(Scene(latent, goal, pose)), actions, captured)
    assert torch.equal(captured, found["eager"])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("quantised", [False, True])
def test_a_captured_unit_is_the_eager_one(golden: Path, kit: Any, quantised: bool) -> None:
    world = make(kit, BF16, "cuda", quantised=quantised)
    scene = kit.scene(world)
    scene = type(scene)(scene.latent, scene.goal, scene.pose.cuda())
    prepared = world.prepare(scene)
    actions, expected = golden_round(golden, 0, world.device)
    eager, captured, again = (torch.full((64,), torch.nan, device="cuda") for _ in range(3))
    world.score(prepared, actions, eager)
    world.capture()
    world.score(prepared, actions.flip(0), captured)  # other inputs in between: the graph reads its buffers anew
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    world.score(prepared, actions, captured)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    world.score(prepared, actions, again)
    assert torch.equal(captured, again)
    assert kit.distance(captured, eager) < 1e-6
    assert correlation(captured, expected) >= (0.95 if quantised else 0.999)
