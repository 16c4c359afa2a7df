"""The action buffer of a robot: which row is due at each control step, when it runs dry, and how chunks hand over."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import Array, Rtc

from taktline.chunk import Chunk
from taktline.observing import check_number

Actions = NDArray[np.float32]
DELAYS_KEPT = 16
PAST_ROWS = 256
"""Executed rows that are kept; no chunk begins longer ago."""
DT_TOLERANCE = 0.02
"""By how much a chunk's control period may differ from the buffer's: rows are then half a period off after 25."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """The control step that the chunk's first row is meant for, were it there: the one at which the cameras were read,
    and later by as many steps as the robot stood still since.

    `asked` is the step at which the chunk was asked for; `standing`: the buffer was empty then.
    """

    step: int
    standing: bool
    episode: int
    asked: int

    @property
    def moved(self) -> int:
        """Rows that were executed between the cameras and the question."""
        return self.asked - self.step


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

    A chunk's row i is meant for the control step i after the one at which its cameras were read, so the rows that
    were due while it was being made are dropped at the hand-off. Steps at which nothing moved do not count: the chunk
    of an observation made in a standstill starts whenever it comes, less the rows that were executed since its cameras
    were read, if that was before. So no picture is acted on for longer than one chunk, the last one of a camera that
    failed neither. Where a newer chunk ends sooner, as one that the gateway made shorter may, the older one fills the
    steps beyond it.

    Args:
        dt_s: control period.
        ensemble: temporal ensembling: each step takes the mean of what all chunks that reach it say, with weights
            exp(-ensemble * k) for the k-th oldest (Zhao et al., arXiv 2304.13705, section IV.C, their m); 0 weighs all
            alike, one below, down to -1, the newest most. None takes the newest chunk that reaches the step.
    """

    def __init__(self, dt_s: float, *, ensemble: float | None = None) -> None:
        if not (isinstance(dt_s, (int, float, np.floating)) and math.isfinite(dt_s) and dt_s > 0):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the control period is {dt_s} s",
                "use a positive dt_s; of a policy that no worker has served yet wait for it: robot.info(wait_s=60)",
            )
        if ensemble is not None:
            check_number("ensemble", ensemble, -1.0)  # or the mean of a step would be no number either
        self.dt_s = dt_s
        self._ensemble = ensemble
        self._chunks: deque[_Held] = deque()  # oldest first
        self._step = 0
        self._episode = 0
        self._moving = False
        self._width: int | None = None
        self._past: deque[Actions | None] = deque(maxlen=PAST_ROWS)
        self._moved_at: int | None = None
        """The last step of this episode that had a row."""
        self._delays: deque[int] = deque(maxlen=DELAYS_KEPT)
        self._waits: deque[int] = deque(maxlen=DELAYS_KEPT)
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
        """Steps from when the cameras are read to the chunk, as recent hand-offs really took: the median, rounded up.

        The median and not the worst, so that one slow start does not inflate it; None before the first.
        """
        return _median(self._delays)

    @property
    def expected_wait(self) -> int | None:
        """As `expected_delay`, from when the chunk is asked for."""
        return _median(self._waits)

    def mark(self, *, ago: int = 0) -> Mark:
        """To be taken when a chunk is asked for, and to go with it to `add`; the cameras were read `ago` steps before.

        What they saw while nothing moved is what they would have seen just before it did.
        """
        return Mark(self._step - self._moved(ago), self.rows_left == 0, self._episode, self._step)

    def rtc(self, *, execution_horizon: int | None = None, ago: int = 0) -> Rtc | None:
        """What real-time chunking needs of this instant, `ago` steps after the cameras were read; None where dry.

        That is the rows that were not executed when they were, so those executed since and those still to come, each of
        the newest chunk that reaches its step; and the expected delay.
        """
        if not self.rows_left:
            return None
        parts = [row[np.newaxis] for row in self._executed(ago)]
        reached = self._step
        for held in reversed(self._chunks):
            if held.end > reached:
                parts.append(held.actions[reached - held.start :])
                reached = held.end
        tail = np.concatenate(parts)[: max(len(held.actions) for held in self._chunks)]
        delay = self.expected_delay
        return Rtc(
            tail=Array.from_numpy(tail),
            delay=None if delay is None else min(delay, len(tail)),
            execution_horizon=execution_horizon,
        )

    def add(self, chunk: Chunk, mark: Mark) -> bool:
        """Hands over to `chunk`; False where none of its rows is meant for now or later, or it is of an ended episode.

        A chunk that is older than the newest one in the buffer adds nothing but to an ensemble. Raises TaktlineError
        `config_invalid` where the chunk's control period is not the buffer's, or its width not that of those before.
        """
        if mark.episode != self._episode:
            return False
        if not math.isclose(chunk.dt_s, self.dt_s, rel_tol=DT_TOLERANCE):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"the actions of revision {chunk.revision!r} are {chunk.dt_s:g} s apart, and this loop's control period"
                f" is {self.dt_s:g} s: the robot would move at another speed than the policy means",
                "run the loop at robot.info().dt_s, and make the Player or ActionBuffer with it",
            )
        if self._width not in (None, chunk.actions.shape[1]):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"an action of revision {chunk.revision!r} has {chunk.actions.shape[1]} numbers, and those before it"
                f" had {self._width}: they are not for the same robot",
                "look at what was rolled out under this policy's name, and make a new Player for it",
            )
        self._width = chunk.actions.shape[1]
        start = self._step - mark.moved if mark.standing else mark.step
        if not mark.standing:
            self._delays.append(self._step - mark.step)
            self._waits.append(self._step - mark.asked)
        held = _Held(np.asarray(chunk.actions, dtype=np.float32), start)
        if held.end <= self._step:
            self.late_chunks += 1
            return False
        newest = self._chunks[-1] if self._chunks else None
        if newest is not None and newest.start > held.start:
            if self._ensemble is None:
                return False
            # Several may have overtaken it, and not all: the weights are by age.
            self._chunks = deque(sorted([*self._chunks, held], key=lambda one: one.start))
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
        """The row of this control step, float32 (D,), the caller's own, and on to the next step; None where it is dry.

        Call it once a control period, dry or not: time goes on for the rows of a chunk that is still to come.
        """
        while self._chunks and self._chunks[0].end <= self._step:
            self._chunks.popleft()
        action = self._due()
        self._past.append(action)
        if action is not None:
            self._moved_at = self._step
        self._step += 1
        if action is None and self._moving:
            self.dry_events += 1
        self._moving = action is not None
        return None if action is None else action.copy()

    def _executed(self, ago: int) -> list[Actions]:
        """The rows of the last `ago` steps, oldest first, without the steps that had none."""
        return [row for row in islice(reversed(self._past), ago) if row is not None][::-1]

    def _moved(self, ago: int) -> int:
        """How many rows were executed in the last `ago` steps; at most, where that is longer than rows are kept."""
        moved_since = self._moved_at is not None and self._moved_at >= self._step - ago
        return ago if ago > PAST_ROWS and moved_since else len(self._executed(ago))

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
        self._past.clear()
        self._moved_at = None
        self._episode += 1
        self._moving = False


def _median(steps: deque[int]) -> int | None:
    """The upper one of two."""
    return sorted(steps)[len(steps) // 2] if steps else None
