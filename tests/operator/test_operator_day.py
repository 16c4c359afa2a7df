"""A small piece of the simulated day: the hours before the early shift and its first minutes."""

from __future__ import annotations

from taktline_operator.scaling_spec import Scaling

from benchmarks.operator.day import COLD_START_S, robots_at, simulate
from benchmarks.operator.scaling import CALENDAR, operator_scaler

UNTIL_S = 3600 * 6 + 600


def test_a_known_shift_is_met_and_an_unknown_one_costs_its_first_minute_only() -> None:
    plan = Scaling(lead_seconds=int(COLD_START_S) + 60)
    unknown = simulate(operator_scaler(plan), 1, period_s=5.0, start=1, until_s=UNTIL_S)
    known = simulate(
        operator_scaler(Scaling(lead_seconds=int(COLD_START_S) + 60, shifts=CALENDAR)),
        1,
        period_s=5.0,
        start=1,
        until_s=UNTIL_S,
    )
    assert unknown.requests == known.requests > 50_000
    assert known.missed < 0.001 * known.requests
    assert unknown.missed > 10 * known.missed
    shift = [index for index, hour in enumerate(unknown.minutes) if hour > 6.0 and unknown.misses[index] > 20]
    assert len(shift) <= 4  # minutes
    assert sum(known.workers[: 5 * 60]) < 1.1 * 5 * 60  # at night one is enough


def test_the_day_has_three_shifts_and_two_breaks() -> None:
    hours = (3, 8, 10.25, 12.1, 16, 18.25, 23)
    assert [round(robots_at(3600 * hour)) for hour in hours] == [3, 24, 5, 12, 18, 5, 3]
