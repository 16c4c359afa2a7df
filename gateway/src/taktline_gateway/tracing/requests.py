"""The spans of one request: admission, queue, the batch on a worker, reply.

A request that is not sampled has no trace at all, so what it costs is one sampling decision; where tracing is off, one
comparison with None. Spans are made when the request is over, from the instants that it is measured by anyway; only
the two whose ids other processes need (the request's own and the batch's) begin earlier.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from taktline_protocol.trace_context import HEADER, MEMBERS_KEY, TraceContext, format_members, parse_traceparent
from taktline_protocol.tracing import Tracing, context_of, parent_context

if TYPE_CHECKING:
    from opentelemetry.trace import Span

MAX_LINKS = 16


class RequestTrace:
    """One sampled request. Instants are monotonic, s."""

    def __init__(self, tracing: Tracing, span: Span, offset_ns: int, received_at: float) -> None:
        self._tracing = tracing
        self._span = span
        self._offset_ns = offset_ns
        self._received_at = received_at
        self._sent = False
        self._batch_name = "batch"

    @property
    def context(self) -> TraceContext:
        """The request's own span."""
        return context_of(self._span)

    def mirrored(self) -> RequestTrace:
        """The same trace for the request's copy that a candidate gets, whose answer nobody waits for."""
        copy = RequestTrace(self._tracing, self._span, self._offset_ns, self._received_at)
        copy._batch_name = "mirrored batch"
        return copy

    def sent(self, sent_at: float, worker: str, size: int, others: Sequence[TraceContext]) -> BatchSpan:
        """The request went to a worker, in a batch with `others`; a hedged one has several such spans."""
        from opentelemetry.trace import Link, SpanKind
        from opentelemetry.trace.propagation import get_current_span

        links = [
            Link(get_current_span(parent_context(other)).get_span_context())
            for other in others[:MAX_LINKS]
            if other.trace_id != self.context.trace_id
        ]
        self._sent = True
        span = self._tracing.tracer.start_span(
            self._batch_name,
            context=parent_context(self.context),
            kind=SpanKind.CLIENT,
            start_time=self._ns(sent_at),
            attributes={"taktline.worker": worker, "taktline.batch_size": size, "rpc.system": "grpc"},
            links=links,
        )
        return BatchSpan(span, self._offset_ns)

    def answered(
        self, queued_at: float, sent_at: float, returned_at: float, answered_at: float, **attributes: Any
    ) -> None:
        """The request has its chunk."""
        self._child("admission", self._received_at, queued_at)
        self._child("queue", queued_at, sent_at)
        self._child("reply", returned_at, answered_at)
        self._span.set_attributes({f"taktline.{name}": value for name, value in attributes.items()})
        self._span.end(self._ns(answered_at))

    def ended(self, code: str, message: str, queued_at: float | None) -> None:
        """The request got a typed error, or its robot went away."""
        now = time.monotonic()
        self._child("admission", self._received_at, now if queued_at is None else queued_at)
        if queued_at is not None and not self._sent:
            self._child("queue", queued_at, now)
        self._span.set_attribute("taktline.code", code)
        _fail(self._span, f"{code}: {message}" if message else code)
        self._span.end(self._ns(now))

    def _child(self, name: str, began_at: float, ended_at: float) -> None:
        span = self._tracing.tracer.start_span(
            name, context=parent_context(self.context), start_time=self._ns(began_at)
        )
        span.end(self._ns(max(began_at, ended_at)))

    def _ns(self, instant: float) -> int:
        return self._offset_ns + round(1e9 * instant)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestTraces:
    """Begins traces; with no `tracing` it begins none."""

    tracing: Tracing | None

    def begin(self, traceparent: str, received_at: float, **attributes: str | int | float) -> RequestTrace | None:
        """The trace of a request that arrived at `received_at`; None where it is not sampled.

        A robot's own decision counts: it is sampled where its `traceparent` says so, unless the sampler is told to
        overrule it. `attributes` are named as in the log.
        """
        if self.tracing is None:
            return None
        from opentelemetry.trace import SpanKind

        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self.tracing.tracer.start_span(
            "act",
            context=parent_context(parse_traceparent(traceparent)),
            kind=SpanKind.SERVER,
            start_time=offset_ns + round(1e9 * received_at),
            attributes={f"taktline.{name}": value for name, value in attributes.items()},
        )
        return RequestTrace(self.tracing, span, offset_ns, received_at) if span.is_recording() else None

    def close(self) -> None:
        """Exports what is left."""
        if self.tracing is not None:
            self.tracing.close()


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSpan:
    """One batch in the trace of one of its members."""

    _span: Span
    _offset_ns: int

    @property
    def context(self) -> TraceContext:
        """What the worker's spans are children of."""
        return context_of(self._span)

    def end(self, error: str) -> None:
        """The batch came back, or failed with `error`."""
        if error:
            _fail(self._span, error)
        self._span.end(self._offset_ns + round(1e9 * time.monotonic()))


@dataclasses.dataclass(frozen=True, slots=True)
class BatchTrace:
    """One batch in the traces of all its traced members.

    Attributes:
        metadata: what tells the worker; None where no member is traced.
    """

    metadata: tuple[tuple[str, str], ...] | None = None
    _spans: tuple[BatchSpan, ...] = ()

    def end(self, error: str = "") -> None:
        """The batch came back, or failed with `error`."""
        for span in self._spans:
            span.end(error)


_UNTRACED = BatchTrace()


def begin_batch(members: Sequence[RequestTrace | None], sent_at: float, worker: str) -> BatchTrace:
    """Begins the batch's span in the trace of each traced member."""
    traced = [(index, trace) for index, trace in enumerate(members) if trace is not None]
    if not traced:
        return _UNTRACED
    contexts = [trace.context for _, trace in traced]
    spans = [(index, trace.sent(sent_at, worker, len(members), contexts)) for index, trace in traced]
    told = [(index, span.context) for index, span in spans]
    metadata = ((HEADER, str(told[0][1])), (MEMBERS_KEY, format_members(told)))
    return BatchTrace(metadata, tuple(span for _, span in spans))


def _fail(span: Span, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, reason))
