"""What each function of `taktline_kernels.gpu` computes, in plain PyTorch on any device and in any float dtype.

Same names, arguments and results. Tests hold the kernels to it, and the composition of a policy's fused computation can
be run with it where there is no GPU. FP8 is real: values are rounded to e4m3, and products of them are exact up to fp32
sums.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels import ops
from taktline_kernels.fp8_rows import LARGEST, ByteWeight, Fp8Rows
from taktline_kernels.fp8_rows import byte_weight as byte_weight
from taktline_kernels.fp8_rows import pack_gate_up as pack_gate_up
from taktline_kernels.fp8_rows import quantise_weight as quantise_weight
from taktline_kernels.guidance import Guidance
from taktline_kernels.ops.dispatch import REGISTRY


def quantise_rows(x: Tensor) -> Fp8Rows:
    """See `gpu.quantise_rows`."""
    flat = x.float().reshape(-1, x.shape[-1])
    scales = flat.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / LARGEST
    return Fp8Rows((flat / scales).to(torch.float8_e4m3fn).view(x.shape), scales)


def linear_fp8(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """See `gpu.linear_fp8`."""
    flat = x.values.view(-1, x.values.shape[-1]).float()
    out = (flat @ weight.values.float().T) * x.scales * weight.scales.T
    if bias is not None:
        out = out + bias.float()
    return out.bfloat16().view(*x.values.shape[:-1], -1)


def gelu_fp8(x: Tensor) -> Fp8Rows:
    """See `gpu.gelu_fp8`."""
    return quantise_rows(functional.gelu(x.float(), approximate="tanh"))


def geglu_fp8(gate_up: Tensor) -> Fp8Rows:
    """See `gpu.geglu_fp8`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return quantise_rows(functional.gelu(gate, approximate="tanh") * up)


def swiglu_fp8(gate_up: Tensor) -> Fp8Rows:
    """See `gpu.swiglu_fp8`."""
    return quantise_rows(REGISTRY["swiglu"].reference(gate_up.float()))


def relu2_fp8(x: Tensor) -> Fp8Rows:
    """See `gpu.relu2_fp8`."""
    return quantise_rows(functional.relu(x.float()).square())


def rms_norm_fp8(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """See `gpu.rms_norm_fp8`."""
    total = x if y is None else x + y
    return total, quantise_rows(REGISTRY["rms_norm"].reference(total.float(), weight, eps))


def layer_norm_fp8(x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """See `gpu.layer_norm_fp8`."""
    total = x if y is None else (x + y).to(x.dtype)
    return total, quantise_rows(REGISTRY["layer_norm"].reference(total.float(), weight, bias, eps))


def layer_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `gpu.layer_norm`."""
    total = x if y is None else (x + y).to(x.dtype)
    normed: Tensor = REGISTRY["layer_norm"].reference(total.float(), weight, bias, eps)
    return total, normed.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `gpu.linear`."""
    return functional.linear(x, weight, bias)


def linear_add_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `gpu.linear_add_layer_norm`."""
    return layer_norm(residual, linear(x, weight, bias), norm_weight, norm_bias, eps, x.dtype)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See `gpu.linear_add_rms_norm`."""
    return ops.add_rms_norm(residual, linear(x, weight), norm_weight, eps)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """See `gpu.linear_gelu`."""
    out = functional.linear(x.float(), weight.float(), bias.float())
    return functional.gelu(out, approximate="tanh").to(x.dtype)


def linear_geglu(x: Tensor, packed: Tensor) -> Tensor:
    """See `gpu.linear_geglu`."""
    gate, up = _gate_and_up(x, packed)
    return (functional.gelu(gate, approximate="tanh") * up).flatten(-2).to(x.dtype)


def linear_swiglu(x: Tensor, packed: Tensor) -> Tensor:
    """See `gpu.linear_swiglu`."""
    gate, up = _gate_and_up(x, packed)
    return (functional.silu(gate) * up).flatten(-2).to(x.dtype)


def _gate_and_up(x: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Both products (..., blocks, 8) fp32; eight rows of a gate and of an up alternate in `packed`."""
    pairs = functional.linear(x.float(), packed.float()).view(*x.shape[:-1], -1, 2, 8)
    return pairs[..., 0, :], pairs[..., 1, :]


def linear_bytes(x: Tensor, weight: ByteWeight) -> Tensor:
    """See `gpu.linear_bytes`."""
    return _byte_product(x, weight).to(x.dtype)


def linear_geglu_bytes(x: Tensor, gate_up: ByteWeight) -> Tensor:
    """See `gpu.linear_geglu_bytes`."""
    gate, up = _byte_product(x, gate_up).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def _byte_product(x: Tensor, weight: ByteWeight) -> Tensor:
    return functional.linear(x.float(), weight.values.float()) * weight.scales


def assemble(images: Tensor, embedding: Tensor, tokens: Tensor, source: Tensor) -> Tensor:
    """See `gpu.assemble`."""
    width = embedding.shape[1]
    text = (functional.embedding(tokens, embedding).float() * width**0.5).to(embedding.dtype)
    pool = torch.cat((images.to(embedding.dtype), text.view(-1, width)))
    return pool.index_select(0, source.reshape(-1)).view(*source.shape, width)


def rope_cache(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    *,
    heads: int,
    suffix: bool,
) -> None:
    """See `gpu.rope_cache`."""
    batch, tokens, width = qkv.shape
    head_dim = width // (heads + 2)
    parts = qkv.view(batch, tokens, heads + 2, head_dim)
    start = lengths.long() if suffix else torch.zeros_like(lengths, dtype=torch.long)
    position = start[:, None] + torch.arange(tokens, device=qkv.device)
    turned = REGISTRY["rope"].reference(parts[:, :, : heads + 1], cos[position], sin[position])
    parts[:, :, :heads] = turned[:, :, :heads]
    row = torch.arange(batch, device=qkv.device)[:, None]
    k_cache[row, position], v_cache[row, position] = turned[:, :, heads], parts[:, :, heads + 1]


def attention_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, extra: int, *, first_alone: bool = False
) -> Tensor:
    """See `gpu.attention_cached`."""
    keys, values = k_cache[:, :, None], v_cache[:, :, None]
    attend = REGISTRY["attention_prefix"].reference
    out: Tensor = attend(q, keys, values, lengths + extra)
    if first_alone:
        out = torch.cat((attend(q[:, :1], keys, values, lengths + 1), out[:, 1:]), dim=1)
    return out


def attention_cached_fp8(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, extra: int) -> Fp8Rows:
    """See `gpu.attention_cached_fp8`."""
    return quantise_rows(attention_cached(q, k_cache, v_cache, lengths, extra).flatten(2))


def action_head(
    actions: Tensor,
    next_hidden: Tensor,
    projections: tuple[Tensor, Tensor, Tensor, Tensor],
    hidden: Tensor | None,
    update: Tensor | None,
    final: tuple[Tensor, Tensor] | None,
    gate: Tensor | None,
    *,
    dt: float,
    last: bool,
    before: int = 0,
    silu: bool = False,
    guidance: Guidance | None = None,
) -> None:
    """See `gpu.action_head`."""
    in_weight, in_bias, out_weight, out_bias = projections
    if hidden is not None and update is not None and final is not None and gate is not None:
        norm = REGISTRY["gated_add_ada_rms_norm"].reference
        _, normed = norm(hidden[:, before:], update[:, before:], gate, *final, 1e-6)
        velocity = functional.linear(normed.float().flatten(0, 1), out_weight, out_bias)
        if guidance is not None:
            velocity = guidance.apply(actions, velocity)
        actions += dt * velocity
    if not last:
        embedded = functional.linear(actions, in_weight, in_bias)
        next_hidden.copy_(functional.silu(embedded) if silu else embedded)
