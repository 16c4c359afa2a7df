"""Rows written to some places of a matrix, or added to what stands there."""

from __future__ import annotations

from torch import Tensor

from taktline_kernels.ops.dispatch import register


def _place_reference(target: Tensor, places: Tensor, rows: Tensor, add: bool) -> None:
    flat = target.view(-1, target.shape[-1])
    (flat.index_add_ if add else flat.index_copy_)(0, places, rows.to(target.dtype))


_PLACE = register("place_rows", _place_reference, {"triton": "taktline_kernels.triton_impl.placing:place_rows"})


def place_rows(target: Tensor, places: Tensor, rows: Tensor, *, add: bool = False) -> None:
    """target[places[i]] = rows[i], or += with `add`, in place.

    Args:
        target: (..., width), contiguous; places count its rows.
        places: int64 (n,), each at most once.
        rows: (n, width), rounded to the dtype of the target, and so is a sum.
        add: add to what stands there.
    """
    shape = {"rows": rows.shape[0], "width": rows.shape[1], "add": int(add)}
    _PLACE.run(shape, target, target, places, rows, add)
