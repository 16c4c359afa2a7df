"""The clock estimate: the true offset is always within its bound, and the bound is as small as the network allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline.clock import DRIFT, GatewayClock


def test_nothing_is_known_before_the_first_round_trip():
    assert GatewayClock().estimate(0.0) is None


def test_a_symmetric_round_trip_gives_the_offset():
    clock = GatewayClock()
    clock.note(sent=10.0, received_there=110.001, sent_there=110.005, received=10.006)
    found = clock.estimate(10.006)
    assert found.offset_s == pytest.approx(100.0)
    assert found.error_s == pytest.approx(0.001 + DRIFT * 0.006)


def test_the_shortest_round_trip_counts_and_ages():
    clock = GatewayClock()
    clock.note(0.0, 100.050, 100.050, 0.100)
    clock.note(1.0, 101.001, 101.001, 1.002)
    clock.note(2.0, 102.030, 102.030, 2.100)
    assert clock.estimate(2.1).error_s == pytest.approx(0.001 + DRIFT * 1.1)
    # Half a minute later the good one is forgotten, and what came since counts.
    clock.note(31.5, 131.510, 131.510, 31.520)
    assert clock.estimate(31.52).error_s == pytest.approx(0.010 + DRIFT * 0.02)


@pytest.mark.parametrize(
    "stamps", [(0.0, 5.0, 4.0, 1.0), (0.0, 5.0, 7.0, 1.0), (1.0, 5.0, 5.0, 0.0), (0.0, 5.0, float("nan"), 1.0)]
)
def test_stamps_that_cannot_be_true_are_ignored(stamps):
    clock = GatewayClock()
    clock.note(*stamps)
    assert clock.estimate(1.0) is None


def test_another_gateway_has_another_clock():
    clock = GatewayClock()
    clock.note(0.0, 100.0, 100.0, 0.001)
    clock.reset()
    assert clock.estimate(0.0) is None


def test_a_clock_that_has_jumped_is_known_with_the_next_round_trip():
    """As where the robot's machine was suspended for 3 s; the link is not quite what it was at its best."""
    clock = GatewayClock()
    for second in range(10):
        clock.note(second, second + 1000.0005, second + 1000.0005, second + 0.001)
    clock.note(10.0, 1013.001, 1013.001, 10.002)
    found = clock.estimate(10.002)
    assert abs(found.offset_s - 1003.0) <= found.error_s
    clock.note(11.0, 1014.05, 1014.05, 11.1)
    assert clock.estimate(11.1).error_s == pytest.approx(0.001 + DRIFT * 1.1), "which is kept while it agrees"


@settings(max_examples=200, deadline=None)
@given(
    offset=st.floats(-1e5, 1e5),
    drift=st.floats(-DRIFT, DRIFT),
    trips=st.lists(
        st.tuples(st.floats(0.001, 5.0), st.floats(0.0, 0.5), st.floats(0.0, 0.5), st.floats(0.0, 1.0)), min_size=1
    ),
)
def test_the_true_offset_is_within_the_bound_whatever_the_ways_take(offset, drift, trips):
    """Each trip: a pause before it, the way there, the time in the gateway, the way back."""
    clock = GatewayClock()
    now = 0.0

    def there(robot: float) -> float:
        return robot * (1.0 + drift) + offset

    for pause, way_out, inside, way_back in trips:
        sent = now + pause
        arrived = sent + way_out
        left = arrived + inside
        now = left + way_back
        clock.note(sent, there(arrived), there(left), now)
        found = clock.estimate(now)
        slack = 1e-8  # rounding of stamps around 1e5 s
        assert abs(there(now) - now - found.offset_s) <= found.error_s + slack
