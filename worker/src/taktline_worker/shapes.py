"""Shapes of checkpoint tensors by name: the pieces that families state their expected tensors with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Shapes = Mapping[str, tuple[int, ...]]


def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """A weight (rows, columns) and its bias."""
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """An affine norm's weight and bias."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def count_layers(shapes: Shapes, prefix: str) -> int:
    """Layers under `prefix`. Raises ValueError unless they are numbered from 0 without gaps."""
    indices = {int(name.removeprefix(prefix).split(".")[0]) for name in shapes if name.startswith(prefix)}
    if not indices or indices != set(range(len(indices))):
        raise ValueError(f"layers under {prefix!r} are not numbered from 0 without gaps")
    return len(indices)


def shown(names: Sequence[str]) -> str:
    """The first few of `names`, for messages."""
    if not names:
        return "nothing"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
