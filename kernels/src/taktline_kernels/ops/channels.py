"""The norm of image networks: each cell's vector of channels at a fixed length, with what follows it."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import register

_EPS = 1e-12
"""The floor of a vector's length."""


def _channel_norm_reference(x: Tensor, gamma: Tensor, silu: bool) -> Tensor:
    wide = x if x.element_size() == 8 else x.float()
    scaled = functional.normalize(wide, dim=-3, eps=_EPS).to(x.dtype)
    normed = scaled * math.sqrt(x.shape[-3]) * gamma[:, None, None]
    return functional.silu(normed) if silu else normed


_CHANNEL_NORM = register(
    "channel_norm", _channel_norm_reference, {"triton": "taktline_kernels.triton_impl.channels:channel_norm"}
)


def channel_norm(x: Tensor, gamma: Tensor, *, silu: bool = False) -> Tensor:
    """x / |x| * sqrt(channels) * gamma over the channels, then maybe silu; the length in fp32 at least.

    Args:
        x: (..., channels, height, width); fastest where the channels of a cell lie side by side in memory.
        gamma: (channels,) in the dtype of x.
        silu: apply it to the result.

    Returns:
        The same shape and dtype; accelerated versions leave the channels of a cell side by side.
    """
    shape = {"rows": x.numel() // x.shape[-3], "channels": x.shape[-3]}
    result: Tensor = _CHANNEL_NORM.run(shape, x, x, gamma, silu)
    return result
