"""The trace that a robot's program is in, for programs that use OpenTelemetry; it needs no library of its own."""

from __future__ import annotations

import sys

from taktline_protocol.trace_context import TraceContext


def current_traceparent() -> str:
    """W3C `traceparent` of the current OpenTelemetry span; empty where the program traces nothing.

    A program that never imported OpenTelemetry has no span, so it is looked for only where it was.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return str(TraceContext(context.trace_id, context.span_id, context.trace_flags.sampled))
