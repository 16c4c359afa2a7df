"""The file of recorded demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from taktline_demo.arm import CAMERAS


@dataclass(frozen=True)
class Demonstrations:
    """Recorded observations, all arrays of one length N.

    Attributes:
        frames: camera name -> uint8 RGB, shape (N, pixels, pixels, 3), before JPEG.
        states: joint angles in rad, float32, shape (N, 4).
        chunks: expert joint targets in rad for each block in the order of COLOURS, float32, shape (N, 3, H, 4).
        episodes: seed of the episode of each observation, int64, shape (N,).
    """

    frames: dict[str, NDArray[np.uint8]]
    states: NDArray[np.float32]
    chunks: NDArray[np.float32]
    episodes: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Writes one compressed npz file."""
        arrays: dict[str, Any] = {f"frames.{name}": value for name, value in self.frames.items()}
        np.savez_compressed(path, states=self.states, chunks=self.chunks, episodes=self.episodes, **arrays)

    @classmethod
    def load(cls, path: Path) -> Demonstrations:
        """Reads a file written by `save`. Raises OSError or KeyError where it is no such file."""
        with np.load(path) as file:
            frames = {name: file[f"frames.{name}"] for name in CAMERAS}
            return cls(frames, file["states"], file["chunks"], file["episodes"])
