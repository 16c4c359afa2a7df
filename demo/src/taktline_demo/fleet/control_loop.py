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

ASK_AFTER_ROWS = 5
"""Rows of a chunk that are executed before the next chunk is asked for."""
STANDING_BUDGET_MS = 1000.0 * (HORIZON - ASK_AFTER_ROWS) * CONTROL_PERIOD_S
"""Budget of an observation sent while the robot stands still: as much as it has when it moves."""
RETRY_S = 0.1
"""Pause after a refused observation that names no time for a retry."""
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
    """A request in flight."""

    answer: Future[Chunk]
    captured_step: int
    first: bool


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
        environment = self._environment
        environment.reset(seed)
        self._changed(environment.instruction)
        began = self._clock()
        executing: _Executing | None = None
        pending: _Pending | None = None
        retry_at = 0.0
        step = sent = 0
        dry = False
        next_tick = began
        while not environment.outcome().done:
            if pending is not None and pending.answer.done():
                pending_first, pending_step, answer = pending.first, pending.captured_step, pending.answer
                pending = None
                try:
                    chunk = answer.result()
                except TaktlineError as error:
                    retry_at = self._clock() + self._note_error(error)
                else:
                    if step - pending_step < len(chunk.actions):  # else it is too old to hold a row for this step
                        now = self._clock()
                        self._note_chunk(chunk, pending_first)
                        if executing is not None:
                            self._note_cycle(executing, chunk, now)
                        # A robot that stood still has been waiting since the observation: that is part of its cycle.
                        since = began if pending_first else now
                        executing = _Executing(chunk, pending_step, since, pending_first)
                        dry = False
            row = HORIZON if executing is None else step - executing.captured_step
            left = 0 if executing is None else len(executing.chunk.actions) - row
            if pending is None and left <= HORIZON - ASK_AFTER_ROWS and self._clock() >= retry_at:
                budget_ms = 1000.0 * left * CONTROL_PERIOD_S if left > 0 else STANDING_BUDGET_MS
                answer = self._request(budget_ms, observation_seed(seed, sent))
                pending = _Pending(answer, step, executing is None)
                sent += 1
            if executing is None:  # standing still before the first chunk: the simulation does not move
                self._sleep(0.002)
                next_tick = self._clock()
                continue
            if left > 0:
                environment.step(executing.chunk.actions[row])
                executing.rows += 1
            else:
                if not dry:
                    dry = True
                    self._report.misses += 1
                environment.step(executing.chunk.actions[-1])  # the buffer ran dry: hold the last pose
            step += 1
            next_tick = self._wait_until(next_tick + CONTROL_PERIOD_S)
        episode = self._end(seed, began)
        if pending is not None:
            wait([pending.answer])  # asked for before the end was known; nothing is left to do with it
        return episode

    def _request(self, budget_ms: float, seed: int) -> Future[Chunk]:
        environment = self._environment
        captured_at = self._clock()
        frames, state, instruction = environment.frames(), environment.state(), environment.instruction
        self._report.requests += 1

        def ask() -> Chunk:
            images = {name: encode_jpeg(frame) for name, frame in frames.items()}
            spent_ms = 1000.0 * (self._clock() - captured_at)
            return self._client.act(
                images, state, instruction, budget_ms - spent_ms, captured_at=captured_at, seed=seed
            )

        return self._requester.submit(ask)

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

    def _end(self, seed: int, began: float) -> EpisodeRecord:
        environment, outcome = self._environment, self._environment.outcome()
        took = self._clock() - began
        episode = EpisodeRecord(seed, environment.instruction, environment.goal, outcome.reached, outcome.steps, took)
        self._report.episodes.append(episode)
        self._report.running_s += took
        self._changed("reached it" if episode.success else "did not reach it")
        return episode
