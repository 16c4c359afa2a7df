"""Closed-loop control with a chunk policy: executes the chunk at hand while the next one is asked for."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.messages import Rtc

from taktline.action_buffer import ActionBuffer, Mark
from taktline.chunk import Chunk
from taktline.observing import Frame, State, check_number

RETRY_S = 0.1
"""Pause after a refusal that names no time for a retry."""
PAUSE_S = 1.0
"""A shorter stall of the loop is no pause, however short the chunks are."""
STANDING_MOST_MS = 10_000.0
"""A robot that stands waits no longer than this for an answer: what it saw is old by then."""
# No later observation can fare better; the caller must hear of it.
_FATAL = frozenset(
    {
        ErrorCode.UNKNOWN_POLICY,
        ErrorCode.CAMERA_MISSING,
        ErrorCode.CAMERA_UNKNOWN,
        ErrorCode.IMAGE_TOO_LARGE,
        ErrorCode.BODY_TOO_LARGE,
        ErrorCode.STATE_INVALID,
        ErrorCode.INSTRUCTION_INVALID,
        ErrorCode.INVALID_BODY,
        ErrorCode.RTC_INVALID,
        ErrorCode.SEARCH_INVALID,
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.FORBIDDEN,
        ErrorCode.CONFIG_INVALID,
    }
)

_logger = logging.getLogger("taktline")

Answer = Future[Chunk] | asyncio.Future[Chunk]


class Asker(Protocol):
    """What starts an observation without waiting: `Robot.ask`, or an AsyncRobot's `act` wrapped in a task."""

    def __call__(
        self,
        images: Mapping[str, Frame],
        state: State,
        instruction: str,
        budget_ms: float,
        *,
        captured_at: float | None = None,
        actuate_ms: float = 0.0,
        seed: int | None = None,
        rtc: Rtc | None = None,
    ) -> Answer:
        """Starts one observation; the chunk comes as a future."""


@dataclasses.dataclass(frozen=True)
class _Asked:
    mark: Mark
    answer: Answer
    delay: int | None
    """That was sent for real-time chunking."""


class Player:
    """Keeps a robot's action buffer filled. Call `wants_observation` and `next_action` once each control period:

        while running:
            if player.wants_observation():
                player.observe(cameras(), joints(), "reach the red block")
            action = player.next_action()      # None: hold still
            ...sleep until the next control period

    Where that is not called for longer than a chunk lasts, and at least 1 s, what was buffered is dropped and asked for
    anew: the scene is another one by then.

    Args:
        ask: `robot.ask` of a `taktline.Robot`.
        dt_s: control period; the policy's own is `robot.info().dt_s`.
        replan_rows: ask for the next chunk when so many rows of the current one have been executed; 0 asks at once. Of
            a chunk that the gateway made shorter, earlier where it would run dry meanwhile.
        ensemble: temporal ensembling, see `ActionBuffer`.
        rtc: send the unexecuted rows along, with the delay that hand-offs took; for policies whose `robot.info().rtc`
            is not empty. Where a checkpoint was trained for shorter delays only, that is left to the gateway, which
            keeps its own estimate within them.
        standing_budget_ms: budget of an observation made while the buffer is empty. A robot that stands can wait: where
            no worker makes that, as of a policy that takes longer, twice as much is asked for, up to 10 s; and from the
            first chunk on at least twice what its inference took.
        actuate_ms: the robot's own L_actuate.
        follow_hints: ask when the gateway would like to be asked, where the buffer allows it, not by `replan_rows`.
        in_flight: observations that may be unanswered at once; beyond the first they are sent every `replan_rows`.

    Raises:
        TaktlineError: `config_invalid` for an argument with which the robot would never move, or not as meant.
    """

    def __init__(
        self,
        ask: Asker,
        dt_s: float,
        *,
        replan_rows: int = 1,
        ensemble: float | None = None,
        rtc: bool = False,
        standing_budget_ms: float = 1000.0,
        actuate_ms: float = 0.0,
        in_flight: int = 1,
        follow_hints: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for what, value, least in (
            ("replan_rows", replan_rows, 0),
            ("standing_budget_ms", standing_budget_ms, 1),
            ("actuate_ms", actuate_ms, 0),
            ("in_flight", in_flight, 1),
        ):
            check_number(what, value, least)
        self.buffer = ActionBuffer(dt_s, ensemble=ensemble)
        self.errors: Counter[str] = Counter()
        self.last: Chunk | None = None
        self._ask = ask
        self._replan_rows = replan_rows
        self._rtc = rtc
        self._tells_delay = True
        self._standing_budget_ms = self._patience_ms = standing_budget_ms
        self._actuate_ms = actuate_ms
        self._in_flight = in_flight
        self._follow_hints = follow_hints
        self._clock = clock
        self._asked: list[_Asked] = []
        self._asked_step: int | None = None
        self._retry_at = 0.0
        self._ticked_at: float | None = None
        self._period_s = 0.0
        """What the loop took from tick to tick, the last time."""
        self._resumed_at = -math.inf
        self.stale_frames = 0
        """Observations that were not asked with: all that a chunk could say of frames so old has been executed."""
        self._stale = False
        self._longest = 0
        """Rows of the longest chunk so far; the gateway may make one shorter."""

    def wants_observation(self) -> bool:
        """Whether to read the cameras now. Raises the TaktlineError that no later observation can avoid."""
        self._collect()
        if len(self._asked) >= self._in_flight or self._clock() < self._retry_at:
            return False
        if not self.buffer.rows_left or self._asked_step is None:
            return not self._asked
        hint = self._hint()
        if hint is not None:
            return self._clock() >= hint
        taken = min(self.buffer.rows_taken, self.buffer.step - self._asked_step)
        return taken >= self._replan_rows or (
            taken > 0 and self._shorter() and self.buffer.rows_left <= self._reserve()
        )

    def _hint(self) -> float | None:
        """When the gateway would like to see the next observation; None where that would be too late, or long ago."""
        hint = None if self.last is None else self.last.next_observation_at
        if hint is None or not self._follow_hints or self._asked:
            return None
        reserve_s = self.buffer.dt_s * self._reserve()
        now = self._clock()
        dry_at = now + self.budget_ms(now) / 1e3
        return hint if hint + reserve_s <= dry_at else None

    def _reserve(self) -> int:
        """Rows that must be left when a chunk is asked for: twice what the last hand-offs took, and one."""
        wait = self.buffer.expected_wait
        return 2 * (1 if wait is None else wait) + 1

    def _shorter(self) -> bool:
        degraded = None if self.last is None else self.last.degraded
        return degraded is not None and degraded.action_horizon is not None

    def observe(
        self,
        images: Mapping[str, Frame],
        state: State,
        instruction: str,
        *,
        captured_at: float | None = None,
        seed: int | None = None,
    ) -> None:
        """Asks for the next chunk, with the time until the buffer runs dry as its budget. Does not wait.

        A frame that is no picture, such as the None of a camera that failed once, is counted in `errors` like a refusal
        of the gateway, and the buffer is played on. Of cameras that were read some time ago, at `captured_at`, the
        chunk is executed from the row on that is due when it comes. Nothing is asked with frames after which the robot
        has already executed as many rows as a chunk has, as when a camera delivers no more: it comes to stand,
        and goes on with the next new frame; nor, after a pause of the loop, with frames from before it.

        Raises:
            TaktlineError: what no later observation can avoid; before the first chunk, whatever `ask` raises at once:
                a program that never passed a picture passes the wrong thing.
        """
        now = self._clock()
        seen_at = now if captured_at is None else captured_at
        # What is not finite is refused with what else is wrong with an observation.
        ago = max(0, round((now - seen_at) / self.buffer.dt_s)) if math.isfinite(seen_at) else 0
        mark = self.buffer.mark(ago=ago)
        before_pause = seen_at + self._longest * self.buffer.dt_s < self._resumed_at
        if self.last is not None and (before_pause or mark.moved >= self._longest):
            self._note_stale(now - seen_at)
            return
        self._stale = False
        rtc = self.buffer.rtc(ago=ago) if self._rtc else None
        if rtc is not None and not self._tells_delay:
            rtc = Rtc(tail=rtc.tail)
        try:
            answer = self._ask(
                images,
                state,
                instruction,
                self.budget_ms(now),
                captured_at=seen_at,
                actuate_ms=self._actuate_ms,
                seed=seed,
                rtc=rtc,
            )
        except TaktlineError as error:
            self._refused(error)
            if self.last is None:
                raise
            return
        self._asked.append(_Asked(mark, answer, None if rtc is None else rtc.delay))
        self._asked_step = self.buffer.step

    def budget_ms(self, now: float) -> float:
        """Time until the hand-off deadline: when the buffer, and the row being executed, have run out."""
        left = self.buffer.rows_left
        if not left:
            return self._patience_ms
        period_s = self.buffer.dt_s
        # The row handed out last fills the rest of its own period before the buffered ones begin.
        running_s = 0.0 if self._ticked_at is None else max(0.0, period_s - (now - self._ticked_at))
        return 1e3 * (running_s + left * period_s)

    def next_action(self) -> NDArray[np.float32] | None:
        """The action of this control period, float32 (D,); None where there is none: hold still.

        Raises the TaktlineError that no later observation can avoid.
        """
        self._collect()
        now = self._clock()
        if self._ticked_at is not None:
            self._period_s = now - self._ticked_at
        self._ticked_at = now
        return self.buffer.next_action()

    def reset(self) -> None:
        """A new episode: what was asked before it is dropped."""
        for asked in self._asked:
            asked.answer.cancel()
        self._asked.clear()
        self._asked_step = None
        self._retry_at = 0.0
        self.buffer.reset()

    def metrics(self) -> dict[str, Any]:
        """What the buffer went through, for a log line."""
        return {
            "hand_offs": self.buffer.hand_offs,
            "dry_events": self.buffer.dry_events,
            "late_chunks": self.buffer.late_chunks,
            "stale_frames": self.stale_frames,
            "largest_seam": round(self.buffer.largest_seam, 6),
            "expected_delay": self.buffer.expected_delay,
            "errors": dict(self.errors),
        }

    def _wait_for(self, budget_ms: float) -> None:
        """What an observation made in a standstill asks for, at least `standing_budget_ms`."""
        self._patience_ms = max(self._standing_budget_ms, min(budget_ms, STANDING_MOST_MS))

    def _note_stale(self, age_s: float) -> None:
        self.stale_frames += 1
        if not self._stale:
            _logger.warning(
                "the frames are %.1f s old, and a whole chunk has been executed since: the robot stands when its buffer"
                " is empty, until every camera delivers again",
                age_s,
            )
        self._stale = True

    def _drop_what_a_pause_outlived(self) -> None:
        """Where the loop has not run for longer than a chunk lasts, no row fits what the robot stands before now.

        A loop that is always that slow, as a simulator's may be, does not pause.
        """
        now = self._clock()
        paused_s = 0.0 if self._ticked_at is None else now - self._ticked_at
        if not self._longest or paused_s <= max(PAUSE_S, self._longest * self.buffer.dt_s, 3 * self._period_s):
            return
        self._period_s = paused_s
        if self.buffer.rows_left or self._asked:
            _logger.warning(
                "the control loop paused for %.1f s, longer than a chunk lasts: what was buffered or asked for is"
                " dropped, and the robot stands until a chunk of new frames is there",
                paused_s,
            )
            self.reset()
            self._resumed_at, self._stale = now, True

    def _collect(self) -> None:
        """Takes what has been answered over into the buffer."""
        self._drop_what_a_pause_outlived()
        for asked in [asked for asked in self._asked if asked.answer.done()]:
            self._asked.remove(asked)
            if asked.answer.cancelled():
                continue
            try:
                chunk = asked.answer.result()
                self.buffer.add(chunk, asked.mark)
            except TaktlineError as error:
                if asked.mark.standing and error.code is ErrorCode.DEADLINE_UNREACHABLE:
                    self._wait_for(2 * self._patience_ms)
                self._refused(error, asked.delay)
            else:
                self.last = chunk
                self._longest = max(self._longest, len(chunk.actions))
                self._wait_for(2 * chunk.timings.inference_ms)

    def _refused(self, error: TaktlineError, delay: int | None = None) -> None:
        self.errors[error.code.value] += 1
        if error.code is ErrorCode.RTC_INVALID and delay is not None:
            # Longer than the checkpoint was trained for: the network's doing, and no reason to stop.
            if self._tells_delay:
                _logger.warning("the delay of %d steps is left to the gateway's estimate: %s", delay, error)
            self._tells_delay = False
            self._retry_at, self._asked_step = self._clock(), None
            return
        if error.code in _FATAL:
            raise error
        if self.errors[error.code.value] == 1 and error.code is not ErrorCode.SUPERSEDED:
            _logger.warning("an observation got no chunk: %s; later ones like it are counted only", error)
        if error.code is not ErrorCode.SUPERSEDED:
            hint_ms = error.retry_after_ms
            self._retry_at = self._clock() + (RETRY_S if hint_ms is None else hint_ms / 1e3)
            self._asked_step = None  # ask anew as soon as the hint allows
