"""π0.5's prompt: the task in words and the state as integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BINS = 256


def discretise(normalised: NDArray[np.floating]) -> NDArray[np.int64]:
    """Bin of each normalised state value: 256 bins over [-1, 1]; values below -1 get -1, values from 1 on get 255."""
    edges = np.linspace(-1.0, 1.0, _BINS + 1)[:-1]
    return np.asarray(np.digitize(normalised, edges) - 1, np.int64)


def prompt_text(instruction: str, bins: NDArray[np.int64]) -> str:
    """The text the policy reads for an instruction and a discretised state of shape (D,)."""
    task = instruction.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {task}, State: {' '.join(str(int(value)) for value in bins)};\nAction: "
