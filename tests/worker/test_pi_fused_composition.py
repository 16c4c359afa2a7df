"""The fused GPU computation, composed of reference operations on the CPU: the official values, without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_protocol.deployment import QuantisationOptions
from taktline_worker.models.pi.rtc import RtcRow
from taktline_worker.models.pi.runner import PiBatch, collate
from taktline_worker.models.pi.weights import BF16_VISION, FP32, PiWeights
from taktline_worker.rtc import RtcPlan, RtcSettings, prefix_weights

reference = pytest.importorskip("benchmarks.fused_reference")


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
    actions = reference.FusedReference(weights, architecture, "fp32").run(batch)
    assert distance(actions, case["actions"]) < 1e-5


@pytest.mark.parametrize(("folder", "name"), [("pi05_tiny", "case_b3"), ("pi0_tiny/full", "case_b3_mixed")])
def test_tails_guide_as_in_the_eager_runner(golden: Path, network: Any, distance: Any, folder: str, name: str) -> None:
    heads = json.loads((golden / folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    eager, architecture = network.load(golden / folder / "model.safetensors", heads, FP32)
    case = load_file(golden / folder / f"{name}.safetensors")
    rows = network.rows(case, architecture)
    settings = RtcSettings("guided", schedule="linear", max_guidance_weight=5.0)
    horizon, width = rows[0].noise.shape
    generator = torch.Generator().manual_seed(5)
    weights = torch.from_numpy(prefix_weights(2, horizon - 2, horizon, "linear")).float()
    tail = RtcRow(torch.randn(horizon, width, generator=generator), weights, RtcPlan(2, horizon - 2))
    plain = collate(rows, architecture.tokens_per_image)
    guided = collate(
        [replace(rows[0], rtc=tail), *rows[1:-1], replace(rows[-1], rtc=tail)],
        architecture.tokens_per_image,
        rtc=settings,
    )
    fused = reference.FusedReference(eager.weights, architecture, "fp32")
    actions, without = fused.run(guided), fused.run(plain)
    assert distance(actions, eager.run(guided)) < 1e-6
    assert torch.equal(actions[1], without[1]), (
        "a row without a tail gets what it gets without neighbours that have one"
    )
    assert distance(actions[0], without[0]) > 0.05
    kept = weights == 1.0
    assert distance(actions[0][kept], tail.target[kept]) < distance(without[0][kept], tail.target[kept])


def test_fp8_moves_the_actions_as_on_the_gpu(golden: Path, network: Any, distance: Any) -> None:
    """3.5e-2 was measured on an H200."""
    weights, architecture, batch, case = load(network, golden / "pi05_tiny" / "full_real_heads", "case_b1", BF16_VISION)
    error = distance(reference.FusedReference(weights, architecture, "fp8").run(batch), case["actions"])
    print(f"fp8 error {error:.3e}")
    assert 2e-2 < error < 5e-2


def test_fewer_steps_share_the_packed_matrices(golden: Path, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from taktline_kernels import gpu_reference
    from taktline_worker.models.pi import fused
    from taktline_worker.models.pi.weights import fewer_steps

    monkeypatch.setattr(fused, "gpu", gpu_reference)
    weights, architecture, *_ = load(network, golden / "pi05_tiny", "case_b3", FP32)
    whole, half = (fused.fuse(w, architecture, 10, 100).packed for w in (weights, fewer_steps(weights, 5)))
    for ours, theirs in zip((*whole.prefix, *whole.expert), (*half.prefix, *half.expert), strict=True):
        assert ours.gate_up_weight is theirs.gate_up_weight
    other, *_ = load(network, golden / "pi05_tiny", "case_b3", FP32)
    assert (
        fused.fuse(other, architecture, 10, 100).packed.prefix[0].gate_up_weight is not whole.prefix[0].gate_up_weight
    )


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("folder", "name"), [("pi05_tiny/full_real_heads", "case_b1"), ("pi0_tiny/full", "case_b3_mixed")]
)
def test_an_expert_stored_in_bytes(
    golden: Path, network: Any, distance: Any, folder: str, name: str, number_format: Any
) -> None:
    """Fewer bits than bf16 keeps, and no more is lost than they say: the fp32 computation over the rounded weights."""
    from taktline_kernels.fp8_rows import byte_weight

    weights, architecture, batch, case = load(network, golden / folder, name, BF16_VISION)
    stored = QuantisationOptions(expert=number_format, max_batch=3)
    actions = reference.FusedReference(weights, architecture, "bf16", stored).run(batch)
    error = distance(actions, case["actions"])
    plain = distance(reference.FusedReference(weights, architecture, "bf16").run(batch), case["actions"])
    print(f"{folder} {number_format}: {error:.3e}, bf16 {plain:.3e}")
    assert plain < error < 6e-2

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        one = byte_weight(weight.bfloat16(), number_format)
        return one.values.float() * one.scales[:, None]

    exact, *_ = load(network, golden / folder, name, FP32)
    matrices = ("qkv_weight", "out_weight", "gate_up_weight", "down_weight")
    expert = tuple(
        replace(layer, **{part: rounded(getattr(layer, part)) for part in matrices}) for layer in exact.expert
    )
    expected = reference.FusedReference(replace(exact, expert=expert), architecture, "fp32").run(batch)
    assert distance(actions, expected) < max(2 * plain, 1e-2)


def test_batches_above_the_limit_read_bf16(golden: Path, network: Any) -> None:
    weights, architecture, batch, _ = load(network, golden / "pi05_tiny", "case_b3", BF16_VISION)
    runs = [
        reference.FusedReference(weights, architecture, "bf16", stored).run(batch)
        for stored in (None, *(QuantisationOptions(expert="int8", max_batch=limit) for limit in (2, 3)))
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_what_computes_the_expert_is_explained(golden: Path, network: Any) -> None:
    from taktline_kernels.selector import KernelSelector
    from taktline_worker.profiling.kernels import Recorded, choice_by, selecting_by

    weights, architecture, batch, _ = load(network, golden / "pi05_tiny", "case_b3", BF16_VISION)
    for stored, width, reason in (
        (QuantisationOptions(expert="fp8"), 1, "engine.quantisation keeps the expert's matrices in fp8"),
        (QuantisationOptions(expert="fp8", max_batch=1), 2, "the kernel chain is for one row"),
        (None, 2, "the kernel chain is for one row"),
    ):
        selector = KernelSelector()
        with selecting_by(selector):
            reference.FusedReference(weights, architecture, "bf16", stored).run(batch)
        ((shape, choice),) = [(shape, choice) for op, shape, _, choice in selector.explain() if op == "expert"]
        assert shape == f"batch=3 bytes={width} tokens={batch.noise.shape[1]}"
        assert choice.kernel == "products"
        assert reason in choice.reason
        call = Recorded("expert", {}, torch.bfloat16, torch.device("cpu"), choice)
        assert choice_by((), "h200", call) is choice, "no table decides it"


def test_the_bytes_of_an_expert(golden: Path, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of bf16, shared by policies with fewer steps; where every bucket reads them no bf16 copy is kept."""
    from taktline_kernels import gpu_reference
    from taktline_worker.models.pi import fused
    from taktline_worker.models.pi.weights import fewer_steps
    from taktline_worker.models.pi.work import expert_byte_size

    monkeypatch.setattr(fused, "gpu", gpu_reference)
    weights, architecture, *_ = load(network, golden / "pi05_tiny", "case_b3", BF16_VISION)
    stored = QuantisationOptions(expert="int8", max_batch=4)
    both = fused.fuse(weights, architecture, 10, 100, stored, 8)
    alone = fused.fuse(fewer_steps(weights, 5), architecture, 10, 100, stored, 4)
    assert len(both.packed.expert) == architecture.depth
    assert alone.packed.expert == ()
    assert alone.chain is None
    assert "engine.quantisation" in alone.no_chain
    assert both.stored is not None
    assert alone.stored is not None
    assert all(a.down_weight is b.down_weight for a, b in zip(both.stored, alone.stored, strict=True))
    assert both.expert(4) is both.stored
    assert both.expert(5) is both.packed.expert
    matrices = ("qkv_weight", "out_weight", "gate_up_weight", "down_weight")
    found = sum(getattr(layer, part).bytes for layer in both.stored for part in matrices)
    numbers = sum(getattr(layer, part).numel() for layer in both.packed.expert for part in matrices)
    assert found == pytest.approx(numbers * expert_byte_size(architecture))
    assert numbers < found < 1.2 * numbers


@pytest.mark.parametrize(("folder", "name"), [("pi05_tiny", "case_b3"), ("pi0_tiny/full", "case_b3_mixed")])
def test_the_first_step_needs_a_layer_of_the_prefix_when_it_says_so(
    golden: Path, network: Any, monkeypatch: pytest.MonkeyPatch, folder: str, name: str
) -> None:
    """What it reads of the cache is there as soon as the prefix has told of that layer: it may run beside the rest."""
    fused = reference.fused
    weights, architecture, batch, _ = load(network, golden / folder, name, FP32)
    expected = reference.FusedReference(weights, architecture, "fp32").run(batch)
    told: list[int] = []
    prefix, solve = fused.prefix_pass, fused.solve
    monkeypatch.setattr(fused, "prefix_pass", lambda *arguments: prefix(*arguments, told.append))

    def solve_beside(*arguments: Any) -> None:
        keys, values = arguments[4:6]
        whole, asked = (keys.clone(), values.clone()), list[int]()
        keys.fill_(torch.nan)
        values.fill_(torch.nan)

        def before(layer: int) -> None:
            asked.append(layer)
            keys[layer], values[layer] = whole[0][layer], whole[1][layer]

        solve(*arguments, before)
        assert asked == told == list(range(architecture.depth))

    monkeypatch.setattr(fused, "solve", solve_beside)
    assert torch.equal(reference.FusedReference(weights, architecture, "fp32").run(batch), expected)
