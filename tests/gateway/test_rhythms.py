"""What is expected by the sorted instants is what a sum over all robots says."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway import rhythms
from taktline_gateway.rhythms import OVERDUE, RHYTHM_MEMORY_S, Rhythms

KEPT = 4


def by_sum(came, seconds, now):
    """(expected, share of strangers) of the robots that came last: the same question robot by robot."""
    latest = sorted(came.items(), key=lambda item: -item[1][-1][1])[:KEPT]
    robots = [[at for _, at in history] for _, history in latest]
    robots = [history for history in robots if now - history[-1] <= RHYTHM_MEMORY_S]
    expected, strangers = 0.0, 0
    for history in robots:
        period = history[-1] - history[-2] if len(history) > 1 else 0.0
        due = history[-1] + period
        if not period:
            strangers += 1
        elif now < due <= now + seconds:
            expected += 1.0
        elif due <= now < history[-1] + (1.0 + OVERDUE) * period:
            expected += 0.5
    return expected, strangers / len(robots) if robots else 0.0


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3000)), min_size=1, max_size=40),
    st.floats(0.0, 30.0),
    st.floats(0.0, 5.0),
)
def test_what_is_expected_is_the_sum_over_the_robots_that_came_last(steps, later, seconds):
    """A robot that was forgotten for others and comes again is a stranger again."""
    now, came = 0.0, {}
    with mock.patch.object(rhythms, "RHYTHMS", KEPT):
        found = Rhythms()
        for robot, gap_ms in steps:
            now += gap_ms / 1e3
            found.note(("", str(robot)), now)
            came.setdefault(robot, []).append((robot, now))
            for other in sorted(came, key=lambda one: -came[one][-1][1])[KEPT:]:
                del came[other]
        assert len(found._next) == len(found._given_up) <= KEPT
        assert found._next == sorted(found._next)
        expected, strangers = by_sum(came, seconds, now + later)
        assert found.expected_within(seconds, now + later) == (expected, pytest.approx(strangers))


def test_nothing_is_expected_of_nobody():
    assert Rhythms().expected_within(1.0, 0.0) == (0.0, 0.0)
    alone = Rhythms()
    alone.note(("", "a"), 0.0)
    alone.note(("", "a"), 1.0)
    assert alone.expected_within(1.0, 1.5) == (1.0, 0.0)
    assert alone.expected_within(1.0, 2.0 + RHYTHM_MEMORY_S) == (0.0, 0.0)
    assert not alone._next
    assert not alone._given_up
