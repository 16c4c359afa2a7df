"""What the server needs of a model family: a description, rows from observations, actions from rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import TaktlineError
from taktline_protocol.messages import ImageFit
from taktline_protocol.search_work import SearchWork

from taktline_worker.jpeg_threads import BegunFrame
from taktline_worker.observation import RobotInput

Frame = tuple[str, tuple[int, ...], bytes | memoryview]
"""Encoding, shape and bytes of one image."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a loaded policy expects and answers; names of cameras as robots send them.

    Attributes:
        rtc: how a tail of the last chunk is used: `guided`, `trained`, or empty where it is refused.
        rtc_max_delay: in the trained mode, the largest delay of the training.
        imagines: whether clients may ask for the imagined video.
        image_fit: how frames come to the network's size where that is done in whole 8-bit pixels and once: a frame of
            that size is then taken as it is.
    """

    family: str
    precision: str
    device: str
    cameras: tuple[str, ...]
    optional_cameras: tuple[str, ...]
    state_dim: int
    action_dim: int
    horizon: int
    control_period_s: float
    rtc: str = ""
    rtc_max_delay: int = 0
    imagines: bool = False
    image_fit: ImageFit | None = None


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """A planner's answer.

    Attributes:
        actions: float32 (H, D), the whole plan; row 0 is to be executed.
        predicted_states: float32 (H, S), where the model expects the robot after each action.
        energies: float32 (rounds run, 2), the lowest energy of each round and the mean of its elites.
        stopped: why no further round was run: rounds, converged or budget.
    """

    actions: NDArray[np.float32]
    predicted_states: NDArray[np.float32]
    energies: NDArray[np.float32]
    stopped: str


@dataclass(frozen=True, slots=True)
class GuidedChunk:
    """An action chunk (H, D) that continues the tail of the last one, and how (protocol `RtcReport`)."""

    actions: NDArray[np.float32]
    mode: str
    delay: int
    prefix_end: int
    schedule: str
    path: str


@dataclass(frozen=True, slots=True)
class ImaginedChunk:
    """An action chunk (H, D) and the video that a world-action model imagined with it (protocol `ImaginedVideo`)."""

    actions: NDArray[np.float32]
    format: str
    fps: float
    parts: tuple[bytes, ...]


Answer = NDArray[np.float32] | PlannedChunk | GuidedChunk | ImaginedChunk
"""What a good row gets: an action chunk (H, D) in robot units, alone or with how a tail shaped it or the video that was
imagined with it, or a plan."""


class PendingRow(Protocol):
    """An observation whose images are being decoded in a thread pool."""

    def result(self) -> Any:
        """Waits for the images and returns the row.

        Raises:
            TaktlineError: the observation does not fit the policy.
        """


@dataclass(frozen=True, slots=True)
class Level:
    """What a batch gets instead of full quality; 0 is the policy's own number.

    Attributes:
        solver_steps: of the flow solver.
        horizon: actions of a chunk, all that the network denoises.
    """

    solver_steps: int = 0
    horizon: int = 0

    def __str__(self) -> str:
        """As a refusal names it."""
        parts = [f"{self.solver_steps} solver steps"] if self.solver_steps else []
        parts += [f"chunks of {self.horizon}"] if self.horizon else []
        return " and ".join(parts) or "full quality"


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

    def finish(self, rows: Sequence[Any], outputs: Any) -> Sequence[Answer | TaktlineError]:
        """Engine outputs -> each row's answer, or its error."""

    def largest_row(self) -> Any:
        """A valid row with every camera and the longest prompt, for warm-up and calibration."""


@runtime_checkable
class CheaperAdapter(Protocol):
    """An adapter that has others beside it which answer the same observations cheaper."""

    @property
    def cheaper(self) -> Mapping[Level, Adapter]:
        """Each is what a deployment that states the level's numbers as its own would have loaded."""


class RunningBatch(Protocol):
    """A batch that a device runs, or will once it has ended the one before."""

    def wait(self) -> Any:
        """What `finish` takes; raises what `run` would have."""

    @property
    def seconds(self) -> float:
        """How long the device ran it; known once `wait` has returned."""


@runtime_checkable
class LaunchingAdapter(Protocol):
    """An adapter whose device takes a batch while it runs another; its `finish` may be called by several threads."""

    def draft(self, pending: Sequence[Any]) -> Any:
        """What can be done for `launch` while the images of these observations are still being decoded; any thread.

        None where that is nothing, as where one of them is to be refused.
        """

    def launch(self, rows: Sequence[Any], bucket: int, draft: Any = None) -> RunningBatch | None:
        """As `run`, without waiting; None for rows that only that can run.

        `draft` is what `draft` gave for the observations of just these rows.
        """


@runtime_checkable
class ForesightedAdapter(Protocol):
    """An adapter that has frames decoded before their observations are looked at."""

    def begin_frames(self, frames: Sequence[tuple[str, Frame]]) -> list[BegunFrame | None]:
        """What has been begun of each frame, by camera, (encoding, shape, bytes), without waiting; any thread."""


@runtime_checkable
class SearchingAdapter(Protocol):
    """A planner: requests may ask for more or less than `largest_row`, or end it early."""

    def one_round_row(self) -> Any:
        """`largest_row` with a single round."""

    def search_work(self, whole_ms: float, one_round_ms: float) -> SearchWork:
        """What those two rows take says of any request's search."""


def as_one(value: Any, protocol: Any) -> Any:
    """`value` where it fulfils a protocol, else None; `isinstance` would look through both for it each time."""
    kind: Any = type(value)
    return value if _fulfils(kind, protocol) else None


@functools.cache
def _fulfils(kind: Any, protocol: Any) -> bool:
    return issubclass(kind, protocol)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One captured CUDA graph: the batch it holds, its warm-up and capture, and the GPU memory that it took."""

    batch: int
    capture_s: float
    memory_bytes: int


@runtime_checkable
class HasGraphs(Protocol):
    """An adapter whose engine replays captured graphs."""

    def graphs(self) -> Sequence[CapturedGraph]:
        """The graphs captured so far; any thread may ask."""


@runtime_checkable
class Closable(Protocol):
    """An adapter that holds more than memory, such as other processes."""

    def close(self) -> None:
        """Gives it back; nothing runs any more."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of a request for the profiler: a call, and the operations and least bytes that it must do and move."""

    name: str
    run: Callable[[], object]
    flops: float
    bytes: float


class Profile(Protocol):
    """An engine as what is measured.

    Attributes:
        policy: family's short name in results.
        shape: what one row holds, by name (views, prompt_tokens, horizon, steps or the family's own).
        captured: whether requests are replays of captured graphs, so that phases are to be captured too.
    """

    policy: str
    precision: str
    device: str
    shape: dict[str, int]
    captured: bool

    def phases(self, batch: int) -> Sequence[Phase]:
        """The parts of a request in order; each leaves what the next one reads."""

    def whole(self, batch: int) -> Callable[[], object]:
        """One request over data that lies on the device."""


@runtime_checkable
class HasProfile(Protocol):
    """An adapter whose engine can be taken apart by phase."""

    def profile(self, *, views: int = 0, prompt_tokens: int = 0) -> Profile:
        """The engine as loaded; 0 takes all cameras and the longest prompt."""


@runtime_checkable
class HasCaches(Protocol):
    """An adapter that reuses state between requests."""

    def caches(self) -> Mapping[str, tuple[int, int]]:
        """Hits and misses so far by cache, a fixed few names; any thread may ask."""
