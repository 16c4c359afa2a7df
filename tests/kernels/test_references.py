"""The torch references against independent plain math on the CPU, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from taktline_kernels import ops

GENERATOR = torch.Generator().manual_seed(20)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2e-6 if actual.dtype == torch.float32 else 1e-2
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, f"relative error {error:.3e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 72), (50, 1024)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x, y = rand(rows, width, dtype=dtype), rand(rows, width, dtype=dtype)
    weight, bias, gate = rand(width), rand(width), rand(width)
    wide = x.double()
    variance = wide.var(dim=-1, unbiased=False, keepdim=True)
    layer = (wide - wide.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt() * weight.double() + bias.double()
    close(ops.layer_norm(x, weight, bias), layer)
    root = (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    close(ops.rms_norm(x, weight), wide / root * (1 + weight.double()))
    close(ops.ada_rms_norm(x, weight, bias), wide / root * (1 + weight.double()) + bias.double())
    total, normed = ops.add_rms_norm(x, y, weight)
    close(total, wide + y.double())
    assert torch.equal(normed, ops.rms_norm(total, weight))
    total, normed = ops.add_layer_norm(x, y, weight, bias)
    close(total, wide + y.double())
    assert torch.equal(normed, ops.layer_norm(total, weight, bias))
    total, normed = ops.gated_add_ada_rms_norm(x, y, gate, weight, bias)
    close(total, wide + y.double() * gate.double())
    assert torch.equal(normed, ops.ada_rms_norm(total, weight, bias))


def test_layer_norm_epsilon_counts() -> None:
    x = torch.full((1, 4), 1e-3) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    expected = 1e-3 / math.sqrt(1e-6 + 1e-6)
    assert ops.layer_norm(x, torch.ones(4), torch.zeros(4))[0, 0].item() == pytest.approx(expected, rel=1e-5)


def test_geglu_uses_the_tanh_form() -> None:
    gate, up = rand(5, 16), rand(5, 16)
    wide = gate.double()
    gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    close(ops.geglu(torch.cat((gate, up), dim=-1)), gelu * up.double())


def test_rope_rotates_pairs_by_their_angle() -> None:
    positions = torch.tensor([[0, 1, 900]])
    x = rand(1, 3, 2, 8)
    out = ops.rope(x, *ops.rope_table(positions, 8))
    for token, position in enumerate(positions[0].tolist()):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            for head in range(2):
                a, b = x[0, token, head, pair].double(), x[0, token, head, pair + 4].double()
                turned = (a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle))
                assert out[0, token, head, pair].item() == pytest.approx(turned[0].item(), abs=2e-4)
                assert out[0, token, head, pair + 4].item() == pytest.approx(turned[1].item(), abs=2e-4)


def test_linear_order_of_epilogues() -> None:
    x, weight, bias, gate, residual = rand(3, 8), rand(4, 8), rand(4), rand(4), rand(3, 4)
    expected = residual + gate * torch.nn.functional.gelu(x @ weight.T + bias, approximate="tanh")
    close(ops.linear(x, weight, bias, activation="gelu", gate=gate, residual=residual), expected)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One head at a time, float64: q (s, d), k and v (t, d)."""
    logits = q.double() @ k.double().T / math.sqrt(q.shape[-1])
    weights = (logits - logits.max(-1, keepdim=True).values).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v.double()


def test_attention_vision() -> None:
    q, k, v = (rand(2, 9, 3, 8) for _ in range(3))
    out = ops.attention_vision(q, k, v)
    for image in range(2):
        for head in range(3):
            close(out[image, :, head], plain_attention(q[image, :, head], k[image, :, head], v[image, :, head]))


def test_attention_vision_through_pytorch_reads_slices_of_a_fused_projection() -> None:
    from taktline_kernels.cuda.sdpa import attention_vision

    q, k, v = rand(2, 9, 3, 3, 72).unbind(2)
    close(attention_vision(q, k, v, config={}), ops.attention_vision(q, k, v))


def test_attention_prefix_ignores_what_lies_past_the_length() -> None:
    q, k, v = rand(2, 11, 4, 8), rand(2, 11, 1, 8), rand(2, 11, 1, 8)
    lengths = torch.tensor([11, 6], dtype=torch.int32)
    out = ops.attention_prefix(q, k, v, lengths)
    for row, length in enumerate(lengths.tolist()):
        for head in range(4):
            close(
                out[row, :length, head], plain_attention(q[row, :length, head], k[row, :length, 0], v[row, :length, 0])
            )
    k[1, 6:], v[1, 6:] = 1e4, -1e4
    assert torch.equal(ops.attention_prefix(q, k, v, lengths)[1, :6], out[1, :6])


def test_attention_suffix_sees_valid_prefix_and_whole_suffix() -> None:
    q, prefix_k, prefix_v = rand(2, 5, 4, 8), rand(2, 7, 1, 8), rand(2, 7, 1, 8)
    suffix_k, suffix_v = rand(2, 5, 1, 8), rand(2, 5, 1, 8)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    out = ops.attention_suffix(q, prefix_k, prefix_v, lengths, suffix_k, suffix_v)
    for row, length in enumerate(lengths.tolist()):
        keys = torch.cat((prefix_k[row, :length, 0], suffix_k[row, :, 0]))
        values = torch.cat((prefix_v[row, :length, 0], suffix_v[row, :, 0]))
        for head in range(4):
            close(out[row, :, head], plain_attention(q[row, :, head], keys, values))


def test_euler_update() -> None:
    x, velocity = rand(2, 5, 32), rand(2, 5, 32)
    close(ops.euler_update(x, velocity, -0.1), x.double() - 0.1 * velocity.double())
