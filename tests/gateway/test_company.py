"""Who is waited for, where it is known when each robot comes: with the simulated clock, and in many bursts."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.arrivals import Arrivals
from taktline_gateway.company import Company
from taktline_gateway.scheduler import Scheduler

from tests.gateway.simulated_clock import Simulation, scheduler, service_times, ticket

WAIT_S = 0.005
GROOT_MS = {1: 6.6, 2: 8.2, 4: 11.4, 8: 17.7}
"""Eight cost little more than four: two batches of four take 22.8 ms."""
PI_MS = {1: 10.7, 2: 20.1, 4: 32.5, 8: 57.1}
"""Two cost nearly as much as two batches of one."""


def bursts(robots, period, budget, *, rounds, sigma=0.002, seed=1, absent=()):
    """Robots that ask in step, each up to a few ms late; those in `absent` have left at half of the rounds."""
    rng = random.Random(seed)
    made = []
    for turn in range(rounds):
        for robot in range(robots):
            at = turn * period + abs(rng.gauss(0.0, sigma))
            if turn < rounds // 2 or robot not in absent:
                made.append(ticket(robot, at + budget, at=at, seq=turn))
    return made


def played(arrivals, *, max_wait_s=WAIT_S, **options):
    simulation = Simulation(scheduler(max_wait_s=max_wait_s, tail=1.07, **options))
    simulation.run(arrivals)
    on_time = sum(end <= one.deadline for one, end in simulation.done.items())
    return on_time / len(arrivals), simulation


def sizes(simulation, since):
    return [len(batch.tickets) for batch in simulation.batches if batch.sent_at >= since]


def test_all_are_waited_for_where_one_batch_of_all_is_in_time():
    share, simulation = played(bursts(8, 0.029, 0.0232, rounds=300), table=GROOT_MS)
    alone, _ = played(bursts(8, 0.029, 0.0232, rounds=300), table=GROOT_MS, max_wait_s=0.0)
    late = sizes(simulation, 30 * 0.029)
    assert late.count(8) > 0.7 * (300 - 30)
    assert share > 0.975
    assert alone < 0.8


def test_nobody_is_waited_for_where_time_is_too_short_for_all_and_batches_gain_little():
    """Eight with 51 ms: whoever is first goes alone, and those who come meanwhile share what is left."""
    share, simulation = played(bursts(8, 0.0637, 0.0509, rounds=300), table=PI_MS)
    alone, _ = played(bursts(8, 0.0637, 0.0509, rounds=300), table=PI_MS, max_wait_s=0.0)
    assert share == pytest.approx(alone, abs=0.01)
    assert share > 0.68
    starts = [batch for batch in simulation.batches if batch.sent_at >= 3.0 and len(batch.tickets) == 1]
    assert sum(batch.sent_at == batch.tickets[0].arrived_at for batch in starts) > 0.5 * (300 - 47)


def test_who_is_here_goes_when_the_first_could_not_bear_the_wait_any_longer():
    """A batch of eight leaves 3.4 ms to wait: seven in it, or the last seven, are more than four and then two."""
    table = {1: 20.49, 2: 26.49, 4: 38.49, 8: 62.5}
    arrivals = bursts(8, 0.0823, 0.0659, rounds=200)
    simulation = Simulation(scheduler(max_wait_s=WAIT_S, table=table))
    simulation.run(arrivals)
    assert sum(end <= one.deadline for one, end in simulation.done.items()) > 0.9 * len(arrivals)
    late = sizes(simulation, 30 * 0.0823)
    assert late.count(7) + late.count(8) > 0.7 * (200 - 30)


def test_a_wait_ends_with_the_last_start_of_the_first_or_of_one_behind_it():
    """Six are here, 3.4 ms before the first could not go with eight; the others may come before that or after it."""
    times = service_times({1: 20.49, 2: 26.49, 4: 38.49, 8: 62.5}, 8)
    arrivals, at = waiting(sigma_s=0.002, budget_s=0.0659)
    dues = came(arrivals, at - 0.002, 6, budget_s=0.0659)
    until = asked(arrivals, dues, at - 0.002, at - 0.0014, times=times, max_wait_s=0.010)
    assert until in [pytest.approx(due - times.median[8], abs=2e-5) for due in dues[:3]]


SHORT_MS = {1: 5.88, 2: 9.25, 4: 11.95, 8: 17.61}
"""Four of eight in 12.8 ms: they have to come within 0.84 ms of each other."""


def test_all_who_are_here_are_left_behind_where_others_may_come_closer_together():
    """A turn of 16 ms: two that are here are worth two or three, four of those who are missing are four."""
    arrivals = bursts(8, 0.016, 0.0128, rounds=500)
    simulation = Simulation(scheduler(max_wait_s=WAIT_S, table=SHORT_MS))
    simulation.run(arrivals)
    assert sum(end <= one.deadline for one, end in simulation.done.items()) > 0.448 * len(arrivals)


def test_a_wait_for_others_than_those_who_are_here_is_looked_at_again_when_one_comes():
    times = service_times(SHORT_MS, 8)
    arrivals, at = waiting(sigma_s=0.002, period=0.016, budget_s=0.0128)
    dues = came(arrivals, at - 0.0022, 2, budget_s=0.0128)
    now, company = dues[1] - times.median[4] + 1e-5, Company(arrivals)
    options = {"workers": 1, "in_flight": 0, "max_wait_s": WAIT_S, "price_hz": 0.0}

    def until(dues, now):
        return company.until(dues, (0, len(dues)), lambda: at - 0.0022, times, 8, begins=now, now=now, **options)

    first = until(dues, now)
    assert first is not None, "neither of the two can bear a batch of four any more"
    with mock.patch.object(company, "_planned", return_value=None) as again:
        assert until(dues, now + 1e-5) == first
        assert until([*dues, now + 2e-5 + 0.0128], now + 2e-5) is None
    assert again.call_count == 1


def test_a_robot_that_has_left_is_waited_for_once_and_no_more():
    period = 0.029
    _, simulation = played(bursts(8, period, 0.0232, rounds=200, absent=(7,)), table=GROOT_MS)
    waits = [
        batch.sent_at - max(one.arrived_at for one in batch.tickets)
        for batch in simulation.batches
        if batch.sent_at >= 102 * period and len(batch.tickets) == 7
    ]
    assert len(waits) > 60
    assert max(waits) < 1e-9, "they go when the last of the seven has come"


def waiting(sigma_s=0.001, period=0.1, rounds=60, robots=8, budget_s=0.0232):
    """Arrivals of a fleet in step; its next burst is due at `rounds * period`."""
    arrivals, rng = Arrivals(), random.Random(7)
    for turn in range(rounds):
        for at, robot in sorted((turn * period + rng.gauss(0.0, sigma_s), robot) for robot in range(robots)):
            arrivals.note(("", str(robot)), at, WAIT_S, budget_s)
    return arrivals, rounds * period


def asked(arrivals, dues, oldest, now, *, times=None, workers=1, going=None, **changes):
    times, going = times or service_times(GROOT_MS, 8, 1.07), going or (0, len(dues))
    options = {"workers": workers, "in_flight": 0, "max_wait_s": WAIT_S, "begins": now, "price_hz": 0.0, "now": now}
    return Company(arrivals).until(dues, going, lambda: oldest, times, 8, **{**options, **changes})


def came(arrivals, at, robots, gap_s=1e-4, budget_s=0.0232):
    for index in range(robots):
        arrivals.note(("", str(index)), at + gap_s * index, WAIT_S, 0.0232)
    return [at + gap_s * index + budget_s for index in range(robots)]


def test_one_who_is_about_to_come_is_waited_for_beyond_the_tail_of_the_first():
    """To be late with one in a few is a risk worth taking for an eighth, and to be late with two is not."""
    times = service_times(GROOT_MS, 8, 1.07)
    arrivals, at = waiting()
    first_at = at - 0.003
    dues = came(arrivals, first_at, 7, gap_s=5e-4)
    now = dues[0] - times.tail[8] + 0.0002
    until = asked(arrivals, dues, first_at, now, times=times, max_wait_s=0.006)
    assert until is not None
    assert until > now
    later = dues[0] - times.median[8] + 0.0008
    assert asked(arrivals, dues, first_at, later, times=times, max_wait_s=0.009) is None


def test_it_is_over_when_all_are_here():
    arrivals, at = waiting()
    dues = came(arrivals, at, 8)
    assert asked(arrivals, dues, at, at + 0.001) is None
    dues = came(arrivals, at + 0.1, 7)
    assert asked(arrivals, dues, at + 0.1, at + 0.101) is not None


def test_each_worker_waits_for_its_share():
    """Of two who are missing one is the other worker's; one alone is."""
    for robots, workers, waits in ((2, 1, True), (2, 2, False), (3, 2, True)):
        arrivals, at = waiting(robots=robots)
        dues = came(arrivals, at - 0.001, 1)
        assert (asked(arrivals, dues, at - 0.001, at - 0.001, workers=workers) is not None) is waits


def test_the_heads_before_a_batch_count_where_they_are_served_after_it():
    """Two have time for one after the other, a third comes soon: to start with the second costs the first nothing."""
    arrivals, at = waiting(robots=3)
    dues = came(arrivals, at - 0.002, 2, budget_s=0.030)
    assert asked(arrivals, dues, at - 0.002, at - 0.0018, going=(1, 1)) is None


def test_those_whom_a_batch_leaves_count_by_the_worker_s_share():
    """Of three, one goes and one is the other worker's: to leave the third behind is no loss."""
    arrivals, at = waiting(robots=6)
    dues = came(arrivals, at - 0.002, 3, budget_s=0.045)
    options = {"going": (0, 1), "workers": 2, "times": service_times(PI_MS, 8, 1.07)}
    assert asked(arrivals, dues, at - 0.002, at - 0.0017, **options) is None
    arrivals, at = waiting(robots=4)
    dues = came(arrivals, at - 0.002, 2, budget_s=0.030)
    assert asked(arrivals, dues, at - 0.002, at - 0.0018, going=(0, 1), workers=2) is not None, "the other worker's"


def test_a_wait_whose_end_is_too_uncertain_is_none():
    """12 ms are left, 8.8 of them for a batch of two: who comes 3 ms off its rhythm is too great a risk for both."""
    for sigma_s, waits in ((0.001, True), (0.003, False)):
        arrivals, at = waiting(robots=2, sigma_s=sigma_s)
        dues = came(arrivals, at, 1, budget_s=0.012)
        assert (asked(arrivals, dues, at, at + 1e-4) is not None) is waits


def test_it_is_decided_once_and_again_when_they_have_come_or_one_comes_who_is_tighter():
    arrivals, at = waiting(robots=4)
    times = service_times({1: 6.6, 4: 11.4, 8: 17.7}, 8, 1.07)
    company, dues = Company(arrivals), came(arrivals, at - 0.001, 1)
    options = {"workers": 1, "in_flight": 0, "max_wait_s": WAIT_S, "price_hz": 0.0}

    def until(dues, now, oldest=at - 0.001):
        return company.until(dues, (0, len(dues)), lambda: oldest, times, 8, begins=now, now=now, **options)

    first = until(dues, at - 0.001)
    assert first is not None
    two = [*dues, at + 0.0232]
    with mock.patch.object(company, "_planned", side_effect=AssertionError("it is decided already")):
        assert until(two, at) == first
    with mock.patch.object(company, "_planned", return_value=None) as again:
        assert until([dues[0] - 0.002, *two], at) is None, "a tighter one"
        assert until(two, at, oldest=at - 0.0005) is None, "others wait"
        assert until(two, first) is None, "time is up"
        assert until([*two, at + 0.0233, at + 0.0234], at) is None, "all are here"
    assert again.call_count == 4


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 7),
    st.floats(-0.004, 0.004),
    st.floats(0.0, 0.006),
    st.sampled_from([GROOT_MS, PI_MS]),
    st.floats(0.0, 300.0),
    st.integers(1, 3),
)
def test_no_wait_is_longer_than_allowed_or_over_before_it_begins(robots, early, later, table, price_hz, workers):
    arrivals, at = waiting(rounds=20)
    dues = came(arrivals, at + early, robots)
    now = max(at + early + later, dues[-1] - 0.0232)
    times = service_times(table, 8, 1.07)
    until = asked(arrivals, dues, at + early, now, times=times, workers=workers, price_hz=price_hz)
    assert until is None or now < until <= at + early + WAIT_S


def test_robots_that_hints_move_about_are_waited_for_as_strangers_are():
    """How far off they come says nothing within a wait of 5 ms: as arrivals follow one another closely, one waits."""
    for sigma_s, planned in ((0.001, True), (0.010, False)):
        arrivals, at = waiting(sigma_s=sigma_s, robots=8)
        dues, company = came(arrivals, at, 2), Company(arrivals)
        times = service_times(PI_MS, 8, 1.07)
        with mock.patch.object(company, "_planned", return_value=None) as plan:
            options = {"workers": 1, "in_flight": 0, "max_wait_s": WAIT_S, "begins": at, "price_hz": 0.0, "now": at}
            arrivals.company = 1.0
            until = company.until([due + 1.0 for due in dues], (0, 2), lambda at=at: at, times, 8, **options)
        assert plan.called is planned
        assert until == (None if planned else pytest.approx(at + WAIT_S))


def test_without_a_wait_nothing_waits():
    arrivals, at = waiting()
    dues = came(arrivals, at, 4)
    assert asked(arrivals, dues, at, at, max_wait_s=0.0) is None


def test_nobody_waits_for_company_who_needs_a_cheaper_level():
    """One of four has 10.5 ms, the batch of one takes 20 at full quality and 8 below: waiting would cost it that."""
    rng, made = random.Random(3), []
    for turn in range(100):
        for robot in range(4):
            at = 0.1 * turn + 0.001 * robot + 0.001 + rng.gauss(0.0, 0.0003)
            made.append(ticket(robot, at + (0.060 if robot else 0.0105), at=at, seq=turn))
    levels = Scheduler(max_batch=8, max_wait_s=WAIT_S)
    cheaper = service_times({1: 8, 2: 9, 4: 11, 8: 15}, 8, 1.07)
    levels.add_worker("w0", service_times({1: 20, 2: 22, 4: 26, 8: 34}, 8, 1.07), cheaper=(cheaper,))
    simulation = Simulation(levels)
    simulation.run(made)
    assert all(simulation.done.get(one, math.inf) <= one.deadline for one in made)
    assert {batch.level for batch in simulation.batches if "0" in {one.robot for one in batch.tickets}} == {1}
    assert {batch.level for batch in simulation.batches} == {0, 1}


def one_waits(workers, *, flying=(), budget_s=0.0225):
    """Workers by their times in ms; a robot in step has come first and waits, `flying` have a batch of one."""
    made = Scheduler(max_batch=8, max_wait_s=WAIT_S)
    for name, table in workers.items():
        made.add_worker(name, service_times(table, 8, 1.07))
    rng, simulation = random.Random(0), Simulation(made)
    arrivals = [(0.1 * turn + abs(rng.gauss(0.0, 0.001)), robot, turn) for turn in range(60) for robot in range(8)]
    simulation.run([ticket(robot, at + budget_s, at=at, seq=turn) for at, robot, turn in arrivals])
    simulation.now = 5.999
    batches = [made.fleet.get(name).launch((ticket("x", 7.0),), 0, simulation.now) for name in flying]
    one = ticket(0, simulation.now + budget_s, at=simulation.now, seq=99)
    simulation.submit(one)
    return simulation, one, batches


FAST_MS = {1: 5, 2: 6, 4: 8, 8: 12}
SLOW_MS = {1: 20, 2: 24, 4: 32, 8: 48}


def test_a_worker_does_not_inherit_the_wait_of_a_faster_one_that_left():
    simulation, one, _ = one_waits({"fast": FAST_MS, "slow": SLOW_MS})
    assert not simulation.running
    simulation.scheduler.remove_worker("fast")
    simulation.now += 1e-4
    simulation.poll()
    assert [batch.worker for _, batch in simulation.running] == ["slow"], "at once: it takes 20 ms"
    simulation.advance(7.0)
    assert simulation.done[one] <= one.deadline


@pytest.mark.parametrize("event", ["added", "left", "came again", "replaced", "failed", "checked", "levels", "none"])
def test_a_wait_is_looked_at_again_when_the_workers_are_others(event):
    simulation, _, (batch,) = one_waits({"fast": FAST_MS, "slow": SLOW_MS}, flying=["slow"])
    made = simulation.scheduler
    assert not simulation.running
    if event == "added":
        made.add_worker("new", service_times(SLOW_MS, 8, 1.07))
    elif event == "left":
        made.remove_worker("slow")
    elif event == "came again":
        made.remove_worker("slow")
        made.add_worker("slow", service_times(SLOW_MS, 8, 1.07))
    elif event == "replaced":
        made.add_worker("slow", service_times(SLOW_MS, 8, 1.07))
    elif event == "failed":
        made.failed(batch, simulation.now + 1.0)
    elif event == "checked":
        made.fleet.get("slow").trial = True
        made.finished(batch, 0.015)  # its whole table is scaled by it
    elif event == "levels":
        made.set_cheaper("fast", (service_times({1: 2, 8: 4}, 8, 1.07),))
    simulation.now += 1e-4
    with mock.patch.object(Company, "_planned", return_value=None) as planned:
        simulation.poll()
    assert planned.called is (event != "none")


def test_another_worker_s_wait_is_not_its_own():
    arrivals, at = waiting(robots=4)
    company, dues = Company(arrivals), came(arrivals, at - 0.001, 1)
    options = {"in_flight": 0, "max_wait_s": WAIT_S, "price_hz": 0.0, "begins": at, "now": at}
    first, other = service_times(GROOT_MS, 8, 1.07), service_times(GROOT_MS, 8, 1.07)
    assert company.until(dues, (0, 1), lambda: at - 0.001, first, 8, workers=1, **options) is not None
    with mock.patch.object(company, "_planned", return_value=None) as again:
        for times, workers in ((first, 1), (other, 1), (first, 2)):
            company.until(dues, (0, 1), lambda: at - 0.001, times, 8, workers=workers, **options)
    assert again.call_count == 2


@pytest.mark.parametrize("proves_itself", [True, False])
def test_a_worker_that_proves_itself_on_a_batch_of_one_waits_for_nobody(proves_itself):
    simulation, _, _ = one_waits({"w0": GROOT_MS}, budget_s=0.050)
    assert not simulation.running
    simulation.scheduler.fleet.get("w0").probation = proves_itself
    simulation.now += 1e-4
    simulation.poll()
    assert bool(simulation.running) is proves_itself
