"""Rows gathered from two tables, in another order, or several into one, with what their first reader wants of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops import norms
from taktline_kernels.ops.dispatch import register

_TRITON = "taktline_kernels.triton_impl.gather"


def _embed_reference(
    tokens: Tensor, table: Tensor, places: Tensor, others: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    own = functional.embedding(tokens, table)
    x = (
        own
        if not len(others)
        else torch.where((places >= 0)[..., None], others[places.clamp_min(0)].to(own.dtype), own)
    )
    return x.float(), norms.rms_norm(x, weight, eps)


def _reorder_reference(x: Tensor, order: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return functional.pad(x[:, order].to(dtype), (0, width - x.shape[-1]))


def _mean_reference(x: Tensor, count: int) -> Tensor:
    return x.reshape(len(x), -1, count, x.shape[-1]).mean(dim=2)


_EMBED = register("embed_rms_norm", _embed_reference, {"triton": f"{_TRITON}:embed_rms_norm"})
_REORDER = register("reorder_rows", _reorder_reference, {"triton": f"{_TRITON}:reorder_rows"})
_MEAN = register("mean_rows", _mean_reference, {"triton": f"{_TRITON}:mean_rows"})


def embed_rms_norm(
    tokens: Tensor, table: Tensor, places: Tensor, others: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The first tokens of a text with images in it, and Gemma's RMSNorm of them.

    Args:
        tokens: int64 (B, S).
        table: (vocabulary, width), an embedding.
        places: int64 (B, S): which row of `others` stands there instead, or -1.
        others: (count, width).
        weight: (width,), the norm multiplies by 1 + this.
        eps: added to the mean square.

    Returns:
        the rows (B, S, width) in fp32, and their norm in the dtype of the table.
    """
    shape = {"rows": tokens.numel(), "width": table.shape[1]}
    result: tuple[Tensor, Tensor] = _EMBED.run(shape, table, tokens, table, places, others, weight, eps)
    return result


def reorder_rows(x: Tensor, order: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of each matrix in another order and dtype, with zeros behind them.

    Args:
        x: (N, P, values).
        order: int64 (P,), which row comes where; a parameter.
        width: of the result, at least the values.
        dtype: of the result.

    Returns:
        (N, P, width).
    """
    shape = {"rows": x.shape[0] * x.shape[1], "width": width}
    result: Tensor = _REORDER.run(shape, x, x, order, width, dtype)
    return result


def mean_rows(x: Tensor, count: int) -> Tensor:
    """(N, P, width) -> (N, P / count, width): the mean of each `count` neighbours, in the dtype of x."""
    shape = {"rows": x.shape[0] * x.shape[1] // count, "width": x.shape[2], "count": count}
    result: Tensor = _MEAN.run(shape, x, x, count)
    return result
