"""Normalisation of states and actions exactly as the checkpoint's own training code computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from taktline_worker.checkpoint import refuse

Mode = Literal["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"]
MODES: tuple[Mode, ...] = ("IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10")
_KEYS: dict[Mode, tuple[str, str]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
FloatArray = NDArray[np.floating[Any]]
_EDGES = np.linspace(-1.0, 1.0, 257)[:-1]
# A scale below this share of the offset is lost in a float32 number of that size.
_LOST = 16 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True, slots=True)
class Normaliser:
    """One feature's mapping between robot units and the model's units.

    Attributes:
        low: offset (mean, minimum or lower quantile), shape (D,).
        high: scale (standard deviation) or upper end (maximum, upper quantile), shape (D,).
        eps: LeRobot 1e-8, openpi 1e-6.
        always_add_eps: openpi adds eps to every denominator, forward and back; LeRobot adds it to a forward standard
            deviation only, and puts it in place of a range that is exactly zero.

    The dtype of `low` and `high` is the dtype of the arithmetic: float32 for LeRobot, float64 for openpi, whose results
    on nearly constant dimensions differ by far more than a rounding error.
    """

    mode: Mode
    low: FloatArray
    high: FloatArray
    eps: float
    always_add_eps: bool

    @property
    def width(self) -> int:
        """Number of dimensions D; 0 for IDENTITY, which fits any."""
        return int(self.low.shape[0])

    def forward(self, value: FloatArray) -> FloatArray:
        """Robot units (..., D) -> model units (..., D)."""
        if self.mode == "IDENTITY":
            return value
        low, high, x = self._operands(value)
        eps = low.dtype.type(self.eps)
        if self.mode == "MEAN_STD":
            return np.asarray((x - low) / (high + eps))
        if self.always_add_eps:
            return np.asarray((x - low) / (high - low + eps) * 2.0 - 1.0)
        return np.asarray(2.0 * (x - low) / self._span(low, high) - 1.0)

    def dividing(self, width: int) -> tuple[int, FloatArray]:
        """What `rows.c` takes for the first `width` numbers of `forward`: its rule and what it divides by (width,).

        Raises:
            ValueError: it has no rule for this.
        """
        low, high = self.low[:width], self.high[:width]
        if low.shape != (width,) or not low.dtype == high.dtype == (np.float64 if self.always_add_eps else low.dtype):
            raise ValueError(f"{self.mode} of {low.dtype} and {high.dtype} for {low.shape} of {width}")
        eps = low.dtype.type(self.eps)
        if self.mode == "MEAN_STD":
            return 0, high + eps
        return (1, high - low + eps) if self.always_add_eps else (2, self._span(low, high))

    def inverse(self, value: FloatArray) -> FloatArray:
        """Model units (..., D) -> robot units (..., D)."""
        if self.mode == "IDENTITY":
            return value
        x = value if self.always_add_eps else value.astype(self.low.dtype, copy=False)
        rule, scale, offset = self.restoring(value.shape[-1])
        return np.asarray(restore(rule, x, scale, offset))

    def restoring(self, width: int) -> tuple[str, FloatArray, FloatArray]:
        """What `restore` takes for the first `width` numbers: its rule, scale and offset (width,). Not of IDENTITY."""
        low, high = self.low[:width], self.high[:width]
        eps = low.dtype.type(self.eps)
        if self.mode == "MEAN_STD":
            return "scaled", (high + eps if self.always_add_eps else high), low
        if self.always_add_eps:
            return "halved", high - low + eps, low
        return "spanned", self._span(low, high), low

    def undo(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """The value (..., D) that `inverse` maps to `value`, in float64.

        `forward` is not quite that: the training codes add eps on one way only. A dimension whose whole range is below
        the resolution of the float32 numbers that robots are sent keeps nothing of the model's value; it gets the one
        that training gave to its only value.
        """
        if self.mode == "IDENTITY":
            return value
        width = value.shape[-1]
        low, high = self.low[:width].astype(np.float64), self.high[:width].astype(np.float64)
        if self.mode == "MEAN_STD":
            scale, offset, rest = (high + self.eps if self.always_add_eps else high), low, 0.0
        else:
            span = high - low + self.eps if self.always_add_eps else np.where(high == low, self.eps, high - low)
            scale, offset, rest = span / 2.0, low + span / 2.0, -1.0
        lost = scale <= _LOST * np.abs(low)
        return np.where(lost, rest, (value - offset) / np.where(scale == 0, 1.0, scale))

    def _span(self, low: FloatArray, high: FloatArray) -> FloatArray:
        span = high - low
        return np.where(span == 0, span.dtype.type(self.eps), span)

    def _operands(self, value: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Statistics cut to the value's width, as both training codes do, and the value they are applied to.

        LeRobot's value has the statistics' float32. openpi's keeps its own dtype until it meets them, so the network's
        float32 output is shifted and halved in float32.
        """
        width = value.shape[-1]
        x = value if self.always_add_eps else value.astype(self.low.dtype, copy=False)
        return self.low[:width], self.high[:width], x


def restore(rule: str, x: Any, scale: Any, offset: Any) -> Any:
    """Model units to robot units, of arrays or of tensors: one elementwise operation after the other, as trained.

    Args:
        rule: `scaled` by a deviation, or from [-1, 1] to a range, `halved` first (openpi) or `spanned` first (LeRobot).
    """
    if rule == "scaled":
        return x * scale + offset
    if rule == "halved":
        return (x + 1.0) / 2.0 * scale + offset
    return (x + 1.0) * scale / 2.0 + offset


def identity() -> Normaliser:
    """The normaliser that changes nothing."""
    empty = np.zeros(0, np.float32)
    return Normaliser("IDENTITY", empty, empty, 0.0, False)


def make_normaliser(
    mode: Mode,
    statistics: Mapping[str, FloatArray],
    *,
    feature: str,
    width: int,
    eps: float,
    always_add_eps: bool,
    source: str,
) -> Normaliser:
    """Builds the normaliser of `feature` after checking its statistics.

    Args:
        statistics: name (mean, std, min, max, q01, q99, q10, q90) -> values of shape (D,).
        width: D that the checkpoint declares; 0 takes whatever the statistics have.
        source: the file, for messages.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where statistics are missing, not finite, of the wrong shape, or reversed.
    """
    if mode == "IDENTITY":
        return identity()
    names = _KEYS[mode]
    missing = [name for name in names if name not in statistics]
    if missing:
        raise refuse(
            f"{source} has no {' and no '.join(missing)} for {feature}, which {mode} normalisation needs",
            "take the statistics file of the same training run, or correct the normalisation mode",
        )
    low, high = (np.asarray(statistics[name]) for name in names)
    expected = (width or low.shape[0],) if low.ndim == 1 else (width,)
    for name, values in zip(names, (low, high), strict=True):
        if values.shape != expected:
            raise refuse(
                f"{source} has {feature}.{name} of shape {values.shape}, the checkpoint needs {expected}",
                "take the statistics file of the same training run",
            )
        if not np.isfinite(values).all():
            raise refuse(f"{source} has NaN or infinity in {feature}.{name}", "recompute the statistics")
    reversed_range = mode != "MEAN_STD" and bool((high < low).any())
    if reversed_range or (mode == "MEAN_STD" and bool((high < 0).any())):
        raise refuse(f"{source} has a negative spread for {feature}", "recompute the statistics")
    return Normaliser(mode, low, high, eps, always_add_eps)


def state_bins(normalised: FloatArray) -> NDArray[np.int64]:
    """Digitises a normalised state (D,) into 256 equal bins of [-1, 1): -1 below, 0..255 otherwise, never clipped."""
    return _EDGES.searchsorted(normalised, side="right").astype(np.int64) - 1
