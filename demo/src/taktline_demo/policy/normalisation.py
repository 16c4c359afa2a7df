"""Statistics of a data set and the quantile normalisation that π0.5 uses: q01 and q99 become -1 and 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STATISTICS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")


@dataclass(frozen=True)
class Statistics:
    """Statistics of one feature: name of STATISTICS -> float32, shape (D,)."""

    values: dict[str, NDArray[np.float32]]

    @classmethod
    def of(cls, samples: NDArray[np.floating]) -> Statistics:
        """Statistics of `samples`, shape (N, D)."""
        quantiles = np.quantile(samples.astype(np.float64), [0.01, 0.10, 0.50, 0.90, 0.99], axis=0)
        rows = [samples.min(0), samples.max(0), samples.mean(0), samples.std(0), *quantiles]
        return cls({name: np.asarray(row, np.float32) for name, row in zip(STATISTICS, rows, strict=True)})

    def normalise(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """Values in robot units -> values where q01 is -1 and q99 is 1, float32; nothing is clipped."""
        low, high = self.values["q01"], self.values["q99"]
        return (2.0 * (values.astype(np.float32) - low) / (high - low) - 1.0).astype(np.float32)

    def restore(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """The inverse of `normalise`."""
        low, high = self.values["q01"], self.values["q99"]
        return ((values.astype(np.float32) + 1.0) * (high - low) / 2.0 + low).astype(np.float32)
