"""A robot's program that traces itself: what it sends belongs to the span that it is in."""

from __future__ import annotations

import subprocess
import sys

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from taktline.observing import Sender
from taktline.tracing import current_traceparent
from taktline_protocol.trace_context import parse_traceparent

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("robot")


def observe() -> str:
    return Sender("arm").observe({}, [0.0], "go", 100.0).traceparent


def test_an_observation_names_the_span_that_it_is_made_in():
    with TRACER.start_as_current_span("control cycle") as span:
        sent = parse_traceparent(observe())
    context = span.get_span_context()
    assert sent is not None
    assert (sent.trace_id, sent.span_id, sent.sampled) == (context.trace_id, context.span_id, True)


def test_outside_of_a_span_nothing_is_named():
    assert observe() == ""


def test_what_is_not_sampled_says_so():
    unsampled = trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(unsampled)):
        assert current_traceparent() == f"00-{1:032x}-{2:016x}-00"


def test_the_sdk_brings_no_tracing_library():
    code = (
        "import sys, taktline; from taktline.observing import Sender\n"
        "assert Sender('arm').observe({}, [0.0], 'go', 100.0).traceparent == ''\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
