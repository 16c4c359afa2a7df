"""FP8 products in the tower of video and actions, with the plain statements of the GPU's functions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taktline_kernels import gpu_reference
from taktline_kernels.fp8_rows import Fp8Rows
from taktline_kernels.ops import fp8_attention
from taktline_kernels.ops.fp8_attention import attends_in_fp8
from taktline_kernels.selector import KernelSelector
from taktline_protocol import TaktlineError
from taktline_worker import fp8_layers
from taktline_worker.models.cosmos3 import fp8, modules, synthetic
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.weights import Linear, pack_weights

from tests.cosmos3.test_policy_plain import SIZE
from tests.cosmos3.tiny_policy import EDGE_TINY, OFFICIAL_TINY, fake_encoder, make_request

CASES = {"nano": (synthetic.NANO, OFFICIAL_TINY), "edge": (synthetic.EDGE, EDGE_TINY)}


@pytest.fixture(autouse=True)
def stated(monkeypatch):
    monkeypatch.setattr(fp8_layers, "functions", lambda: gpu_reference)
    monkeypatch.setattr(modules, "functions", lambda: gpu_reference)
    monkeypatch.setattr(fp8, "attends_in_fp8", lambda *_: True)


def runners(kind):
    published, settings = CASES[kind]
    a = replace(published, **SIZE)
    tensors = dict(synthetic.random_tensors(a, torch.device("cpu")))
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16)):
        weights = pack_weights(tensors.items(), a, settings, dtype, torch.device("cpu"))
        weights = fp8.quantise(weights) if name == "fp8" else weights
        found[name] = Cosmos3Runner(weights, a, settings, fake_encoder)
    return found


@pytest.mark.parametrize("kind", CASES)
def test_actions_in_fp8_are_near_those_in_bf16(kind):
    made = runners(kind)
    rows = [make_request(CASES[kind][1], seed, 12) for seed in (1, 2, 3)]
    actions = {name: torch.stack([one.actions for one in runner.run(rows)]) for name, runner in made.items()}
    apart = {name: float((actions[name] - actions["fp32"]).norm() / actions["fp32"].norm()) for name in ("bf16", "fp8")}
    print(f"{kind}: actions are {apart['bf16']:.1e} (bf16) and {apart['fp8']:.1e} (fp8) from fp32")
    assert apart["bf16"] < 0.03
    # It does something, and no more than quantising to three bits of mantissa can.
    assert 1.5 * apart["bf16"] < apart["fp8"] < 0.2


def test_a_row_in_fp8_is_the_same_alone_and_among_others():
    runner = runners("nano")["fp8"]
    rows = [make_request(OFFICIAL_TINY, seed, length) for seed, length in ((1, 4), (2, 30))]
    for row, outcome in zip(rows, runner.run(rows), strict=True):
        [alone] = runner.run([row])
        assert float((outcome.actions - alone.actions).norm() / alone.actions.norm()) < 2e-2


def test_where_no_kernel_is_named_attention_stays_in_bf16(monkeypatch):
    monkeypatch.setattr(fp8, "attends_in_fp8", attends_in_fp8)  # this machine has no table
    runner = runners("nano")["fp8"]
    assert all(layer.multipliers is None for layer in runner.weights.joint)
    assert all(isinstance(layer.qkv, fp8.Fp8Linear) for layer in runner.weights.joint)
    monkeypatch.setattr(modules, "attention_fp8", None)
    monkeypatch.setattr(modules, "heads_fp8", None)
    assert runner.run([make_request(OFFICIAL_TINY, 1, 12)])[0].actions.isfinite().all()


@pytest.mark.parametrize("named", [("heads_fp8", "attention_fp8"), ("heads_fp8",), ("attention_fp8",), ()])
def test_a_table_must_name_kernels_for_heads_and_attention(named, tmp_path, monkeypatch):
    table = tmp_path / "table.toml"
    table.write_text("".join(f'[[rule]]\nop = "{op}"\nkernel = "triton"\n' for op in named))
    monkeypatch.setenv("TAKTLINE_KERNEL_TABLE", str(table))
    fresh = KernelSelector()  # the shared one keeps what it chose
    monkeypatch.setattr(fp8_attention, "default_selector", lambda: fresh)
    assert attends_in_fp8(32, 8, 128, torch.device("cuda", 0)) == (len(named) == 2)
    assert not attends_in_fp8(32, 8, 128, torch.device("cpu"))


def test_only_the_tower_of_video_and_actions_is_quantised():
    weights = runners("edge")["fp8"].weights
    assert all(isinstance(m, fp8.Fp8Linear) for layer in weights.joint for m in (layer.qkv, layer.out, layer.up))
    assert all(isinstance(layer.qkv, Linear) for layer in weights.text)
    assert weights.joint[0].down.rows.values.dtype == torch.float8_e4m3fn


def test_a_quantised_matrix_splits_by_rows():
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = fp8.Fp8Linear(gpu_reference.quantise_weight(weight))
    first, rest = whole.split(16)
    assert torch.equal(torch.cat((first(x), rest(x)), dim=-1), whole(x))
    rows = gpu_reference.quantise_rows(x)
    assert isinstance(rows, Fp8Rows)
    assert torch.equal(whole(rows), whole(x))


def test_a_cpu_is_refused():
    with pytest.raises(TaktlineError, match="needs a Hopper GPU"):
        fp8.check_device(torch.device("cpu"))
