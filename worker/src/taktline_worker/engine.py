"""One loaded policy and the thread that runs it: batches in, one outcome a row out, never more than one at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.search_work import SearchWork

from taktline_worker.adapter import (
    Adapter,
    Answer,
    CheaperAdapter,
    Closable,
    ForesightedAdapter,
    Frame,
    LaunchingAdapter,
    Level,
    RunningBatch,
    SearchingAdapter,
    as_one,
)
from taktline_worker.cores import usable_cores
from taktline_worker.jpeg_threads import BegunFrame
from taktline_worker.observation import RobotInput
from taktline_worker.row_errors import expired, no_rtc, no_video, own_error

logger = logging.getLogger(__name__)

Outcome = Answer | TaktlineError

FULL = Level()
LAUNCHED = 2
"""Batches on the device at most: the one that runs, and one behind it."""
_CALIBRATION_RUNS = 20
_CALIBRATION_MIN_RUNS = 3
_CALIBRATION_SECONDS = 1.0


class BatchDroppedError(Exception):
    """A batch whose deadline was over, or whose caller had gone, before the engine began it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One observation of a batch.

    Attributes:
        observation: what the robot sent, or the error that reading it gave.
        expires_at: monotonic instant after which an answer is of no use; None = never.
    """

    observation: RobotInput | TaktlineError
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Outcomes in the order of the items, and where the time went, in ms; `waited_ms` is for the batch before it."""

    outcomes: tuple[Outcome, ...]
    bucket: int
    preprocess_ms: float
    engine_ms: float
    postprocess_ms: float
    waited_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketTiming:
    """T_sync of one bucket: median and p99 in ms over `runs` runs of a full batch."""

    batch: int
    median_ms: float
    p99_ms: float
    runs: int


@dataclass(slots=True)
class _Part:
    """Rows that run together, with their places in the batch and where their time went."""

    adapter: Adapter
    indices: list[int]
    rows: list[Any]
    bucket: int
    running: RunningBatch | None = None
    launched_at: float = 0.0
    engine_s: float = 0.0
    post_s: float = 0.0
    waited_s: float = 0.0


class Engine:
    """Runs batches of one policy.

    Callers' threads check, tokenise, draft and wait; a small pool decodes images; one thread of its own runs the
    network. An adapter that can launch a batch behind the one that runs lets that thread do no more, or the caller's
    where nobody else asks; callers wait for their own.

    Args:
        buckets: batch sizes, ascending; a larger batch is run in parts.
        decode_threads: threads that decode and resize images; 0 takes one a core, at most 8.
    """

    def __init__(self, adapter: Adapter, buckets: Sequence[int], decode_threads: int = 0) -> None:
        self.adapter = adapter
        self.buckets = tuple(sorted(set(buckets)))
        self.cheaper: dict[Level, tuple[BucketTiming, ...]] = {}
        """What `calibrate` measured of each level below the policy's own."""
        self.search_work: SearchWork | None = None
        """What it found of a planner's rounds; None of any other policy."""
        self._begin_frames = adapter.begin_frames if isinstance(adapter, ForesightedAdapter) else None
        self._levels = dict(adapter.cheaper) if isinstance(adapter, CheaperAdapter) else {}
        threads = decode_threads or min(8, usable_cores())
        self._decoders = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._asking, self._turn, self._asked = threading.Lock(), threading.Lock(), 0
        self._uncollected = 0  # batches that have had their turn, and whose callers have not got them yet
        self._launches = False  # whether the adapter launched what it was last given
        self._launched: deque[RunningBatch] = deque()  # the last part of each batch; whose turn it is may touch it

    def begin_frames(self, frames: Sequence[tuple[str, Frame]]) -> list[BegunFrame | None]:
        """What of a batch's frames, by camera, need not wait until it is read: `EncodedImage.begun` of each."""
        if self._begin_frames is not None:
            try:
                return self._begin_frames(frames)
            except Exception as error:  # each observation begins its own, and is told what is wrong with it
                logger.error("beginning frames failed", exc_info=error)
        return [None] * len(frames)

    def infer(
        self,
        items: Sequence[Item],
        deadline: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        level: Level = FULL,
    ) -> BatchResult:
        """Runs one batch; a bad item gets its own error and harms no neighbour.

        Args:
            level: one of those in `cheaper`, or the policy's own.
            deadline: monotonic instant of the batch; past it, a batch that has not begun is dropped.
            cancelled: asked when the batch's turn comes; a true answer drops it.

        Raises:
            BatchDroppedError: the batch was not run.
            KeyError: there is no such level.
        """
        return self.begin(items, deadline, cancelled, level)()

    @property
    def launches_at_once(self) -> bool:
        """Whether `begin` would launch a batch rather than run it, and wait for no other that asks or runs."""
        return self._launches and not self._asked and self._uncollected < LAUNCHED

    def begin(
        self,
        items: Sequence[Item],
        deadline: float | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        level: Level = FULL,
        since: float | None = None,
    ) -> Callable[[], BatchResult]:
        """As `infer`, up to the launch; what it gives waits for the batch, in any thread.

        Args:
            since: monotonic instant from which preprocessing counts; now where None.
        """
        adapter = self.adapter if level == FULL else self._levels[level]
        started = time.monotonic() if since is None else since
        outcomes: list[Outcome | None] = [None] * len(items)
        rows, draft = self._prepare(items, outcomes, adapter)
        prepared = turn = time.monotonic()
        parts: list[_Part] = []
        if rows:
            turn, parts = self._in_turn(items, rows, outcomes, deadline, cancelled, adapter, draft)
        return partial(self._end, outcomes, parts, started, prepared, turn)

    def _end(
        self, outcomes: list[Outcome | None], parts: list[_Part], started: float, prepared: float, turn: float
    ) -> BatchResult:
        """Waits for what has been launched; the instants are those of the batch's beginning, rows and turn."""
        bucket, engine_s, post_s, waited_s, ended = 0, 0.0, 0.0, turn - prepared, prepared
        try:
            for part in parts:
                ended = self._collect(part, outcomes, ended)
                bucket = max(bucket, part.bucket)
                engine_s, post_s, waited_s = engine_s + part.engine_s, post_s + part.post_s, waited_s + part.waited_s
        finally:
            if parts:
                with self._asking:
                    self._uncollected -= 1
        if parts:
            ended = time.monotonic()
        assert all(outcome is not None for outcome in outcomes)
        return BatchResult(
            outcomes=tuple(outcome for outcome in outcomes if outcome is not None),
            bucket=bucket,
            preprocess_ms=max(0.0, ended - started - engine_s - post_s - waited_s) * 1000.0,
            engine_ms=engine_s * 1000.0,
            postprocess_ms=post_s * 1000.0,
            waited_ms=waited_s * 1000.0,
        )

    def calibrate(self) -> tuple[BucketTiming, ...]:
        """Measures T_sync of every bucket with full rows; the first, unmeasured run of each is the warm-up.

        Runs in the caller's thread, so that a signal can end it: call it before the first `infer`.
        """
        self.cheaper = {level: self._measured(adapter) for level, adapter in self._levels.items()}
        timings = self._measured(self.adapter)
        planner: SearchingAdapter | None = as_one(self.adapter, SearchingAdapter)
        if planner is not None:
            short = _calibrate_bucket(self.adapter, self.buckets[0], planner.one_round_row())
            self.search_work = planner.search_work(timings[0].median_ms, short.median_ms)
        return timings

    def _measured(self, adapter: Adapter) -> tuple[BucketTiming, ...]:
        row = adapter.largest_row()
        return tuple(_calibrate_bucket(adapter, bucket, row) for bucket in self.buckets)

    def close(self) -> None:
        """Finishes what runs and stops the threads."""
        self._decoders.shutdown(wait=True)
        self._lane.shutdown(wait=True)
        with self._turn:  # a batch may run in its caller's own thread
            if isinstance(self.adapter, Closable):
                self.adapter.close()

    def _prepare(
        self, items: Sequence[Item], outcomes: list[Outcome | None], adapter: Adapter
    ) -> tuple[list[tuple[int, Any]], Any]:
        """(index, row) of the good items, and the adapter's draft of their batch where they are all and run together.

        All images of the batch are decoded side by side, and meanwhile this thread does the rest: each other one that
        it would have to wake costs more than it takes over.
        """
        pending = []
        for index, item in enumerate(items):
            try:
                if isinstance(item.observation, TaktlineError):
                    raise item.observation
                if item.observation.rtc is not None and not adapter.description.rtc:
                    raise no_rtc(adapter.description.family)
                if item.observation.imagine is not None and not adapter.description.imagines:
                    raise no_video(adapter.description.family)
                pending.append((index, adapter.begin(item.observation, self._decoders)))
            except Exception as error:
                outcomes[index] = own_error(error)
        draft = None
        launching: LaunchingAdapter | None = as_one(adapter, LaunchingAdapter)
        if pending and len(pending) <= self.buckets[-1] and launching is not None:
            try:
                draft = launching.draft([row for _, row in pending])
            except Exception as error:  # the launch does it all, and says whose fault it is
                logger.error("drafting a batch failed", exc_info=error)
        rows = []
        for index, row in pending:
            try:
                rows.append((index, row.result()))
            except Exception as error:
                outcomes[index] = own_error(error)
        return rows, draft if len(rows) == len(pending) else None

    def _in_turn(self, *batch: Any) -> tuple[float, list[_Part]]:
        """`_run`, one batch at a time and in the order of asking.

        A batch that is alone and need only be launched is launched by its own thread: waking another one, and being
        woken by it, takes longer than the launch. What computes on the CPU keeps to one thread, which has its helpers.
        """
        with self._asking:
            here = self._launches and not self._asked and self._turn.acquire(blocking=False)
            job = None if here else self._lane.submit(self._run_next, *batch)
            self._asked += 1
        try:
            if job is not None:
                return job.result()
            try:
                return self._run(*batch)
            finally:
                self._turn.release()
        finally:
            with self._asking:
                self._asked -= 1

    def _run_next(self, *batch: Any) -> tuple[float, list[_Part]]:
        with self._turn:
            return self._run(*batch)

    def _run(
        self,
        items: Sequence[Item],
        rows: list[tuple[int, Any]],
        outcomes: list[Outcome | None],
        deadline: float | None,
        cancelled: Callable[[], bool],
        adapter: Adapter,
        draft: Any,
    ) -> tuple[float, list[_Part]]:
        """The instant at which the batch's turn came, and its parts: run, or launched."""
        while len(self._launched) >= LAUNCHED:  # what is launched can be dropped no more
            with contextlib.suppress(Exception):  # its own caller is told
                self._launched.popleft().wait()
        now = time.monotonic()
        if cancelled() or (deadline is not None and now >= deadline):
            raise BatchDroppedError
        live = []
        for index, row in rows:
            expires = items[index].expires_at
            if expires is not None and now >= expires:
                outcomes[index] = expired(now - expires)
            else:
                live.append((index, row))
        parts = []
        for start in range(0, len(live), self.buckets[-1]):
            members = live[start : start + self.buckets[-1]]
            size = next(bucket for bucket in self.buckets if bucket >= len(members))
            parts.append(_Part(adapter, [index for index, _ in members], [row for _, row in members], size))
            self._begin(parts[-1], outcomes, draft if len(members) == len(rows) else None)
        if parts and parts[-1].running is not None:
            self._launched.append(parts[-1].running)
        if parts:
            with self._asking:
                self._uncollected += 1
        return now, parts

    def _begin(self, part: _Part, outcomes: list[Outcome | None], draft: Any) -> None:
        """Launches a part behind what runs; where that cannot be, runs it."""
        try:
            launching: LaunchingAdapter | None = as_one(part.adapter, LaunchingAdapter)
            if launching is not None:
                part.running = launching.launch(part.rows, part.bucket, draft)
                part.launched_at = time.monotonic()
                self._launches = part.running is not None
            if part.running is None:
                began = time.monotonic()
                outputs = part.adapter.run(part.rows, part.bucket)
                part.engine_s = time.monotonic() - began
                self._finish(part, outputs, outcomes)
        except Exception as error:
            _fail(part, error, outcomes)

    def _collect(self, part: _Part, outcomes: list[Outcome | None], after: float) -> float:
        """Waits for a part that was launched, before the instant `after` or later; when it had ended."""
        ended = time.monotonic()
        if part.running is None:
            return ended
        try:
            outputs = part.running.wait()
            ended = time.monotonic()
            part.engine_s = part.running.seconds
            part.waited_s = max(0.0, ended - part.engine_s - max(part.launched_at, after))
            self._finish(part, outputs, outcomes)
        except Exception as error:
            _fail(part, error, outcomes)
        return ended

    def _finish(self, part: _Part, outputs: Any, outcomes: list[Outcome | None]) -> None:
        began = time.monotonic()
        answers = list(part.adapter.finish(part.rows, outputs))
        if len(answers) != len(part.rows):
            raise RuntimeError(f"{len(answers)} answers came for {len(part.rows)} rows")
        for index, answer in zip(part.indices, answers, strict=True):
            outcomes[index] = answer
        part.post_s = time.monotonic() - began


def _calibrate_bucket(adapter: Adapter, bucket: int, row: Any) -> BucketTiming:
    rows = [row] * bucket
    adapter.finish(rows, adapter.run(rows, bucket))
    times: list[float] = []
    while len(times) < _CALIBRATION_MIN_RUNS or (
        len(times) < _CALIBRATION_RUNS and sum(times) < _CALIBRATION_SECONDS * 1000.0
    ):
        began = time.monotonic()
        adapter.finish(rows, adapter.run(rows, bucket))
        times.append((time.monotonic() - began) * 1000.0)
    return BucketTiming(bucket, float(np.median(times)), float(np.percentile(times, 99)), len(times))


def _fail(part: _Part, error: Exception, outcomes: list[Outcome | None]) -> None:
    """A failing engine is an error of each row."""
    logger.error("the engine failed", exc_info=error, extra={"batch": len(part.rows)})
    failure = TaktlineError(
        ErrorCode.WORKER_FAILED, f"the engine failed: {error}", "retry; if it repeats, read the worker's log"
    )
    for index in part.indices:
        outcomes[index] = failure
