"""What is expected by the sorted instants is what a sum over all robots says; a rhythm is a line through instants."""

from __future__ import annotations

import random
import statistics
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway import rhythms
from taktline_gateway.rhythms import BEATS, OFF_BEAT, OVERDUE, PRESENT, RHYTHM_MEMORY_S, Rhythm, Rhythms

KEPT = 4


def by_sum(came, seconds, now):
    """(expected, share of strangers) of the robots that came last: the same question robot by robot."""
    latest = sorted(came.values(), key=lambda one: -one.came)[:KEPT]
    robots = [one for one in latest if now - one.came <= RHYTHM_MEMORY_S]
    expected, strangers = 0.0, 0
    for one in robots:
        if not one.period_s:
            strangers += 1
        elif now < one.expected <= now + seconds:
            expected += 1.0
        elif one.expected <= now < one.expected + OVERDUE * one.period_s:
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
            found.note(("", str(robot)), now, 0.5)
            before = came.get(robot)
            came[robot] = Rhythm(now, 0.5) if before is None else before.after(now, 0.5)
            for other in sorted(came, key=lambda one: -came[one].came)[KEPT:]:
                del came[other]
        assert len(found._expected) == len(found._given_up) <= KEPT
        following = list(zip(found._expected, found._left, strict=True))
        assert following == sorted(following)
        expected, strangers = by_sum(came, seconds, now + later)
        assert found.expected_within(seconds, now + later) == (expected, pytest.approx(strangers))


def test_nothing_is_expected_of_nobody():
    assert Rhythms().expected_within(1.0, 0.0) == (0.0, 0.0)
    nobody = Rhythms().coming(0.0, 1.0, 8, 8)
    assert (nobody.at, nobody.due, len(nobody.spread_s)) == ([], [], 0)
    alone = Rhythms()
    alone.note(("", "a"), 0.0, 0.5)
    assert alone.coming(0.0, 9.0, 8, 8).at == []
    alone.note(("", "a"), 1.0, 0.5)
    assert alone.expected_within(1.0, 1.5) == (1.0, 0.0)
    assert alone.expected_within(1.0, 2.0 + RHYTHM_MEMORY_S) == (0.0, 0.0)
    assert not alone._expected
    assert not alone._given_up


def after(instants):
    robot = Rhythm(instants[0], 0.5)
    for instant in instants[1:]:
        robot = robot.after(instant, 0.5)
    return robot


@settings(deadline=None)
@given(st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=BEATS))
def test_a_rhythm_is_the_line_of_least_squares_through_the_instants(offs):
    instants = [turn + off for turn, off in enumerate(offs)]
    robot = after(instants)
    slope, first = np.polyfit(range(len(offs)), instants, 1)
    assert robot.beats == len(offs)
    assert robot.period_s == pytest.approx(slope)
    assert robot.expected == pytest.approx(first + slope * len(offs))


def test_a_rhythm_of_many_follows_a_period_that_changes():
    robot = after([*(0.1 * turn for turn in range(100)), *(10.0 + 0.102 * turn for turn in range(100))])
    assert robot.beats == BEATS
    assert robot.period_s == pytest.approx(0.102, rel=2e-3)


def test_a_pause_begins_a_new_rhythm():
    robot = after([0.0, 0.1, 0.2, 0.3, 0.41 + OFF_BEAT * 0.1])
    assert (robot.beats, robot.period_s) == (2, pytest.approx(0.11 + OFF_BEAT * 0.1))


def fleet(robots, sigma_s, *, rounds=60, seed=5):
    """Robots that came in step, once a second, and are about to come again at `rounds`."""
    rng, found = random.Random(seed), Rhythms()
    for turn in range(rounds):
        coming = sorted((turn + rng.gauss(0.0, sigma_s), robot) for robot in range(robots))
        for at, robot in coming:
            found.note(("", str(robot)), at, 0.5)
    return found, rng


def test_who_is_missing_is_expected_as_order_statistics_say():
    sigma_s, robots = 0.01, 8
    found, rng = fleet(robots, sigma_s)
    named = found.coming(59.5, 60.5, 32, 32)
    days = [sorted(60.0 + rng.gauss(0.0, sigma_s) for _ in range(robots)) for _ in range(4000)]
    assert len(named.spread_s) == robots
    spreads = map(named.spread_s.__getitem__, range(robots))
    for at, spread_s, due, on_the_day in zip(named.at, spreads, named.due, zip(*days, strict=True), strict=True):
        assert at == pytest.approx(statistics.fmean(on_the_day), abs=0.5 * sigma_s)
        assert spread_s == pytest.approx(statistics.stdev(on_the_day), rel=0.35)
        assert due == at + 0.5


def test_beyond_the_first_ones_the_rhythm_alone_says_when():
    found, _ = fleet(8, 0.01)
    named, exact = found.coming(59.5, 60.5, 32, 3), found.coming(59.5, 60.5, 32, 8)
    assert len(named.spread_s) == 3
    assert named.at[:3] == exact.at[:3]
    assert named.at[3:] == list(found._expected[3:])
    assert found.coming(60.015, 60.5, 32, 0).at == [60.015] * len(found.coming(60.015, 60.5, 32, 0).at) != []


def test_who_has_not_come_yet_comes_later_and_is_given_up_in_the_end():
    found, _ = fleet(8, 0.01)
    last = found.coming(59.5, 60.5, 1, 1).at[0]
    for now in (60.0, 60.01, 60.02):
        at = found.coming(now, 60.5, 1, 1).at[0]
        assert at > max(now, last)
        last = at
    assert found.coming(60.0 + (PRESENT + 1.0) * 0.012, 60.5, 8, 8).at == []


def test_only_those_until_then_and_no_more_than_asked_for():
    found = Rhythms()
    for turn in range(4):
        for robot in range(5):
            found.note(("", str(robot)), turn + 0.1 * robot, 0.3)
    assert [round(at, 2) for at in found.coming(3.9, 4.25, 9, 9).at] == [4.0, 4.1, 4.2]
    assert [round(due, 2) for due in found.coming(3.9, 4.25, 2, 9).due] == [4.3, 4.4]


@pytest.mark.parametrize("every", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("now", [59.5, 59.995, 60.01])
def test_a_worker_is_told_its_share_of_those_who_come(every, now):
    found, _ = fleet(10, 0.01)
    everybody, told = found.coming(now, 60.5, 32, 7), found.coming(now, 60.5, 32, 7, every)
    assert told.at == everybody.at[every - 1 :: every]
    assert told.due == everybody.due[every - 1 :: every]
    numbers = range(every - 1, len(everybody.spread_s), every)
    assert [told.spread_s[index] for index in range(len(told.spread_s))] == [everybody.spread_s[n] for n in numbers]
