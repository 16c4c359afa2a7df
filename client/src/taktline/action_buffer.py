"""The action buffer of a robot: which row is due at each control step, when it runs dry, and how chunks hand over."""

from __future__ import annotations

import dataclasses
import math
from collections import deque

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import Array, Rtc

from taktline.chunk import Chunk

Actions = NDArray[np.float32]
DELAYS_KEPT = 16


@dataclasses.dataclass(frozen=True)
class Mark:
    """The control step at which an observation was made; `standing`: the buffer was empty then, nothing moved."""

    step: int
    standing: bool
    episode: int


@dataclasses.dataclass(frozen=True)
class _Held:
    actions: Actions
    start: int
    """The control step that row 0 is meant for."""

    @property
    def end(self) -> int:
        return self.start + len(self.actions)


class ActionBuffer:
    """Rows of the chunks received, by control step. Knows no clock and no network; not for several threads at once.

    A chunk's row i is meant for the control step i after the one at which its observation was made, so the rows that
    were due while it was being made are dropped at the hand-off. An observation made while nothing moved is the
    exception: its chunk starts whenever it comes. Where a newer chunk ends sooner, as one that the gateway made shorter
    may, the older one fills the steps beyond it.

    Args:
        dt_s: control period.
        ensemble: temporal ensembling: each step takes the mean of what all chunks that reach it say, with weights
            exp(-ensemble * k) for the k-th oldest (Zhao et al., arXiv 2304.13705, section IV.C, their m); 0 weighs all
            alike. None takes the newest chunk that reaches the step.
    """

    def __init__(self, dt_s: float, *, ensemble: float | None = None) -> None:
        if not (math.isfinite(dt_s) and dt_s > 0):
            raise TaktlineError(ErrorCode.CONFIG_INVALID, f"the control period is {dt_s} s", "use a positive dt_s")
        self.dt_s = dt_s
        self._ensemble = ensemble
        self._chunks: deque[_Held] = deque()  # oldest first
        self._step = 0
        self._episode = 0
        self._moving = False
        self._delays: deque[int] = deque(maxlen=DELAYS_KEPT)
        self.dry_events = 0
        self.hand_offs = 0
        self.late_chunks = 0
        self.largest_seam = 0.0
        """Largest change of the action that was due at a hand-off, with the new chunk against without, in its units."""

    @property
    def step(self) -> int:
        """The control step that comes next."""
        return self._step

    @property
    def rows_left(self) -> int:
        """Rows from the next step on; 0 where the buffer is dry."""
        return max((held.end for held in self._chunks), default=self._step) - self._step

    @property
    def rows_taken(self) -> int:
        """Rows of the newest chunk that are past; 0 where there is none."""
        return self._step - self._chunks[-1].start if self._chunks else 0

    @property
    def left_ms(self) -> float:
        """How long the buffer lasts from the beginning of the next step on."""
        return 1e3 * self.dt_s * self.rows_left

    @property
    def expected_delay(self) -> int | None:
        """Steps from an observation to its chunk, as recent hand-offs really took: their median, rounded up.

        The median and not the worst, so that one slow start does not inflate it; None before the first.
        """
        if not self._delays:
            return None
        ordered = sorted(self._delays)
        return ordered[len(ordered) // 2]

    def mark(self) -> Mark:
        """To be taken when the cameras are read; goes with the chunk to `add`."""
        return Mark(self._step, self.rows_left == 0, self._episode)

    def rtc(self, *, execution_horizon: int | None = None) -> Rtc | None:
        """What real-time chunking needs of this instant: the unexecuted rows and the expected delay; None where dry.

        Each row of the tail is of the newest chunk that reaches its step.
        """
        if not self.rows_left:
            return None
        parts, reached = [], self._step
        for held in reversed(self._chunks):
            if held.end > reached:
                parts.append(held.actions[reached - held.start :])
                reached = held.end
        tail = np.concatenate(parts)
        delay = self.expected_delay
        return Rtc(
            tail=Array.from_numpy(tail),
            delay=None if delay is None else min(delay, len(tail)),
            execution_horizon=execution_horizon,
        )

    def add(self, chunk: Chunk, mark: Mark) -> bool:
        """Hands over to `chunk`; False where none of its rows is meant for now or later, or it is of an ended episode.

        A chunk that is older than the newest one in the buffer adds nothing but to an ensemble.
        """
        if mark.episode != self._episode:
            return False
        start = self._step if mark.standing else mark.step
        if not mark.standing:
            self._delays.append(self._step - mark.step)
        held = _Held(np.asarray(chunk.actions, dtype=np.float32), start)
        if held.end <= self._step:
            self.late_chunks += 1
            return False
        newest = self._chunks[-1] if self._chunks else None
        if newest is not None and newest.start > held.start:
            if self._ensemble is None:
                return False
            self._chunks.appendleft(held)
            return True
        before = self._due()
        if self._ensemble is None:
            self._chunks = deque(older for older in self._chunks if older.end > held.end)
        self._chunks.append(held)
        after = self._due()
        if before is not None and after is not None:
            self.largest_seam = max(self.largest_seam, float(np.abs(after - before).max()))
        self.hand_offs += 1
        return True

    def next_action(self) -> Actions | None:
        """The row of this control step, float32 (D,), and on to the next step; None where the buffer is dry.

        Call it once a control period, dry or not: time goes on for the rows of a chunk that is still to come.
        """
        while self._chunks and self._chunks[0].end <= self._step:
            self._chunks.popleft()
        action = self._due()
        self._step += 1
        if action is None and self._moving:
            self.dry_events += 1
        self._moving = action is not None
        return action

    def _due(self) -> Actions | None:
        """What this control step gets from the chunks at hand."""
        rows = [held.actions[self._step - held.start] for held in self._chunks if held.start <= self._step < held.end]
        if not rows:
            return None
        if self._ensemble is None or len(rows) == 1:
            newest: Actions = rows[-1]
            return newest
        weights = np.exp(-self._ensemble * np.arange(len(rows), dtype=np.float32))
        mean: Actions = np.einsum("k,kd->d", weights / weights.sum(), np.stack(rows))
        return mean

    def reset(self) -> None:
        """A new episode: drops all rows; chunks of observations made before are not taken any more."""
        self._chunks.clear()
        self._episode += 1
        self._moving = False
