"""Fused operations that exist on a GPU only: each replaces several ops of `taktline_kernels.ops`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from taktline_kernels import ops
from taktline_kernels.fp8_rows import ByteWeight, Fp8Rows, byte_weight, pack_gate_up, quantise_weight
from taktline_kernels.guidance import Guidance
from taktline_kernels.ops.dispatch import one_kernel
from taktline_kernels.selector import REFERENCE, default_selector
from taktline_kernels.triton_impl import action_head as action_head_module
from taktline_kernels.triton_impl import activations, attention, byte_weights, fp8, norms, prefix_rows, rope

__all__ = [
    "CACHE_MARGIN",
    "ByteWeight",
    "Fp8Rows",
    "action_head",
    "assemble",
    "attention_cached",
    "attention_cached_fp8",
    "byte_weight",
    "geglu_fp8",
    "gelu_fp8",
    "layer_norm",
    "layer_norm_fp8",
    "linear",
    "linear_add_layer_norm",
    "linear_add_rms_norm",
    "linear_bytes",
    "linear_fp8",
    "linear_geglu",
    "linear_geglu_bytes",
    "linear_gelu",
    "linear_swiglu",
    "pack_gate_up",
    "quantise_rows",
    "quantise_weight",
    "relu2_fp8",
    "rms_norm_fp8",
    "rope_cache",
    "swiglu_fp8",
]

CACHE_MARGIN = 128
"""Rows of finite values that must follow the last cache row in memory: attention reads whole blocks."""


@one_kernel
def linear_fp8(x: Fp8Rows, weight: Fp8Rows, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: (..., k), k a multiple of 16.
        weight: (n, k), n a multiple of 16.
        bias: (n,) bf16 or None.

    Returns:
        (..., n) bf16. Products are summed with the tensor cores' own (reduced) precision, which loses far less than
        FP8 does.
    """
    flat = x.values.view(-1, x.values.shape[-1])
    out: Tensor = torch._scaled_mm(
        flat,
        weight.values.t(),
        x.scales,
        weight.scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.view(*x.values.shape[:-1], -1)


@one_kernel
def quantise_rows(x: Tensor) -> Fp8Rows:
    """(..., k) -> FP8 with a scale a row."""
    return Fp8Rows(*fp8.quantise_rows(x))


@one_kernel
def gelu_fp8(x: Tensor) -> Fp8Rows:
    """gelu(x), tanh form, (..., k) -> FP8 with a scale a row."""
    return Fp8Rows(*fp8.quantise_rows(x, fp8.GELU))


@one_kernel
def geglu_fp8(gate_up: Tensor) -> Fp8Rows:
    """gelu(gate) * up of (..., 2k), gates first -> (..., k) FP8 with a scale a row."""
    return Fp8Rows(*fp8.quantise_rows(gate_up, fp8.GEGLU))


@one_kernel
def swiglu_fp8(gate_up: Tensor) -> Fp8Rows:
    """silu(gate) * up of (..., 2k), gates first -> (..., k) FP8 with a scale a row."""
    return Fp8Rows(*fp8.quantise_rows(gate_up, fp8.SWIGLU))


@one_kernel
def relu2_fp8(x: Tensor) -> Fp8Rows:
    """relu(x) squared, (..., k) -> FP8 with a scale a row."""
    return Fp8Rows(*fp8.quantise_rows(x, fp8.RELU2))


@one_kernel
def rms_norm_fp8(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """x + y, and its RMSNorm with multiplier 1 + weight in FP8; y None adds nothing."""
    total, values, scales = norms.norm_fp8(x, y, weight, None, eps)
    return total, Fp8Rows(values, scales)


@one_kernel
def layer_norm_fp8(x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Fp8Rows]:
    """x + y, and its LayerNorm in FP8; y None adds nothing."""
    total, values, scales = norms.norm_fp8(x, y, weight, bias, eps)
    return total, Fp8Rows(values, scales)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias.

    Args:
        x: (..., k) bf16, contiguous.
        weight: (n, k) bf16, contiguous.
        bias: (n,) bf16 or None.

    Returns:
        (..., n) bf16.
    """
    rows = x.numel() // x.shape[-1]
    shape = {"m": rows, "n": weight.shape[0], "k": weight.shape[1], "bias": int(bias is not None)}
    choice = default_selector().choose("product", shape, x.dtype, x.device)
    if choice.kernel == "cublaslt":
        from taktline_kernels.cuda import cublaslt

        return cublaslt.linear(x, weight, bias, gelu=False, algorithm=choice.config.get("algorithm", 0))
    if choice.kernel == "hopper":
        from taktline_kernels.cuda import product

        return product.linear(x, weight, bias, "none", None, None, choice.config)
    return torch.nn.functional.linear(x, weight, bias)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A sub-layer's last product, the residual add behind it, and the RMSNorm of the sum.

    Where the table names no kernel for both, `linear` and the norm.

    Args:
        x: (..., k) bf16, contiguous.
        weight: (n, k) bf16, contiguous.
        residual: (..., n), the stream.
        norm_weight: (n,), the norm multiplies by 1 + this.
        eps: added to the mean square.

    Returns:
        (s, rms_norm(s)) with s = residual + x @ weight.T.
    """
    shape = {"m": x.numel() // x.shape[-1], "n": weight.shape[0], "k": weight.shape[1]}
    if default_selector().choose("linear_add_rms_norm", shape, x.dtype, x.device).kernel == REFERENCE:
        return ops.add_rms_norm(residual, linear(x, weight), norm_weight, eps)
    return ops.linear_add_rms_norm(x, weight, residual, norm_weight, eps)


def linear_add_layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """A sub-layer's last product, the residual add behind it, and the LayerNorm of the sum.

    Where the table names no kernel for both, `linear` and `layer_norm`.

    Args:
        x: (..., k) bf16, contiguous.
        weight: (n, k) bf16, contiguous.
        bias: (n,) bf16.
        residual: (..., n), the stream, in a dtype of its own.
        norm_weight: (n,) fp32.
        norm_bias: likewise.
        eps: added to the variance.

    Returns:
        s = residual + x @ weight.T + bias in the dtype of `residual`, and its LayerNorm in that of x.
    """
    shape = {"m": x.numel() // x.shape[-1], "n": weight.shape[0], "k": weight.shape[1]}
    choice = default_selector().choose("product_add_layer_norm", shape, x.dtype, x.device)
    if choice.kernel == "hopper":
        from taktline_kernels.cuda import product

        return product.linear_add_layer_norm(x, weight, bias, residual, norm_weight, norm_bias, eps, choice.config)
    return layer_norm(residual, linear(x, weight, bias), norm_weight, norm_bias, eps, x.dtype)


@one_kernel
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x @ weight.T + bias), tanh form, in the matrix product's epilogue.

    Args:
        x: (..., k) bf16.
        weight: (n, k) bf16.
        bias: (n,) bf16.

    Returns:
        (..., n) bf16; gelu acts on the fp32 accumulator.
    """
    flat = x.reshape(-1, x.shape[-1])
    out: Tensor = torch._addmm_activation(bias, flat, weight.t(), use_gelu=True)
    return out.view(*x.shape[:-1], -1)


def linear_geglu(x: Tensor, packed: Tensor) -> Tensor:
    """gelu(x @ gate.T) * (x @ up.T).

    Args:
        x: (..., k) bf16.
        packed: (2n, k) bf16 from `pack_gate_up`.

    Returns:
        (..., n) bf16.
    """
    return _linear_gated("linear_geglu", x, packed, silu=False)


def linear_swiglu(x: Tensor, packed: Tensor) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T); see `linear_geglu`."""
    return _linear_gated("linear_swiglu", x, packed, silu=True)


def _linear_gated(op: str, x: Tensor, packed: Tensor, *, silu: bool) -> Tensor:
    shape = {"m": x.numel() // x.shape[-1], "n": packed.shape[0] // 2, "k": x.shape[-1]}
    choice = default_selector().choose(op, shape, x.dtype, x.device)
    if choice.kernel == "hopper":
        from taktline_kernels.cuda.geglu import linear_geglu as hopper

        return hopper(x, packed, tile=choice.config.get("tile"), span=choice.config.get("span", 12), silu=silu)
    both = torch.nn.functional.linear(x, packed)
    return activations.swiglu(both, {}, paired=True) if silu else activations.geglu(both, {}, paired=True)


def linear_bytes(x: Tensor, weight: ByteWeight) -> Tensor:
    """x @ weight.T, for few rows.

    Args:
        x: (..., k) bf16.
        weight: (n, k).

    Returns:
        (..., n) bf16; products are summed in fp32 and scaled then.
    """
    return byte_weights.linear(x, weight, _byte_config(x, weight, gated=False))


def linear_geglu_bytes(x: Tensor, gate_up: ByteWeight) -> Tensor:
    """gelu(x @ gate.T) * (x @ up.T), tanh form, for few rows.

    Args:
        x: (..., k) bf16.
        gate_up: (2n, k), the gates first, then the ups.

    Returns:
        (..., n) bf16.
    """
    return byte_weights.linear(x, gate_up, _byte_config(x, gate_up, gated=True), gated=True)


def _byte_config(x: Tensor, weight: ByteWeight, *, gated: bool) -> Mapping[str, int]:
    n, k = weight.values.shape
    shape = {
        "m": x.numel() // x.shape[-1],
        "n": n,
        "k": k,
        "gated": int(gated),
        "integers": int(weight.values.dtype == torch.int8),
    }
    return default_selector().choose("byte_product", shape, x.dtype, x.device).config


def layer_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + y in the dtype of x, and its LayerNorm in `dtype`; y None adds nothing."""
    shape = {"rows": x.numel() // x.shape[-1], "width": x.shape[-1]}
    warps = default_selector().choose("stream_layer_norm", shape, dtype, x.device).config.get("num_warps", 4)
    return norms.layer_norm_of_stream(x, y, weight, bias, eps, dtype, warps)


rope_cache = one_kernel(rope.rope_cache)
assemble = one_kernel(prefix_rows.assemble)


def attention_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, extra: int, *, first_alone: bool = False
) -> Tensor:
    """Attend over the first lengths + extra cache rows; settings from the GPU's table.

    Args:
        q: (batch, tokens, heads, head_dim), tokens at any stride.
        k_cache: (batch, rows, head_dim), followed by `CACHE_MARGIN` readable finite rows.
        v_cache: likewise.
        lengths: (batch,) int32.
        extra: rows appended behind each row's length.
        first_alone: the first token sees none of the appended rows but its own, the first of them.

    Returns:
        (batch, tokens, heads, head_dim).
    """
    hopper, config = _attention_choice(q, k_cache, v_cache)
    if hopper:
        from taktline_kernels.cuda import cached_attention as own

        return own.attention_cached(q, k_cache, v_cache, lengths, extra, config=config, first_alone=first_alone)
    return attention.attention_cached(
        q, k_cache, v_cache, lengths, extra, config=config, bounded=False, first_alone=first_alone
    )


def attention_cached_fp8(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, extra: int) -> Fp8Rows:
    """`attention_cached`, with all heads of a token as one FP8 row: (batch, tokens, heads * head_dim)."""
    hopper, config = _attention_choice(q, k_cache, v_cache)
    if config.get("split" if hopper else "splits", 1) > 1 or (not hopper and config.get("block_m", 64) % q.shape[2]):
        return quantise_rows(attention_cached(q, k_cache, v_cache, lengths, extra).flatten(2))
    scales = torch.empty((q.shape[0] * q.shape[1], 1), dtype=torch.float32, device=q.device)
    if hopper:
        from taktline_kernels.cuda import cached_attention

        attended = cached_attention.attention_cached(q, k_cache, v_cache, lengths, extra, config=config, scales=scales)
    else:
        attended = attention.attention_cached(
            q, k_cache, v_cache, lengths, extra, config=config, bounded=False, scales=scales
        )
    return Fp8Rows(attended.flatten(2), scales)


def _attention_choice(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[bool, Mapping[str, int]]:
    """Whether the kernel for Hopper runs, and the settings of the one that does."""
    choice = default_selector().choose("attention_cached", attention_shape(q, k_cache, v_cache), q.dtype, q.device)
    return choice.kernel == "hopper", choice.config


def attention_shape(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> dict[str, int]:
    """What the selector is told of a call: dense are queries at one stride a token, and caches without gaps."""
    batch, tokens, heads, head_dim = q.shape
    even = q.stride()[2:] == (head_dim, 1) and (batch == 1 or q.stride(0) == tokens * q.stride(1))
    dense = int(even and k_cache.is_contiguous() and v_cache.is_contiguous())
    sizes = (batch, tokens * heads, k_cache.shape[1], heads, head_dim, dense)
    return dict(zip(("batch", "rows", "cache", "heads", "head_dim", "dense"), sizes, strict=True))


@one_kernel
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
    """Finish one solver step and begin the next; see `triton_impl.action_head`.

    Args:
        actions: (rows, action_dim) fp32, changed in place.
        next_hidden: (rows, width), written unless `last`.
        projections: action_in_proj weight and bias, action_out_proj weight and bias, fp32.
        hidden: (batch, before + tokens, width), or None before the first step.
        update: likewise, added to `hidden` with `gate`.
        final: scale and shift of the final norm.
        gate: (width,) fp32.
        dt: solver step.
        last: no step follows.
        before: tokens of `hidden` before a row's action tokens.
        silu: apply silu to action_in_proj's output.
        guidance: correction of the velocity, or None.
    """
    action_head_module.action_head(
        actions,
        next_hidden,
        *projections,
        hidden=hidden,
        update=update,
        modulation=final,
        gate=gate,
        dt=dt,
        last=last,
        before=before,
        silu=silu,
        guidance=guidance,
    )
