"""Series without locks say what the library's own would, exemplars included."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.openmetrics.exposition import generate_latest
from taktline_gateway.series import LoopCounter, LoopHistogram

disable_created_metrics()
BUCKETS = (-5, 0, 0.5, 10)
AMOUNTS = st.sampled_from([*BUCKETS, -7.0, 0.25, 11.0, float("inf"), float("nan")]) | st.floats(-20, 20)
EXEMPLARS = st.none() | st.just({"trace_id": "0123"})
STEPS = st.lists(st.tuples(st.sampled_from(["a", "b"]), AMOUNTS, EXEMPLARS), max_size=20)


def told(counter, histogram, steps):
    """What a scrape reads after these steps, without the instants of exemplars."""
    registry = CollectorRegistry()
    counted = counter("requests", "help", ["who"], registry=registry)
    observed = histogram("latency", "help", ["who"], buckets=BUCKETS, registry=registry)
    for who, amount, exemplar in steps:
        observed.labels(who).observe(amount, exemplar)
        if amount > 0:
            counted.labels(who).inc(amount, exemplar)
    return re.sub(r"(# \{[^}]*\} \S+) \S+", r"\1", generate_latest(registry).decode())


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_the_same_exposition_as_the_librarys(steps):
    assert told(LoopCounter, LoopHistogram, steps) == told(Counter, Histogram, steps)


def test_a_counter_only_grows():
    with pytest.raises(ValueError, match="non-negative"):
        LoopCounter("requests", "help", registry=CollectorRegistry()).inc(-1)
