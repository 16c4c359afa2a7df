"""FP8 products in MiniCPM-Robot's backbone, with the plain statements of the GPU's functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_kernels import gpu_reference
from taktline_worker import fp8_layers
from taktline_worker.fp8_layers import Fp8Linear
from taktline_worker.layers import Linear
from taktline_worker.models.minicpm_robot import synthetic
from taktline_worker.models.minicpm_robot.fp8 import quantise
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from taktline_worker.models.minicpm_robot.work import phase_work


@pytest.fixture
def runner(kit: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MiniCpmRunner:
    monkeypatch.setattr(fp8_layers, "functions", lambda: gpu_reference)
    plain = kit.runner(folder, torch.bfloat16)
    return MiniCpmRunner(quantise(plain.weights), plain.architecture, kit.image_token)


def test_actions_stay_near(kit: Any, runner: MiniCpmRunner, folder: Path) -> None:
    exact, rounded = kit.runner(folder), kit.runner(folder, torch.bfloat16)
    rows = [kit.row(2, 9, 3, seed=4), kit.row(1, 5, 3, seed=5)]
    expected = exact.run(rows)
    apart = {name: kit.distance(one.run(rows), expected) for name, one in (("bf16", rounded), ("fp8", runner))}
    print(apart)
    assert apart["bf16"] < apart["fp8"] < 0.15


def test_a_row_is_the_same_alone_and_among_others(kit: Any, runner: MiniCpmRunner) -> None:
    rows = [kit.row(2, 9, 3, seed=4), kit.row(1, 5, 1, seed=5)]
    for row, found in zip(rows, runner.run(rows), strict=True):
        assert kit.distance(runner.run([row])[0], found) < 2e-2


def test_only_the_backbones_blocks_are_quantised(runner: MiniCpmRunner) -> None:
    """A side that the GPU cannot multiply in FP8 keeps its layer in bf16."""
    weights, seen = runner.weights, 0
    for layer in weights.text.layers:
        mixer = [getattr(layer.mixer, name) for name in ("qkv", "inputs", "out") if hasattr(layer.mixer, name)]
        for one in (*mixer, layer.gate_up, layer.down):
            seen += isinstance(one, Fp8Linear)
            assert isinstance(one, Fp8Linear) or any(side % 16 for side in one.weight.shape)
    assert seen > 2 * len(weights.text.layers)
    kept = (weights.vision.patch, weights.vision.merge1, weights.head.tail, weights.head.blocks[0].fc1)
    assert all(isinstance(one, Linear) for one in kept)


def test_the_published_sides_can_all_be_multiplied() -> None:
    from taktline_worker.models.minicpm_robot.weights import expected_shapes

    blocks = {
        name: shape
        for name, shape in expected_shapes(synthetic.PUBLISHED).items()
        if len(shape) == 2 and name.endswith("weight") and ("layers." in name) and "action" not in name
    }
    assert len(blocks) > 100
    t = synthetic.PUBLISHED.text
    query, key, value = t.delta_widths
    assert (query + key + 2 * value + 2 * t.delta_heads) % 16 == 0
    assert not [name for name, shape in blocks.items() if shape[1] % 16]


def test_its_bytes_by_phase() -> None:
    bf16, fp8 = (
        phase_work(synthetic.PUBLISHED, batch=1, images=2, text=28, weight_bytes=2.0, block_bytes=size)
        for size in (None, 1.0)
    )
    assert fp8["head"] == bf16["head"]
    assert fp8["text"].bytes == pytest.approx(bf16["text"].bytes / 2)
    assert 0.5 * bf16["vision"].bytes < fp8["vision"].bytes < 0.8 * bf16["vision"].bytes
