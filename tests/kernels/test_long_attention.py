"""Attention of a long suffix behind short prefixes of other lengths: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import importlib

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
# The interpreter multiplies bf16 matrices as the integers they are stored in.
DTYPES = [torch.float32, torch.bfloat16 if HAS_GPU else torch.float16]
long_attention = importlib.import_module("taktline_kernels.triton_impl.long_attention")
SMALL = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}


def inputs(dtype, *, prefix, suffix, heads, kv_heads, width, seed=0):
    """Queries, keys and values as they lie in the fused product's rows, and the prefix in a cache of its own."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(len(prefix), suffix, heads + 2 * kv_heads, width, generator=generator).to(DEVICE, dtype)
    shape = (2, len(prefix), max(prefix) + 5, kv_heads, width)
    keys, values = torch.randn(shape, generator=generator).to(DEVICE, dtype)
    for row, length in enumerate(prefix):  # finite, and nobody may read it
        keys[row, length:] = values[row, length:] = 50.0
    lengths = torch.tensor(prefix, dtype=torch.int32, device=DEVICE)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
    return q, keys, values, lengths, k, v


def relative(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prefix_is_merged_into_what_the_suffix_gave(dtype):
    q, keys, values, lengths, k, v = inputs(dtype, prefix=(3, 20), suffix=37, heads=4, kv_heads=2, width=32)
    q = q[:, 4:]
    wide = [t.float().repeat_interleave(2, dim=2) for t in (k, v)]
    logits = torch.einsum("bshd,bthd->bhst", q.float(), wide[0]) * 32**-0.5
    out = torch.einsum("bhst,bthd->bshd", logits.softmax(-1), wide[1]).to(dtype).contiguous()
    long_attention.merge_prefix(q, keys, values, lengths, out, logits.logsumexp(-1).contiguous(), SMALL)
    expected = REGISTRY["attention_suffix"].reference(q, keys, values, lengths, k, v)
    assert relative(out, expected) < (1e-5 if dtype == DTYPES[0] else 6e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("suffix", "first"), [(1000, 0), (1093, 340), (512, 480), (77, 45)])
@pytest.mark.parametrize(
    ("kernel", "config"), [("parts", {}), ("hopper", {}), *(("hopper", {"tile": tile}) for tile in (112, 144, 160))]
)
@pytest.mark.parametrize("heads", [8, 4, 2])
def test_at_the_size_of_a_policy(suffix, first, kernel, config, heads):
    q, *rest = inputs(torch.bfloat16, prefix=(200, 10), suffix=suffix, heads=heads, kv_heads=2, width=128)
    q = q[:, first:]
    run = REGISTRY["attention_suffix"].load(kernel)
    found = run(q, *rest, config=config)
    if kernel == "hopper":
        assert torch.equal(run(q, *rest, config=config), found)
    exact = REGISTRY["attention_suffix"].reference(
        q.float(), *(t if t.dtype == torch.int32 else t.float() for t in rest)
    )
    assert found.is_contiguous()
    assert relative(found, exact) < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
def test_where_a_block_gets_more_than_one_item():
    """The official request of Cosmos3-Nano has more tiles of queries and heads than the GPU has blocks."""
    q, *rest = inputs(torch.bfloat16, prefix=(200,), suffix=3093, heads=32, kv_heads=8, width=128)
    run = REGISTRY["attention_suffix"].load("hopper")
    found = run(q, *rest, config={"tile": 144})
    assert torch.equal(run(q, *rest, config={"tile": 144}), found)
    exact = REGISTRY["attention_suffix"].reference(
        q.float(), *(t if t.dtype == torch.int32 else t.float() for t in rest)
    )
    assert relative(found, exact) < 5e-3
