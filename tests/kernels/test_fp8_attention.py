"""Attention in FP8 behind a text, and the heads it reads: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.fp8_heads import Fp8Text, head_multipliers, quantise_text
from taktline_kernels.ops.dispatch import REGISTRY
from taktline_kernels.ops.fp8_attention import attention_fp8, heads_fp8

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
kernels = importlib.import_module("taktline_kernels.triton_impl.fp8_attention")
# e4m3 has three bits: half a step is a sixteenth. The interpreter loses carries.
STEP = 1 / 16 if HAS_GPU else 1 / 8


def inputs(*, prefix, tokens, heads, kv_heads, width, dtype=torch.float32, seed=0):
    """A fused product's rows, norms, a rotary table, and texts of other lengths in slots with nothing behind them."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)  # noqa: E731
    qkv = rand(len(prefix), tokens, heads + 2 * kv_heads, width).to(dtype)
    norms = 1 + 0.2 * rand(width), 1 + 0.2 * rand(width)
    angles = 3 * rand(len(prefix) * tokens, width // 2)
    texts = rand(2, len(prefix), -(-max(prefix) // 16) * 16, kv_heads, width).to(dtype)
    return qkv.split((heads, kv_heads, kv_heads), dim=2), norms, (angles.cos(), angles.sin()), texts


def text_of(texts, lengths):
    """As the runner fills its buffers: each lane by itself, its own slots alone."""
    lanes, slots, kv_heads, width = texts[0].shape
    k = torch.zeros(lanes, slots, kv_heads, width, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    v = torch.zeros(lanes, kv_heads, width, slots, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    multipliers = torch.ones(lanes, 2, device=DEVICE)
    for lane, length in enumerate(lengths):
        keys, values, multipliers[lane : lane + 1] = quantise_text(*(t[lane : lane + 1, :length] for t in texts))
        k[lane, :length], v[lane, :, :, :length] = keys[0], values[0]
        k[lane, length:] = 400.0  # finite, and nobody may read it
        v[lane, :, :, length:] = 400.0
    return Fp8Text(k, v, multipliers, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))


def multipliers_of(norms):
    return torch.cat((448 / (1.1 * torch.stack([n.abs().amax() * len(n) ** 0.5 for n in norms])), norms[0].new_ones(1)))


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_the_room_holds_the_worst_roundings():
    """Every weight and every number of the normed row just above the middle of two steps, and all in one direction."""
    worst = 1.0625 + 2**-20  # between 1 and 1.125: rounded up by nearly a sixteenth
    weight, token = torch.full((1, 4096), worst), torch.full((4096,), worst)
    ones = torch.ones(4096)
    multiplier = head_multipliers(torch.ones(8), torch.ones(8), weight, ones)[2]
    rounded = [t.to(torch.float8_e4m3fn).float() for t in (weight[0], token)]
    assert float(rounded[0][0] / weight[0, 0]) > 1.058
    # A normed row of 4096 equal numbers is one of ones: its length, the root of the width, is what the bound takes.
    value = ((rounded[0] * rounded[1]).sum() / worst * (1 + 2**-8)).item()
    assert 0.98 * 448 < value * float(multiplier) <= 448


@pytest.mark.parametrize(("normed", "adjacent"), [(True, True), (True, False), (False, False)])
def test_heads_are_normed_rotated_and_rounded_once(normed, adjacent):
    (q, k, v), norms, table, _ = inputs(prefix=(3, 5), tokens=37, heads=6, kv_heads=2, width=32)
    multipliers = multipliers_of(norms)
    asked = (norms, table) if normed else (None, None)
    got = kernels.heads_fp8(q, k if adjacent else k.clone(), v, multipliers, *asked, 1e-6, adjacent, {})
    expected = REGISTRY["heads_fp8"].reference(q, k, v, multipliers, *asked, 1e-6, adjacent)
    for name in ("q", "k", "v"):
        one, other = getattr(got, name).float(), getattr(expected, name).float()
        assert one.shape == other.shape
        # The interpreter loses the carry where a number is rounded up to a power of two.
        judged = torch.ones_like(one, dtype=torch.bool) if HAS_GPU else other.frexp().mantissa.abs() != 0.5
        assert relative(one[judged], other[judged]) < 1e-2
        # A number at the edge of two steps may fall to either side.
        assert bool(((one - other).abs() <= 0.13 * other.abs() + 0.003)[judged].all())
    assert not bool(got.v[..., 37:].float().any())


@pytest.mark.parametrize("first", [0, 5])
def test_every_query_sees_its_text_and_all_tokens(first):
    (q, k, v), norms, table, texts = inputs(prefix=(20, 3), tokens=70, heads=4, kv_heads=2, width=32)
    own = heads_fp8(q, k, v, multipliers_of(norms), norms=norms, table=table)
    own = type(own)(own.q[:, first:], own.k, own.v, own.multipliers)
    text = text_of(texts, (20, 3))
    expected = REGISTRY["attention_fp8"].reference(own, text, torch.float32)
    block = 64 if HAS_GPU else 16
    found = kernels.attention_fp8(own, text, torch.float32, {"block_m": block, "block_n": block, "num_warps": 4})
    assert found.shape == expected.shape
    # Only the weights' rounding is between them.
    assert relative(found, expected) < STEP


def test_the_statement_is_attention_over_the_same_numbers():
    (q, k, v), norms, table, texts = inputs(prefix=(20, 3), tokens=70, heads=4, kv_heads=2, width=32)
    own = heads_fp8(q, k, v, multipliers_of(norms), norms=norms, table=table)
    found = attention_fp8(own, text_of(texts, (20, 3)), torch.float32)
    rows = torch.cat((q, k, v), dim=2).flatten(2).contiguous()
    REGISTRY["norm_rotate"].reference(rows, *norms, *table, 4, 2, 1e-6)
    q, k, v = rows.view(2, 70, 8, 32).split((4, 2, 2), dim=2)
    exact = []
    for lane, length in enumerate((20, 3)):
        keys, values = (torch.cat((t[lane, :length], own[lane])) for t, own in zip(texts, (k, v), strict=True))
        keys, values = (t.repeat_interleave(2, dim=1) for t in (keys, values))
        weights = (torch.einsum("shd,thd->hst", q[lane], keys) * 32**-0.5).softmax(-1)
        exact.append(torch.einsum("hst,thd->shd", weights, values))
    assert relative(found, torch.stack(exact)) < 0.06


def test_nothing_that_can_be_observed_leaves_the_range():
    generator = torch.Generator().manual_seed(1)
    width, head_dim = 48, 16
    norm, weight = (1 + torch.randn(n, generator=generator) for n in (width, width))
    v_weight = torch.randn(32, width, generator=generator) * weight
    norms = torch.randn(2, head_dim, generator=generator) * 3
    multipliers = head_multipliers(*norms, v_weight, norm)
    # Rows along the worst direction of each output are as large as a normed row can be.
    worst = v_weight * norm
    rows = worst / worst.square().mean(dim=1, keepdim=True).sqrt()
    largest = ((rows * norm) @ v_weight.T).abs().amax()
    assert 300 < float(largest * multipliers[2]) <= 448 / 1.09
    heads = torch.zeros(2, head_dim)
    for index, one in enumerate(norms):
        heads[index, one.abs().argmax()] = 1.0
    spread = (heads / heads.square().mean(dim=1, keepdim=True).sqrt() * norms).abs().amax(dim=1)
    assert bool((spread * multipliers[:2] <= 448 / 1.09).all())
    assert bool((spread * multipliers[:2] > 300).all())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize(
    ("tokens", "first", "prefix"), [(1000, 0, (200, 10)), (1093, 340, (1, 129)), (512, 480, (256,))]
)
def test_at_the_size_of_a_policy(kernel, tokens, first, prefix):
    sizes = {"prefix": prefix, "tokens": tokens, "heads": 8, "kv_heads": 2, "width": 128}
    (q, k, v), norms, table, texts = inputs(dtype=torch.bfloat16, **sizes)
    own = heads_fp8(q, k, v, multipliers_of(norms), norms=norms, table=table)
    own = type(own)(own.q[:, first:], own.k, own.v, own.multipliers)
    text = text_of(texts, prefix)
    found = REGISTRY["attention_fp8"].load(kernel)(own, text, torch.bfloat16, config={})
    expected = REGISTRY["attention_fp8"].reference(own, text, torch.float32)
    assert relative(found, expected) < 4e-2
