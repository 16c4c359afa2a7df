"""Operations that exist on a GPU only (`taktline_kernels.gpu`): their kernels, what each can take, and the defaults.

All that the selector knows of them beside a table's rules; nothing else decides which of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

GPU_KERNELS: dict[str, tuple[str, ...]] = {
    "action_head": ("triton",),
    "assemble": ("triton",),
    "attention_cached": ("hopper", "triton"),
    "byte_product": ("triton",),
    "geglu_fp8": ("triton",),
    "gelu_fp8": ("triton",),
    "layer_norm_fp8": ("triton",),
    "linear_fp8": ("cublaslt",),
    "linear_geglu": ("hopper", "cublas"),
    "linear_gelu": ("cublaslt",),
    "linear_swiglu": ("hopper", "cublas"),
    "patches": ("triton",),
    "product": ("cublaslt", "hopper", "cublas"),
    "product_add_layer_norm": ("hopper", "separate"),
    "quantise_rows": ("triton",),
    "relu2_fp8": ("triton",),
    "rms_norm_fp8": ("triton",),
    "rope_cache": ("triton",),
    "stream_layer_norm": ("triton",),
    "swiglu_fp8": ("triton",),
}
"""Operation -> its kernels; the last one runs where no rule says anything, on any GPU that Triton compiles for."""

_ROOM_FOR_WIDE_BLOCKS = 128 << 10
_BF16 = torch.bfloat16
_LIMITS: dict[tuple[str, str], Callable[[Mapping[str, int], torch.dtype], bool]] = {
    # Eight heads of 256; tokens at one stride, and caches without gaps.
    ("attention_cached", "hopper"): lambda shape, dtype: (
        dtype == _BF16 and (shape["heads"], shape["head_dim"], shape["dense"]) == (8, 256, 1)
    ),
    # Whole tiles of depth and of outputs.
    ("linear_geglu", "hopper"): lambda shape, dtype: dtype == _BF16 and not (shape["k"] % 64 or shape["n"] % 128),
    ("linear_swiglu", "hopper"): lambda shape, dtype: dtype == _BF16 and not (shape["k"] % 64 or shape["n"] % 128),
    ("product", "hopper"): lambda shape, dtype: dtype == _BF16 and not (shape["k"] % 8 or shape["n"] % 8),
    ("product", "cublaslt"): lambda shape, dtype: dtype == _BF16,
    ("product_add_layer_norm", "hopper"): lambda shape, dtype: (
        dtype == _BF16 and not (shape["k"] % 8 or shape["n"] % 8)
    ),
}


def takes(op: str, kernel: str, shape: Mapping[str, int], dtype: torch.dtype) -> bool:
    """Whether a kernel of an operation that exists on a GPU only is written for such a call."""
    limit = _LIMITS.get((op, kernel))
    return limit is None or limit(shape, dtype)


def default_settings(op: str, shared_bytes: Callable[[], int]) -> dict[str, int]:
    """Settings of an operation's last kernel where no rule says any.

    Args:
        op: a key of `GPU_KERNELS`.
        shared_bytes: tells the shared memory that a block may have; asked only where it matters.
    """
    # The kernel's own blocks take 104 KB; a block of an A40, an L40S or an RTX card has 99.
    small = op == "attention_cached" and shared_bytes() < _ROOM_FOR_WIDE_BLOCKS
    return {"block_n": 32} if small else {}
