"""W3C trace context: what is well-formed comes back as it was, what is not states nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_protocol.trace_context import TraceContext, format_members, parse_members, parse_traceparent

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
_context = st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


def test_the_standards_own_example():
    context = parse_traceparent(TRACEPARENT)
    assert context == TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, True)
    assert str(context) == TRACEPARENT


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        TRACEPARENT[:-1],
        TRACEPARENT.upper(),
        TRACEPARENT + "-extra",  # version 00 ends here
        "ff" + TRACEPARENT[2:],
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
        "cc" + TRACEPARENT[2:] + "-" + "x" * 300,
        "００" + TRACEPARENT[2:],
    ],
)
def test_what_is_malformed_states_nothing(text):
    assert parse_traceparent(text) is None


def test_a_later_version_is_read_as_far_as_it_is_known():
    context = parse_traceparent("cc" + TRACEPARENT[2:] + "-what-the-future-brings")
    assert context == parse_traceparent(TRACEPARENT)


@given(_context)
def test_round_trip(context):
    assert parse_traceparent(str(context)) == context


@given(st.dictionaries(st.integers(0, 63), _context, max_size=64))
def test_round_trip_of_a_batch(members):
    assert parse_members(format_members(members.items())) == members


@given(st.text())
def test_no_text_breaks_the_parsers(text):
    parse_traceparent(text)
    parse_members(text)
