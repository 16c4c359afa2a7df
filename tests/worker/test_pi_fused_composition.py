"""The fused GPU computation, composed of reference operations on the CPU: the official values, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_kernels import gpu_reference, ops
from taktline_worker.models.pi.runner import PiBatch, collate
from taktline_worker.models.pi.weights import BF16_VISION, FP32, PiWeights

fused = pytest.importorskip("taktline_worker.models.pi.fused")
fp8 = pytest.importorskip("taktline_worker.models.pi.fp8")


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu", gpu_reference)
    monkeypatch.setattr(fp8, "gpu", gpu_reference)


def run(weights: PiWeights, architecture: Any, batch: PiBatch, quantised: bool) -> torch.Tensor:
    """What `GraphRunner` captures, over fresh buffers."""
    a, (rows, slots), horizon = architecture, batch.source.shape, batch.noise.shape[1]
    suffix = horizon + int(batch.state is not None)
    towers = fp8.quantise(weights) if quantised else None
    packed = fused.fuse(fp8.without_matrices(weights) if towers else weights, a, horizon, slots + suffix)
    keys, values = (torch.zeros(a.depth, rows, slots + suffix, a.head_dim, dtype=weights.embedding.dtype) for _ in "kv")
    cos, sin = ops.rope_table(torch.arange(slots + suffix), a.head_dim)
    side = a.image_size // a.patch_size
    grid = batch.pixels.view(-1, 3, side, a.patch_size, side, a.patch_size)
    patches = grid.permute(0, 2, 4, 1, 3, 5).reshape(-1, side * side, 3 * a.patch_size**2)
    rest = (batch.tokens, batch.source, batch.lengths, keys, values, cos, sin, a.heads)
    if towers is None:
        images = fused.image_features(packed.packed.vision, patches, a.vision_heads)
        fused.prefix_pass(packed.packed, images, *rest)
    else:
        images = fp8.image_features(towers, packed.packed.vision, patches, a.vision_heads)
        fp8.prefix_pass(towers, packed.packed, images, *rest)
    actions = batch.noise.clone()
    fused.solve(packed, actions, batch.state, batch.lengths, keys, values, cos, sin, a.heads)
    return actions


def load(network: Any, folder: Path, name: str, policy: Any) -> tuple[PiWeights, Any, PiBatch, dict[str, torch.Tensor]]:
    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    eager, architecture = network.load(folder / "model.safetensors", heads, policy)
    case = load_file(folder / f"{name}.safetensors")
    return eager.weights, architecture, collate(network.rows(case, architecture), architecture.tokens_per_image), case


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("pi05_tiny", "case_b3"),
        ("pi05_tiny", "case_b2_masked"),
        ("pi0_tiny/full", "case_b1"),
        ("pi0_tiny/full", "case_b3_mixed"),
    ],
)
def test_fp32_meets_the_official_actions(golden: Path, network: Any, distance: Any, folder: str, name: str) -> None:
    weights, architecture, batch, case = load(network, golden / folder, name, FP32)
    assert distance(run(weights, architecture, batch, quantised=False), case["actions"]) < 1e-5


def test_fp8_moves_the_actions_as_on_the_gpu(golden: Path, network: Any, distance: Any) -> None:
    """3.5e-2 was measured on an H200."""
    weights, architecture, batch, case = load(network, golden / "pi05_tiny" / "full_real_heads", "case_b1", BF16_VISION)
    error = distance(run(weights, architecture, batch, quantised=True), case["actions"])
    print(f"fp8 error {error:.3e}")
    assert 2e-2 < error < 5e-2
