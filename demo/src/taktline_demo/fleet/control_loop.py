"""One robot's closed loop in real time: executes the chunk it has while it asks for the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from taktline import Chunk
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_demo.environment import ReachEnvironment
from taktline_demo.fleet.records import ChunkRecord, CycleRecord, EpisodeRecord, RobotReport
from taktline_demo.jpeg import encode_jpeg
from taktline_demo.lockstep import observation_seed
from taktline_demo.task import CONTROL_PERIOD_S, HORIZON

ASK_AFTER_ROWS = 3
"""Rows of a chunk that are executed before the next chunk is asked for."""
STANDING_BUDGET_MS = 1000.0 * (HORIZON - ASK_AFTER_ROWS) * CONTROL_PERIOD_S
"""Budget of an observation sent while the robot stands still: as much as it has when it moves."""
RETRY_S = 0.1
"""Pause after a refused observation that names no time for a retry."""
_STANDING_POLL_S = 0.002
_FATAL = {
    ErrorCode.UNKNOWN_POLICY,
    ErrorCode.CAMERA_MISSING,
    ErrorCode.CAMERA_UNKNOWN,
    ErrorCode.STATE_INVALID,
    ErrorCode.INSTRUCTION_INVALID,
    ErrorCode.INVALID_BODY,
    ErrorCode.ROBOT_CONFLICT,
    ErrorCode.GATEWAY_UNREACHABLE,
}


class Client(Protocol):
    """The part of `taktline.Robot` that the loop needs."""

    def act(
        self,
        images: Mapping[str, bytes],
        state: NDArray[np.float32],
        instruction: str,
        budget_ms: float,
        *,
        captured_at: float | None = None,
        seed: int | None = None,
    ) -> Chunk:
        """The next action chunk; raises TaktlineError."""


@dataclass
class _Executing:
    """The chunk in the action buffer: row i is meant for control step `captured_step` + i."""

    chunk: Chunk
    captured_step: int
    started_s: float
    first: bool
    rows: int = 0


@dataclass(frozen=True)
class _Pending:
    """A request in flight; `standing`: the arm does not move until it is answered, so its chunk starts whenever."""

    answer: Future[Chunk]
    captured_step: int
    standing: bool


@dataclass
class _Episode:
    """Where an episode stands: the control step, the chunk in the buffer, the request in flight."""

    seed: int
    began_s: float
    step: int = 0
    asked: int = 0
    retry_at_s: float = 0.0
    dry: bool = False
    executing: _Executing | None = None
    pending: _Pending | None = None

    @property
    def row(self) -> int:
        """Row of the buffered chunk that is meant for this control step."""
        return 0 if self.executing is None else self.step - self.executing.captured_step

    @property
    def rows_left(self) -> int:
        """Rows in the action buffer, 0 where it is dry or nothing has come yet."""
        return 0 if self.executing is None else max(0, len(self.executing.chunk.actions) - self.row)


class ControlLoop:
    """Runs episodes of one robot. The simulation and its cameras stay on the calling thread, requests on another."""

    def __init__(
        self,
        environment: ReachEnvironment,
        client: Client,
        report: RobotReport,
        changed: Callable[[str], None] = lambda doing: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`report` is filled as the loop runs; `changed` hears in words what the robot is doing."""
        self._environment = environment
        self._client = client
        self._report = report
        self._changed = changed
        self._clock = clock
        self._sleep = sleep
        self._requester = ThreadPoolExecutor(1, thread_name_prefix="requests")

    def close(self) -> None:
        """Waits for a request in flight."""
        self._requester.shutdown()

    def run_episode(self, seed: int) -> EpisodeRecord:
        """Runs episode `seed` to its end and appends it to the report.

        Raises:
            TaktlineError: where the gateway cannot be reached or says that the observations can never be served.
        """
        self._environment.reset(seed)
        self._changed(self._environment.instruction)
        episode = _Episode(seed, self._clock())
        next_tick = episode.began_s
        while not self._environment.outcome().done:
            if episode.pending is not None and episode.pending.answer.done():
                self._take_answer(episode, episode.pending)
            due = episode.rows_left <= HORIZON - ASK_AFTER_ROWS and self._clock() >= episode.retry_at_s
            if episode.pending is None and due:
                self._ask(episode)
            if episode.executing is None:  # standing still before the first chunk: the simulation does not move
                self._sleep(_STANDING_POLL_S)
                next_tick = self._clock()
                continue
            self._move(episode, episode.executing)
            next_tick = self._wait_until(next_tick + CONTROL_PERIOD_S)
        record = self._end(episode)
        if episode.pending is not None:
            wait([episode.pending.answer])  # asked for before the end was known; nothing is left to do with it
        return record

    def _ask(self, episode: _Episode) -> None:
        """Sends an observation of this control step."""
        environment, left = self._environment, episode.rows_left
        captured_at = self._clock()
        frames, state, instruction = environment.frames(), environment.state(), environment.instruction
        budget_ms = 1000.0 * left * CONTROL_PERIOD_S if left else STANDING_BUDGET_MS
        seed = observation_seed(episode.seed, episode.asked)
        self._report.requests += 1

        def ask() -> Chunk:
            images = {name: encode_jpeg(frame) for name, frame in frames.items()}
            spent_ms = 1000.0 * (self._clock() - captured_at)
            return self._client.act(
                images, state, instruction, budget_ms - spent_ms, captured_at=captured_at, seed=seed
            )

        episode.pending = _Pending(self._requester.submit(ask), episode.step, standing=left == 0)
        episode.asked += 1

    def _take_answer(self, episode: _Episode, pending: _Pending) -> None:
        """Hands the control over to an answered chunk, if a row of it is meant for now or a later step."""
        episode.pending = None
        try:
            chunk = pending.answer.result()
        except TaktlineError as error:
            episode.retry_at_s = self._clock() + self._note_error(error)
            return
        executing, now = episode.executing, self._clock()
        self._note_chunk(chunk, first=executing is None)
        start = episode.step if pending.standing else pending.captured_step
        if episode.step - start >= len(chunk.actions):
            return
        if executing is None:  # the robot stood still until now: the wait is part of this chunk's cycle
            episode.executing = _Executing(chunk, start, episode.began_s, first=True)
        else:
            self._note_cycle(executing, chunk, now)
            episode.executing = _Executing(chunk, start, now, first=False)
        episode.dry = False

    def _move(self, episode: _Episode, executing: _Executing) -> None:
        """Commands one control step: the chunk's row for it, or the last pose where the buffer has run dry."""
        if episode.rows_left:
            self._environment.step(executing.chunk.actions[episode.row])
            executing.rows += 1
        else:
            if not episode.dry:
                episode.dry = True
                self._report.misses += 1
            self._environment.step(executing.chunk.actions[-1])
        episode.step += 1

    def _note_error(self, error: TaktlineError) -> float:
        """Counts a refusal and returns how long to wait, s. Raises it where no later observation can fare better."""
        if error.code in _FATAL:
            raise error
        self._report.errors[error.code.value] = self._report.errors.get(error.code.value, 0) + 1
        return RETRY_S if error.retry_after_ms is None else error.retry_after_ms / 1000.0

    def _note_chunk(self, chunk: Chunk, first: bool) -> None:
        terms = chunk.timings
        self._report.chunks.append(
            ChunkRecord(
                first=first,
                observe_ms=terms.observe_ms,
                transfer_ms=terms.transfer_ms,
                queue_ms=terms.queue_ms,
                inference_ms=terms.inference_ms,
                actuate_ms=terms.actuate_ms,
                margin_ms=chunk.margin_ms,
                batch=chunk.batch_size,
            )
        )

    def _note_cycle(self, executing: _Executing, following: Chunk, now: float) -> None:
        """Records the cycle that ends as `following` takes over; one that the episode's end cuts short is none."""
        waited_for = executing.chunk if executing.first else following
        self._report.cycles.append(
            CycleRecord(
                serial=executing.first,
                rows=executing.rows,
                env_ms=1000.0 * executing.rows * CONTROL_PERIOD_S,
                inference_ms=waited_for.timings.inference_ms,
                control_ms=1000.0 * (now - executing.started_s),
            )
        )

    def _wait_until(self, tick: float) -> float:
        """Sleeps until `tick`; a tick that has passed is taken as now, so that a late step is never made up for."""
        now = self._clock()
        if tick <= now:
            return now
        self._sleep(tick - now)
        return tick

    def _end(self, episode: _Episode) -> EpisodeRecord:
        environment, outcome = self._environment, self._environment.outcome()
        took_s = self._clock() - episode.began_s
        record = EpisodeRecord(
            episode.seed, environment.instruction, environment.goal, outcome.reached, outcome.steps, took_s
        )
        self._report.episodes.append(record)
        self._report.running_s += took_s
        self._changed("reached it" if record.success else "did not reach it")
        return record
