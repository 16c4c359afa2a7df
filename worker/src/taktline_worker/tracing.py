"""The worker's spans: what became of each traced member of a batch, in the member's own trace."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from taktline_protocol import TaktlineError
from taktline_protocol.trace_context import MEMBERS_KEY, parse_members
from taktline_protocol.tracing import Tracing, context_of, parent_context

from taktline_worker.engine import BatchResult, Outcome


class BatchTraces:
    """Writes spans once a batch is over; with no `tracing` it writes none."""

    def __init__(self, tracing: Tracing | None) -> None:
        self._tracing = tracing

    def batch(
        self,
        metadata: Iterable[tuple[str, str | bytes]],
        received: float,
        result: BatchResult,
        revision: str,
    ) -> None:
        """Writes the spans of the members that the caller traces.

        Args:
            metadata: the call's.
            received: monotonic instant, s, at which the call came in.
        """
        if self._tracing is None:
            return
        told = next((value for key, value in metadata if key == MEMBERS_KEY), "")
        members = parse_members(told if isinstance(told, str) else "")
        if not members:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        ended = time.monotonic()
        offset_ns = time.time_ns() - time.monotonic_ns()
        about: dict[str, str | int] = {
            "taktline.batch_size": len(result.outcomes),
            "taktline.bucket": result.bucket,
            "taktline.revision": revision,
        }
        for index, parent in members.items():
            if index >= len(result.outcomes) or not parent.sampled:
                continue
            span = self._tracing.tracer.start_span(
                "worker",
                context=parent_context(parent),
                kind=SpanKind.SERVER,
                start_time=offset_ns + round(1e9 * received),
                attributes={**about, "taktline.code": _code(result.outcomes[index])},
            )
            for name, began_at, ended_at in phases(result, received, ended):
                child = self._tracing.tracer.start_span(
                    name, context=parent_context(context_of(span)), start_time=offset_ns + round(1e9 * began_at)
                )
                child.end(offset_ns + round(1e9 * ended_at))
            outcome = result.outcomes[index]
            if isinstance(outcome, TaktlineError):
                span.set_status(Status(StatusCode.ERROR, str(outcome)))
            span.end(offset_ns + round(1e9 * ended))

    def close(self) -> None:
        """Exports what is left."""
        if self._tracing is not None:
            self._tracing.close()


def phases(result: BatchResult, received: float, ended: float) -> Sequence[tuple[str, float, float]]:
    """(name, begin, end) of a batch's phases: preprocess at its begin, engine and postprocess at its end.

    What is between them is the wait for an engine that was still running another batch.
    """
    if not result.bucket:
        return ()
    prepared = received + result.preprocess_ms / 1e3
    finished = ended - result.postprocess_ms / 1e3
    began = max(prepared, finished - result.engine_ms / 1e3)
    spans = [("preprocess", received, prepared)]
    if began - prepared > 1e-4:
        spans.append(("wait", prepared, began))
    return [*spans, ("engine", began, max(began, finished)), ("postprocess", max(began, finished), ended)]


def _code(outcome: Outcome | Any) -> str:
    return outcome.code.value if isinstance(outcome, TaktlineError) else "ok"
