"""Guided and trained real-time chunking in the π runner, against the formulas written out for one row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from taktline_worker.models.pi import modules
from taktline_worker.models.pi.config import expert_norms
from taktline_worker.models.pi.keys import canonical_names
from taktline_worker.models.pi.rtc import RtcRow
from taktline_worker.models.pi.runner import PiRow, PiRunner, collate
from taktline_worker.models.pi.weights import BF16, FP32, time_embedding
from taktline_worker.rtc import RtcPlan, RtcSettings, prefix_weights
from torch import Tensor
from torch.nn import functional

HORIZON, WIDTH, STEPS, HEADS = 10, 32, 10, 8
BETA = 10.0
GUIDED = RtcSettings("guided", "exp", BETA)
EXACT = RtcSettings("guided", "exp", BETA, exact=True)
TRAINED = RtcSettings("trained", max_delay=6)


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def policy(request: Any, golden: Any, network: Any) -> tuple[PiRunner, list[PiRow], int]:
    return _policy(request.param, golden, network)


@pytest.fixture(scope="module")
def trained(golden: Any, network: Any) -> tuple[PiRunner, list[PiRow], int]:
    return _policy("pi05", golden, network, rtc_max_delay=6)


def _policy(family: str, golden: Any, network: Any, policy: Any = FP32, **conventions: Any) -> Any:
    runner, architecture = network.load(golden / f"{family}_tiny" / "model.safetensors", 4, policy, **conventions)
    case = load_file(golden / f"{family}_tiny" / "case_b3.safetensors")
    return runner, network.rows(case, architecture), architecture.tokens_per_image


def with_tail(row: PiRow, delay: int, end: int, length: int, seed: int = 0) -> PiRow:
    target = torch.zeros(HORIZON, WIDTH)
    target[:length] = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed))
    weights = torch.from_numpy(prefix_weights(delay, end, HORIZON, "exp")).float()
    return dataclasses.replace(row, rtc=RtcRow(target, weights, RtcPlan(delay, end)))


def mixed(rows: list[PiRow]) -> list[PiRow]:
    """Without a tail, with a short one, with a long one and no delay."""
    return [rows[0], with_tail(rows[1], 2, 6, 7, seed=1), with_tail(rows[2], 0, 10, 10, seed=2)]


def plain_guidance(runner: PiRunner, row: PiRow, tokens: int, *, exact: bool) -> Tensor:
    """One row alone, from the formulas: no batch tensors, no code of `rtc`; the derivative as a whole matrix."""
    runner.run(collate([dataclasses.replace(row, rtc=None)], tokens))  # leaves the keys and values of the row
    batch = collate([row], tokens)
    keys, values = runner.keys.clone(), runner.values.clone()
    lengths = batch.lengths + (0 if row.state is None else 1)
    positions = lengths[:, None] + torch.arange(HORIZON)
    from taktline_kernels import ops

    cos, sin = ops.rope_table(positions, runner.architecture.head_dim)
    tail = row.rtc
    assert tail is not None
    d, e = tail.plan.delay, tail.plan.end
    weights = torch.zeros(HORIZON, 1)
    for i in range(HORIZON):
        if i < min(d, e):
            weights[i] = 1.0
        elif i < e:
            falling = (e - i) / (e - min(d, e) + 1)
            weights[i] = falling * (np.exp(falling) - 1) / (np.e - 1)
    x, steps = row.noise.clone(), len(runner.weights.times)
    for step in range(steps):
        tau = 1.0 - step / steps
        t = 1.0 - tau

        def denoised(x: Tensor, step: int = step, tau: float = tau) -> Tensor:
            v = modules.velocity(runner.weights, step, x[None], keys, values, lengths, cos, sin, HEADS)[0]
            return x - tau * v

        error = (tail.target - denoised(x)) * weights
        if exact:
            matrix = torch.autograd.functional.jacobian(denoised, x, vectorize=True)
            matrix = matrix.reshape(HORIZON * WIDTH, HORIZON * WIDTH)
            error = (matrix.T @ error.flatten()).view(HORIZON, WIDTH)
        g = BETA if step == 0 else min((1 - t) / t * (t**2 + (1 - t) ** 2) / (1 - t) ** 2, BETA)
        v = (x - denoised(x)) / tau
        x = (x - (v - g * error) / steps).detach()
    return x


@pytest.mark.parametrize(("settings", "steps"), [(GUIDED, 10), (EXACT, 3)], ids=["identity", "vjp"])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_guided_rows_follow_the_formulas(
    golden: Any, network: Any, distance: Any, family: str, settings: RtcSettings, steps: int
) -> None:
    # A whole Jacobian each step: three steps are as good as ten.
    runner, rows, tokens = _policy(family, golden, network, solver_steps=steps)
    batch = mixed(rows)
    actions = runner.run(collate(batch, tokens, rtc=settings))
    plain = runner.run(collate(rows, tokens))
    for index in (1, 2):
        expected = plain_guidance(runner, batch[index], tokens, exact=settings.exact)
        assert distance(actions[index], expected) <= 2e-5
        assert distance(plain[index], expected) > 0.01  # guidance did something


def test_identity_and_exact_guidance_differ(policy: Any, distance: Any) -> None:
    runner, rows, tokens = policy
    first, second = (runner.run(collate(mixed(rows), tokens, rtc=s)) for s in (GUIDED, EXACT))
    assert distance(first[1], second[1]) > 1e-4


@pytest.mark.parametrize("settings", [GUIDED, EXACT], ids=["identity", "vjp"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_rows_without_a_tail_are_the_same_bit_by_bit(
    golden: Any, network: Any, family: str, precision: Any, settings: RtcSettings
) -> None:
    runner, rows, tokens = _policy(family, golden, network, precision)
    rows = [rows[0], *mixed(rows)[1:], rows[2]]
    guided = runner.run(collate(rows, tokens, rtc=settings))
    plain = runner.run(collate([dataclasses.replace(row, rtc=None) for row in rows], tokens, rtc=settings))
    assert torch.equal(guided[0], plain[0])
    assert torch.equal(guided[3], plain[3])
    assert not torch.equal(guided[1], plain[1])


@pytest.mark.parametrize("settings", [GUIDED, EXACT, TRAINED], ids=["identity", "vjp", "trained"])
def test_neighbours_do_not_matter(trained: Any, distance: Any, settings: RtcSettings) -> None:
    runner, rows, tokens = trained
    together = runner.run(collate(mixed(rows), tokens, rtc=settings))
    for index, row in enumerate(mixed(rows)):
        alone = runner.run(collate([row], tokens, rtc=settings))
        assert distance(alone[0], together[index]) <= 5e-6


@pytest.mark.parametrize("settings", [GUIDED, EXACT, TRAINED], ids=["identity", "vjp", "trained"])
def test_no_influence_is_no_rtc(trained: Any, settings: RtcSettings) -> None:
    """A delay of 0 whose prefix ends at once leaves the chunk as it is; without any tail there is nothing to do."""
    runner, rows, tokens = trained
    assert collate(rows, tokens, rtc=settings).rtc is None
    plain = runner.run(collate(rows, tokens))
    none = runner.run(collate([with_tail(row, 0, 0, 5) for row in rows], tokens, rtc=settings))
    assert torch.equal(plain, none)


def test_a_guided_prefix_comes_close_to_the_tail(policy: Any) -> None:
    """The last step alone takes 0.1 * g(0.9) = 91% of what is left of the error in actions of full weight."""
    runner, rows, tokens = policy
    row = with_tail(rows[0], 4, 8, 9)
    assert row.rtc is not None
    target = row.rtc.target
    plain = runner.run(collate([rows[0]], tokens))[0]
    guided = runner.run(collate([row], tokens, rtc=GUIDED))[0]
    before, after = ((chunk - target).abs().mean(dim=1) for chunk in (plain, guided))
    assert (after[:4] < 0.15 * before[:4]).all()
    assert after[:4].max() < after[4:8].max()


def test_a_trained_prefix_is_reproduced_exactly(trained: Any) -> None:
    runner, rows, tokens = trained
    batch = [with_tail(rows[0], 3, 3, 5), rows[1], with_tail(rows[2], 0, 0, 5), with_tail(rows[0], 6, 6, 6)]
    seen: list[Tensor] = []
    actions = runner.run(collate(batch, tokens, rtc=TRAINED), lambda step, x, v: seen.append(x.clone()))
    plain = runner.run(collate([dataclasses.replace(row, rtc=None) for row in batch], tokens))
    for index, delay in ((0, 3), (3, 6)):
        rtc = batch[index].rtc
        assert rtc is not None
        assert torch.equal(actions[index, :delay], rtc.target[:delay])
        assert all(torch.equal(x[index, :delay], rtc.target[:delay]) for x in seen)
        assert not torch.equal(actions[index, delay:], plain[index, delay:])
    assert torch.equal(actions[1], plain[1])
    assert torch.equal(actions[2], plain[2])


def plain_trained(tensors: dict[str, Tensor], runner: PiRunner, row: PiRow, tokens: int, delay: int) -> Tensor:
    """One row from the stored tensors: every action has its own time, 0 for the first `delay`, and its own AdaRMS."""
    w, a = tensors, runner.architecture
    runner.run(collate([dataclasses.replace(row, rtc=None)], tokens))
    length = int(collate([row], tokens).lengths[0])
    past_keys, past_values = runner.keys[:, 0, :length].clone(), runner.values[:, 0, :length].clone()
    assert row.rtc is not None
    target, x = row.rtc.target, row.noise.clone()
    inverse = 10000.0 ** (-torch.arange(0, a.head_dim, 2).double() / a.head_dim)
    angle = (length + torch.arange(HORIZON)).double()[:, None] * inverse
    cos, sin = angle.cos().repeat(1, 2).float(), angle.sin().repeat(1, 2).float()

    def rotate(value: Tensor) -> Tensor:  # (tokens, heads, d)
        first, second = value.chunk(2, dim=-1)
        return value * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def norm(name: str, value: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        table = functional.linear(cond, w[f"{name}.dense.weight"], w[f"{name}.dense.bias"])
        scale, shift, gate = table.chunk(3, dim=-1)
        scaled = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6)
        return scaled * (1 + scale) + shift, gate

    for step in range(STEPS):
        times = torch.full((HORIZON,), 1.0 - step / STEPS)
        times[:delay] = 0.0
        x = torch.cat((target[:delay], x[delay:]))
        cond = time_embedding(times, a.expert_width, min_period=0.004, max_period=4.0)
        for name in ("time_mlp_in", "time_mlp_out"):
            cond = functional.silu(functional.linear(cond, w[f"{name}.weight"], w[f"{name}.bias"]))
        h = functional.linear(x, w["action_in_proj.weight"], w["action_in_proj.bias"])
        for layer in range(a.depth):
            base = f"expert.layers.{layer}"
            n, gate = norm(f"{base}.input_layernorm", h, cond)
            q, k, v = (functional.linear(n, w[f"{base}.self_attn.{p}_proj.weight"]) for p in "qkv")
            q, k = rotate(q.view(HORIZON, HEADS, -1)), rotate(k[:, None])[:, 0]
            keys, values = torch.cat((past_keys[layer], k)), torch.cat((past_values[layer], v))
            probabilities = (torch.einsum("qhd,kd->hqk", q, keys) * a.head_dim**-0.5).softmax(-1)
            attended = torch.einsum("hqk,kd->qhd", probabilities, values).reshape(HORIZON, -1)
            h = h + functional.linear(attended, w[f"{base}.self_attn.o_proj.weight"]) * gate
            n, gate = norm(f"{base}.post_attention_layernorm", h, cond)
            up = functional.linear(n, w[f"{base}.mlp.up_proj.weight"])
            gated = functional.gelu(functional.linear(n, w[f"{base}.mlp.gate_proj.weight"]), approximate="tanh")
            h = h + functional.linear(gated * up, w[f"{base}.mlp.down_proj.weight"]) * gate
        n, _ = norm(expert_norms(a.depth)[-1], h, cond)
        x = x - functional.linear(n, w["action_out_proj.weight"], w["action_out_proj.bias"]) / STEPS
    return torch.cat((target[:delay], x[delay:]))


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_trained_rows_have_a_time_for_each_action(trained: Any, golden: Any, distance: Any, delay: int) -> None:
    runner, rows, tokens = trained
    stored = load_file(golden / "pi05_tiny" / "model.safetensors")
    tensors = {target: stored[name].float() for name, target in canonical_names(stored).items()}
    batch = [rows[1], with_tail(rows[0], delay, delay, 6), with_tail(rows[2], 2, 2, 6)]
    actions = runner.run(collate(batch, tokens, rtc=TRAINED))
    assert distance(actions[1], plain_trained(tensors, runner, batch[1], tokens, delay)) <= 1e-5
