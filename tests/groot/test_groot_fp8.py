"""FP8 products in GR00T's backbone, with the plain statements of the GPU's functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from taktline_kernels import gpu_reference
from taktline_worker import fp8_layers
from taktline_worker.fp8_layers import Fp8Linear
from taktline_worker.layers import Linear
from taktline_worker.models.groot import synthetic
from taktline_worker.models.groot.fp8 import quantise
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.work import phase_work


@pytest.fixture
def runner(kit: Any, monkeypatch: pytest.MonkeyPatch) -> GrootRunner:
    monkeypatch.setattr(fp8_layers, "functions", lambda: gpu_reference)
    plain = kit.runner(torch.bfloat16)
    return GrootRunner(quantise(plain.weights), plain.architecture)


def test_the_golden_actions(kit: Any, runner: GrootRunner) -> None:
    """Further from fp32 than bf16, by what three bits of mantissa cost."""
    for name in ("case_b1", "case_b2"):
        case, rows = kit.case(name)
        actions = runner.run(rows)
        error, rounded = (
            kit.distance(found, case["actions"]) for found in (actions, kit.runner(torch.bfloat16).run(rows))
        )
        print(f"{name}: fp8 {error:.2e}, bf16 {rounded:.2e}")
        assert rounded < error < 0.1
        cosine = torch.nn.functional.cosine_similarity(actions.flatten(1), case["actions"].flatten(1))
        assert float(cosine.min()) > 0.99


def test_a_row_is_the_same_alone_and_among_others(kit: Any, runner: GrootRunner) -> None:
    _, rows = kit.case("case_b2")
    together = runner.run(rows)
    for row, found in zip(rows, together, strict=True):
        assert kit.distance(runner.run([row])[0], found) < 2e-2


def test_only_the_backbones_blocks_are_quantised(runner: GrootRunner) -> None:
    weights = runner.weights
    for block in weights.vision.blocks:
        assert all(isinstance(one, Fp8Linear) for one in (block.qkv, block.out, block.fc1, block.fc2))
    for layer in weights.text.layers:
        assert all(isinstance(one, Fp8Linear) for one in (layer.qkv, layer.out, layer.gate_up, layer.down))
    kept = (
        weights.vision.patch,
        weights.vision.merger.fc1,
        weights.head.blocks[0].attention.out,
        weights.head.blocks[0].fc1,
    )
    assert all(isinstance(one, Linear) for one in kept)


def test_its_bytes_by_phase() -> None:
    """Half of the vision blocks and of the text layers; refinement, mergers and head as they were."""
    bf16, fp8 = (
        phase_work(synthetic.PUBLISHED, batch=1, grids=((16, 16),) * 2, text=28, weight_bytes=2.0, block_bytes=size)
        for size in (None, 1.0)
    )
    assert fp8["head"] == bf16["head"]
    assert bf16["text"].bytes - fp8["text"].bytes == pytest.approx(1611e6 / 2, rel=0.015)
    assert 0.5 * bf16["vision"].bytes < fp8["vision"].bytes < 0.7 * bf16["vision"].bytes
    assert [part.flops for part in fp8.values()] == [part.flops for part in bf16.values()]
