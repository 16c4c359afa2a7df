"""What the server needs of a model family: a description, rows from observations, actions from rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import TaktlineError

from taktline_worker.observation import RobotInput


@dataclass(frozen=True, slots=True)
class Description:
    """What a loaded policy expects and answers; names of cameras as robots send them."""

    family: str
    precision: str
    device: str
    cameras: tuple[str, ...]
    optional_cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    horizon: int
    control_period_s: float


class PendingRow(Protocol):
    """An observation whose images are being decoded in a thread pool."""

    def result(self) -> Any:
        """Waits for the images and returns the row.

        Raises:
            TaktlineError: the observation does not fit the policy.
        """


class Adapter(Protocol):
    """One loaded policy. `begin` is thread-safe; `run` is called by one thread at a time."""

    @property
    def description(self) -> Description:
        """What the policy expects and answers."""

    def begin(self, observation: RobotInput, pool: Executor) -> PendingRow:
        """Checks an observation and starts decoding it.

        Raises:
            TaktlineError: the observation does not fit the policy.
        """

    def run(self, rows: Sequence[Any], bucket: int) -> Any:
        """Runs the engine for at most `bucket` rows; returns what `finish` takes."""

    def finish(self, rows: Sequence[Any], outputs: Any) -> list[NDArray[np.float32] | TaktlineError]:
        """Engine outputs -> float32 (H, D) in robot units, or that row's error."""

    def largest_row(self) -> Any:
        """A valid row with every camera and the longest prompt, for warm-up and calibration."""
