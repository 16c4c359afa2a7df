"""The last requests of each policy as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

KEPT = 512
"""Requests of one policy that are remembered; a third of a KiB each."""
_ROBOTS, _WORKERS = 1, 2


class TimedRequest(msgspec.Struct, frozen=True, gc=False):
    """One request that is over. Instants are monotonic, s; None where it did not get so far.

    Attributes:
        outcome: ok, an error code, or client_gone.
        cause: of a missed deadline.
        phases_ms: preprocess, engine and postprocess, as the worker measured them.
        waited_ms: how long its batch waited there, preprocessed, for the one before it.
        priority: as the robot claims it.
        actions: of the chunk that it got.
    """

    request_id: str
    robot: str
    seq: int
    outcome: str
    received_at: float
    ended_at: float
    deadline_at: float | None = None
    observe_ms: float = 0.0
    queued_at: float | None = None
    sent_at: float | None = None
    returned_at: float | None = None
    cause: str | None = None
    margin_ms: float | None = None
    worker: str = ""
    pool: str = ""
    revision: str = ""
    batch_size: int = 0
    inference_ms: float = 0.0
    phases_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    waited_ms: float = 0.0
    trace_id: str = ""
    priority: str = ""
    actions: int = 0


class Timeline:
    """The last `KEPT` requests of one policy."""

    def __init__(self) -> None:
        self._requests: deque[TimedRequest] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._requests)

    def note(self, request: TimedRequest) -> None:
        """Remembers one request."""
        self._requests.append(request)

    def last(self, count: int = KEPT) -> list[TimedRequest]:
        """The last `count` requests, oldest first."""
        return list(self._requests)[-count:] if count > 0 else []


def chrome_trace(policy: str, requests: Iterable[TimedRequest]) -> dict[str, Any]:
    """The requests as a Chrome trace (JSON object format): a track a robot, and a track a worker with its batches.

    Times are microseconds from the first of them, of which `otherData.origin_s` says when it was, by the gateway's
    monotonic clock. An arrow leads from a request's queue to its batch; a request that
    overlaps with an earlier one of its robot gets a track of its own, as slices of one track must nest.
    """
    ordered = sorted(requests, key=lambda request: request.received_at)
    origin = min((r.received_at - r.observe_ms / 1e3 for r in ordered), default=0.0)
    writer = _Writer(origin)
    writer.name_process(_ROBOTS, f"robots of {policy}")
    writer.name_process(_WORKERS, f"workers of {policy}")
    tracks = _Tracks(writer, _ROBOTS)
    batches: dict[tuple[str, float], list[TimedRequest]] = {}
    for request in ordered:
        began = request.received_at - request.observe_ms / 1e3
        ended = max(request.ended_at, request.deadline_at or 0.0) if request.cause else request.ended_at
        _robot_slices(writer, tracks.free(request.robot, began, ended), request)
        if request.sent_at is not None and request.returned_at is not None:
            batches.setdefault((request.worker, request.sent_at), []).append(request)
    workers = _Tracks(writer, _WORKERS)
    for (worker, sent_at), members in sorted(batches.items(), key=lambda item: item[0][1]):
        _batch_slices(writer, workers.free(worker, sent_at, members[0].returned_at or sent_at), members)
    return {"traceEvents": writer.events, "displayTimeUnit": "ms", "otherData": {"policy": policy, "origin_s": origin}}


def _robot_slices(writer: _Writer, track: int, request: TimedRequest) -> None:
    left_s = None if request.deadline_at is None else request.deadline_at - request.received_at
    label = request.outcome if request.cause is None or request.outcome != "ok" else f"late ({request.cause})"
    arguments = {
        "request_id": request.request_id,
        "robot": request.robot,
        "seq": request.seq,
        "outcome": request.outcome,
        "cause": request.cause,
        "margin_ms": request.margin_ms,
        "observe_ms": round(request.observe_ms, 3),
        "budget_ms": None if left_s is None else round(1e3 * left_s, 3),
        "priority": request.priority,
        "actions": request.actions or None,
        "worker": request.worker,
        "pool": request.pool,
        "revision": request.revision,
        "batch_size": request.batch_size,
        "trace_id": request.trace_id,
    }
    shown = {name: value for name, value in arguments.items() if value not in (None, "")}
    began = request.received_at - request.observe_ms / 1e3
    writer.slice(_ROBOTS, track, f"{request.seq}: {label}", began, request.ended_at, shown)
    if request.observe_ms > 0:
        writer.slice(_ROBOTS, track, "observe", began, request.received_at)
    queued = request.queued_at if request.queued_at is not None else request.ended_at
    writer.slice(_ROBOTS, track, "admission", request.received_at, queued)
    if request.queued_at is not None:
        writer.slice(_ROBOTS, track, "queue", queued, request.sent_at or request.ended_at)
    if request.sent_at is not None and request.returned_at is not None:
        writer.slice(_ROBOTS, track, "batch", request.sent_at, request.returned_at)
        writer.slice(_ROBOTS, track, "reply", request.returned_at, request.ended_at)
        writer.arrow("s", _ROBOTS, track, request.request_id, request.sent_at)
    if request.deadline_at is not None:
        writer.mark(_ROBOTS, track, "deadline", request.deadline_at)


def _batch_slices(writer: _Writer, track: int, members: list[TimedRequest]) -> None:
    first = members[0]
    assert first.sent_at is not None
    assert first.returned_at is not None
    about = {
        "batch_size": first.batch_size,
        "revision": first.revision,
        "robots": [member.robot for member in members],
        "request_ids": [member.request_id for member in members],
    }
    writer.slice(_WORKERS, track, f"batch of {first.batch_size}", first.sent_at, first.returned_at, about)
    # The two clocks are not the same: what the worker measured is drawn in the middle of what the gateway waited.
    spare = max(0.0, first.returned_at - first.sent_at - (first.inference_ms + first.waited_ms) / 1e3)
    at = first.sent_at + spare / 2
    before, engine, after = first.phases_ms
    spent = (("preprocess", before), ("wait", first.waited_ms), ("engine", engine), ("postprocess", after))
    for name, spent_ms in spent:
        if spent_ms > 0:
            writer.slice(_WORKERS, track, name, at, min(at + spent_ms / 1e3, first.returned_at))
            at += spent_ms / 1e3
    for member in members:
        writer.arrow("f", _WORKERS, track, member.request_id, first.sent_at)


class _Writer:
    """Chrome trace events; `ts` and `dur` in microseconds from `origin`."""

    def __init__(self, origin: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._origin = origin

    def name_process(self, process: int, name: str) -> None:
        self.events.append({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}})
        sort = {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
        self.events.append(sort)

    def name_track(self, process: int, track: int, name: str) -> None:
        self.events.append({"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": name}})

    def slice(
        self, process: int, track: int, name: str, began: float, ended: float, about: dict[str, Any] | None = None
    ) -> None:
        ts = self._us(began)
        event = {"ph": "X", "pid": process, "tid": track, "name": name, "cat": "taktline", "ts": ts}
        event["dur"] = max(0.0, round(self._us(ended) - ts, 3))
        if about:
            event["args"] = about
        self.events.append(event)

    def mark(self, process: int, track: int, name: str, at: float) -> None:
        event = {"ph": "i", "s": "t", "pid": process, "tid": track, "name": name, "cat": "taktline", "ts": self._us(at)}
        self.events.append(event)

    def arrow(self, phase: str, process: int, track: int, identity: str, at: float) -> None:
        event = {"ph": phase, "pid": process, "tid": track, "name": "to worker", "cat": "taktline", "id": identity}
        event["ts"] = self._us(at)
        if phase == "f":
            event["bp"] = "e"
        self.events.append(event)

    def _us(self, instant: float) -> float:
        return round(1e6 * (instant - self._origin), 3)


class _Tracks:
    """Gives out tracks of one process: one a name, and more of them where its slices overlap."""

    def __init__(self, writer: _Writer, process: int) -> None:
        self._writer = writer
        self._process = process
        self._busy: dict[str, list[tuple[int, float]]] = {}
        self._count = 0

    def free(self, name: str, began: float, ended: float) -> int:
        tracks = self._busy.setdefault(name, [])
        for position, (track, until) in enumerate(tracks):
            if until <= began:
                tracks[position] = (track, ended)
                return track
        self._count += 1
        label = name if not tracks else f"{name} ({len(tracks) + 1})"
        self._writer.name_track(self._process, self._count, label)
        tracks.append((self._count, ended))
        return self._count
