"""CUDA C++ kernels against the torch references, on a GPU; their host-side layouts everywhere."""

from __future__ import annotations

import pytest
import torch
from taktline_kernels import ops
from taktline_kernels.ops.dispatch import REGISTRY
from torch.nn import functional

expert = pytest.importorskip("taktline_kernels.cuda.expert")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_weight_image_is_what_the_kernel_multiplies() -> None:
    """Walks the image as the kernel's descriptors and fragments do, and gets the plain product."""
    n, k, columns, depth = 64, 1024, 32, 512
    generator = torch.Generator().manual_seed(0)
    weight, a = torch.randn(n, k, generator=generator), torch.randn(3, k, generator=generator)
    image = expert.weight_image(weight, columns, depth).view(n // columns, k // depth, depth // 64, columns, 8, 8)
    out = torch.zeros(3, n)
    logical = torch.arange(32)
    step, c = logical // 16, logical % 16
    actual = (c // 2 % 4) * 8 + step * 4 + (c // 8) * 2 + c % 2  # the column that a thread's fragment holds
    for tile in range(n // columns):
        for part in range(k // depth):
            for block in range(depth // 32):
                chunk, unit = block // 2, (block % 2) * 4 + logical // 8
                values = a[:, part * depth + block * 32 + actual]
                for row in range(columns):
                    w = image[tile, part, chunk, row, unit ^ (row % 8), logical % 8]
                    out[:, tile * columns + row] += values @ w
    assert relative(out, a @ weight.T) < 1e-6


def test_pairs_stand_in_one_group_of_sixteen() -> None:
    rows = torch.arange(2560)[:, None]
    paired = expert.pair_halves(rows)[:, 0].view(160, 2, 8)
    assert torch.equal(paired[:, 1], paired[:, 0] + 128)
    assert sorted(paired.flatten().tolist()) == list(range(2560))


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("tile", [None, 104, 200])
@pytest.mark.parametrize(("rows", "depth", "width"), [(300, 64, 128), (769, 2048, 1280), (1601, 1024, 4096)])
def test_linear_geglu(rows: int, depth: int, width: int, tile: int | None) -> None:
    from taktline_kernels import gpu
    from taktline_kernels.cuda.geglu import linear_geglu

    x = torch.randn(rows, depth, device="cuda").bfloat16()
    weight = (torch.randn(2 * width, depth, device="cuda") / depth**0.5).bfloat16()
    actual = linear_geglu(x, gpu.pack_gate_up(weight), tile=tile)
    assert relative(actual, REGISTRY["geglu"].reference(x.float() @ weight.float().T)) < 4e-3


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("tokens", "length", "max_keys"), [(50, 769, 819), (50, 968, 1018), (16, 5, 700), (64, 572, 636)]
)
def test_expert_chain_is_the_plain_expert(tokens: int, length: int, max_keys: int) -> None:
    from taktline_kernels import gpu

    torch.manual_seed(tokens + length)
    depth, steps = 2, 3

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()

    layers = [(matrix(2560, 1024), matrix(1024, 2048), matrix(8192, 1024), matrix(1024, 4096)) for _ in range(depth)]
    scale, shift, gate = (torch.randn(steps, 2 * depth + 1, 1024, device="cuda") * 0.3 for _ in range(3))
    heads = (torch.randn(1024, 32, device="cuda") / 6, torch.randn(1024, device="cuda") / 10)
    heads += (torch.randn(32, 1024, device="cuda") / 32, torch.randn(32, device="cuda") / 10)
    packed = [expert.ExpertLayer(q, o, gpu.pack_gate_up(g), d) for q, o, g, d in layers]
    chain = expert.ExpertChain(packed, scale, shift, gate, *heads, max_keys=max_keys)
    keys, values = (torch.randn(depth, max_keys, 256, device="cuda").bfloat16() for _ in range(2))
    before = keys.clone()
    cos, sin = ops.rope_table(torch.arange(max_keys, device="cuda"), 256)
    noise = torch.randn(tokens, 32, device="cuda")
    lengths = torch.tensor([length], dtype=torch.int32, device="cuda")

    expected = noise.clone()
    position = torch.arange(length, length + tokens, device="cuda")
    for step in range(steps):
        x = functional.linear(expected, heads[0], heads[1]).bfloat16()
        for i, (qkv, out, gate_up, down) in enumerate(layers):
            h = REGISTRY["ada_rms_norm"].reference(x, scale[step, 2 * i], shift[step, 2 * i], 1e-6)
            heads_of = (h @ qkv.T).view(1, tokens, 10, 256)
            turned = REGISTRY["rope"].reference(heads_of[:, :, :9], cos[position], sin[position])
            attended = REGISTRY["attention_suffix"].reference(
                turned[:, :, :8],
                before[i][None, :length, None],
                values[i][None, :length, None],
                lengths,
                turned[:, :, 8:],
                heads_of[:, :, 9:],
            )
            x = (x.float() + gate[step, 2 * i] * (attended.reshape(tokens, 2048) @ out.T).float()).bfloat16()
            h = REGISTRY["ada_rms_norm"].reference(x, scale[step, 2 * i + 1], shift[step, 2 * i + 1], 1e-6)
            update = REGISTRY["geglu"].reference(h @ gate_up.T) @ down.T
            x = (x.float() + gate[step, 2 * i + 1] * update.float()).bfloat16()
        h = REGISTRY["ada_rms_norm"].reference(x, scale[step, -1], shift[step, -1], 1e-6)
        expected = expected - (h.float() @ heads[2].T + heads[3]) / steps

    actions = noise.clone()
    chain.solve(actions, lengths, keys, values, cos, sin)
    assert relative(actions, expected) < 6e-3
    assert torch.equal(keys[:, :length], before[:, :length])
    again = noise.clone()
    chain.solve(again, lengths, keys, values, cos, sin)
    assert torch.equal(again, actions)
