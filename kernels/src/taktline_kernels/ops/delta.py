"""What a stack of gated delta nets and gated attention adds to a transformer: convolution and split, delta rule, gates.

Shapes: B rows of S tokens, H heads of width d. States, and gates once made, are fp32 whatever the dtype of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import register
from taktline_kernels.ops.linear import linear

_TRITON = "taktline_kernels.triton_impl.delta"
_GATES = "taktline_kernels.triton_impl.gates"
_CHUNK = 64
_NORM_EPS = 1e-6
"""Of the L2 norms of queries and keys, added to the sum of squares."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rms_norm_silu_gate_reference(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    wide = _wide(x)
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * _wide(weight)
    return (normed * functional.silu(_wide(gate))).to(x.dtype)


def _sigmoid_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    return (_wide(x) * torch.sigmoid(_wide(gate))).to(x.dtype)


def _conv_silu_split_reference(x: Tensor, weight: Tensor, widths: tuple[int, int, int]) -> tuple[Tensor, ...]:
    taps = weight.shape[1]
    padded = functional.pad(_wide(x).transpose(1, 2), (taps - 1, 0))
    mixed = functional.conv1d(padded, _wide(weight)[:, None], groups=weight.shape[0])
    parts = torch.split(functional.silu(mixed).transpose(1, 2).to(x.dtype), list(widths), dim=-1)
    return tuple(part.contiguous() for part in parts)


def _linear_conv_split_reference(
    x: Tensor, weight: Tensor, taps: Tensor, widths: tuple[int, int, int]
) -> tuple[Tensor, ...]:
    mixed, rest = torch.split(linear(x, weight), [sum(widths), len(weight) - sum(widths)], dim=-1)
    return *conv_silu_split(mixed, taps, widths), rest


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _NORM_EPS)


def _gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor
) -> Tensor:
    """Chunk by chunk: the corrections of a chunk solve one unit triangular system, the state is read and written once.

    With G the running sum of log decays inside a chunk, A = tril(beta_i k_i k_j exp(G_i - G_j), -1) and S the state
    before it, the corrections are D = (I + A)^-1 beta (v - exp(G) k S).
    """
    dtype, tokens, pad = q.dtype, q.shape[1], -q.shape[1] % _CHUNK
    decay, beta = rate * functional.softplus(_wide(a) + dt_bias), torch.sigmoid(_wide(b))
    q, k, v = (functional.pad(_wide(x).transpose(1, 2), (0, 0, 0, pad)) for x in (q, k, v))
    decay, beta = (functional.pad(_wide(x).transpose(1, 2), (0, pad)) for x in (decay, beta))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).triu(1)
    found = []
    for start in range(0, q.shape[2], _CHUNK):
        part = slice(start, start + _CHUNK)
        qs, ks, vs, bs = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part, None]
        total = decay[:, :, part].cumsum(dim=-1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
        system = bs * (ks @ ks.transpose(-1, -2)) * between
        wanted = bs * (vs - total.exp()[..., None] * (ks @ state))
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        seen = total.exp()[..., None] * (qs @ state)
        found.append(seen + ((qs @ ks.transpose(-1, -2)) * between) @ change)
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1].exp()[..., None, None] + (left * ks).transpose(-1, -2) @ change
    return torch.cat(found, dim=2)[:, :, :tokens].transpose(1, 2).to(dtype)


_GATE = register("rms_norm_silu_gate", _rms_norm_silu_gate_reference, {"triton": f"{_GATES}:rms_norm_silu_gate"})
_SIGMOID = register("sigmoid_gate", _sigmoid_gate_reference, {"triton": f"{_GATES}:sigmoid_gate"})
_CONV = register("conv_silu_split", _conv_silu_split_reference, {"triton": f"{_TRITON}:conv_silu_split"})
_PROJECTED = register(
    "linear_conv_split",
    _linear_conv_split_reference,
    {"hopper": "taktline_kernels.cuda.product:linear_conv_split"},
)
_RULE = register("gated_delta_rule", _gated_delta_rule_reference, {"triton": f"{_TRITON}:gated_delta_rule"})


def rms_norm_silu_gate(x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm over the last dimension, times the weight, times silu(gate); rounded once.

    Args:
        x: (..., width), fp32 or bf16.
        weight: (width,), the multiplier itself (no 1 is added).
        gate: shaped like x; its tokens may lie further apart.
        eps: added to the mean square.

    Returns:
        (..., width) in the dtype of x.
    """
    shape = {"rows": x.numel() // x.shape[-1], "width": x.shape[-1]}
    result: Tensor = _GATE.run(shape, x, x, weight, gate, eps)
    return result


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in fp32, rounded once.

    Args:
        x: (..., width), fp32 or bf16.
        gate: shaped like x; its rows may lie further apart.

    Returns:
        (..., width) in the dtype of x.
    """
    shape = {"rows": x.numel() // x.shape[-1], "width": x.shape[-1]}
    result: Tensor = _SIGMOID.run(shape, x, x, gate)
    return result


def conv_silu_split(x: Tensor, weight: Tensor, widths: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Depthwise causal convolution over the tokens, SiLU, and the split of the channels; rounded once.

    Args:
        x: (B, S, channels), fp32 or bf16; before the first token there are zeros.
        weight: (channels, taps); the last tap is the token's own.
        widths: channels of the three parts.

    Returns:
        three contiguous (B, S, width) in the dtype of x.
    """
    shape = {"tokens": x.shape[0] * x.shape[1], "channels": x.shape[2]}
    result: tuple[Tensor, Tensor, Tensor] = _CONV.run(shape, x, x, weight, widths)
    return result


def linear_conv_split(
    x: Tensor, weight: Tensor, taps: Tensor, widths: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A delta net's first product, with `conv_silu_split` on its first channels.

    Args:
        x: (B, S, k).
        weight: (n, k), the dtype of x, a parameter.
        taps: (sum of widths, taps) of the convolution, likewise.
        widths: of the three parts, n at most together.

    Returns:
        three contiguous (B, S, width) in the dtype of x, and the other channels (B, S, n - sum of widths), whose tokens
        may lie further apart. What is between product and convolution is rounded to the dtype of x. Where no rule names
        a kernel for both, each runs as its own op.
    """
    shape = {"rows": x.shape[0], "tokens": x.shape[1], "n": weight.shape[0], "k": weight.shape[1]}
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _PROJECTED.run(shape, x, x, weight, taps, widths)
    return result


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> Tensor:
    """The gated delta rule from an empty state: S <- exp(decay) S; S <- S + k (beta (v - k S)); o = q S / sqrt(d).

    Queries and keys are L2-normalised here, and gates are made here in fp32: decay = rate * softplus(a + dt_bias),
    beta = sigmoid(b). A token sees itself and earlier ones only.

    Args:
        q: (B, S, H, d), fp32 or bf16.
        k: (B, S, H, d).
        v: (B, S, H, e).
        a: (B, S, H) in the dtype of q or fp32, any strides.
        b: likewise.
        rate: fp32 (H,), at most 0.
        dt_bias: fp32 (H,).

    Returns:
        (B, S, H, e) in the dtype of q, rounded once.
    """
    shape = {"tokens": q.shape[1], "rows": q.shape[0], "heads": q.shape[2], "width": q.shape[3]}
    result: Tensor = _RULE.run(shape, q, q, k, v, a, b, rate, dt_bias)
    return result
