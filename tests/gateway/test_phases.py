"""Hints that spread a fleet, and the test whether one more robot fits: simulated clocks, then through the gateway."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.admissions import PROMISE_S, Admissions
from taktline_gateway.phases import DEAF_AFTER, PhasePlanner, grid_for, next_observation_at_ms
from taktline_gateway.schedulability import TARGET_LOAD, Demand, schedulable
from taktline_protocol import Observation
from taktline_protocol.messages import AdmissionQuestion

from benchmarks.gateway.closed_loop import Taktline, fleet, run
from benchmarks.gateway.times import ENGINES
from tests.gateway.simulated_clock import service_times

SLACK_S = 10.0


def rhythm(planner, robots, *, rounds, period_s, follow, start=0.0):
    """Robots in step; returns each round's arrivals in time order."""
    times, coming, seen = service_times(), dict.fromkeys(range(robots), start), []
    for _ in range(rounds):
        arrivals = []
        for robot, at in sorted(coming.items(), key=lambda item: item[1]):
            planner.arrived(("", str(robot)), at)
            hint = planner.next_at(("", str(robot)), at + 0.012, SLACK_S, times, 1)
            coming[robot] = hint if follow and hint is not None else at + period_s
            arrivals.append(at)
        seen.append(sorted(arrivals))
    return seen


# ----- hints


def test_a_fleet_in_step_is_spread_over_its_period():
    """20 robots, one observation a second each: together worth 2% of the worker if they came one by one."""
    before, *_, after = rhythm(PhasePlanner(), 20, rounds=30, period_s=1.0, follow=True)
    assert max(before) - min(before) < 1e-9
    gaps = [later - earlier for earlier, later in itertools.pairwise(after)]
    assert sorted(gaps)[2] >= 0.009, "hardly two within one batch of one, which takes 10 ms"


def test_the_rhythm_is_kept_on_average():
    rounds = rhythm(PhasePlanner(), 20, rounds=60, period_s=1.0, follow=True)
    mean = (sum(rounds[-1]) - sum(rounds[9])) / 20 / 50
    assert mean == pytest.approx(1.0, abs=0.07)


def test_a_lone_robot_gets_no_hint():
    planner = PhasePlanner()
    for turn in range(5):
        planner.arrived(("", "arm"), turn * 1.0)
        assert planner.next_at(("", "arm"), turn + 0.01, SLACK_S, service_times(), 1) is None


def test_who_does_not_listen_is_left_alone():
    planner = PhasePlanner()
    times, hints = service_times(), []
    for turn in range(DEAF_AFTER + 6):
        for robot, offset in (("deaf", 0.0), ("other", 0.003)):
            planner.arrived(("", robot), turn + offset)
        hints.append(planner.next_at(("", "deaf"), turn + 0.02, SLACK_S, times, 1))
    # Whatever it was told, it came by its own clock; where that happens to be a slot it is no disobedience.
    assert hints[1] is not None
    if any(abs(hint - turn - 1) > 0.02 for turn, hint in enumerate(hints) if hint is not None):
        assert hints[-1] is None


def test_without_slack_nobody_is_told_to_come_later():
    planner, times = PhasePlanner(), service_times()
    for turn in range(3):
        for robot in range(8):
            planner.arrived(("", str(robot)), turn * 1.0)
    for robot in range(8):
        hint = planner.next_at(("", str(robot)), 2.1, 0.0, times, 1)
        assert hint is None or hint <= 3.0 + 1e-9


@pytest.mark.parametrize(("demand_hz", "batch"), [(10, 1), (80, 1), (100, 2), (200, 4), (260, 8), (1000, None)])
def test_groups_are_as_small_as_the_load_allows(demand_hz, batch):
    """Back to back: 95/s in batches of one, 159 in two, 238 in four, 317 in eight, each needing 10% of room."""
    grid = grid_for(service_times(), 1, demand_hz)
    assert (grid.batch if grid else None) == batch


def test_capture_is_before_arrival_by_what_lies_between():
    observation = Observation(
        robot_id="a", seq=1, captured_at=5.0, sent_at=5.010, budget_ms=1.0, network_ms=8.0, images={}, state=[],
        instruction="go",
    )  # fmt: skip
    assert next_observation_at_ms(observation, 100.1, 100.0) == pytest.approx(100.0 - 10.0 - 4.0)
    assert next_observation_at_ms(observation, 100.005, 100.0) == 0.0
    assert next_observation_at_ms(observation, None, 100.0) is None


def test_robots_that_come_once_are_forgotten():
    planner = PhasePlanner()
    for number in range(1000):
        planner.arrived(("", f"new name {number}"), 0.1 * number)
    assert len(planner._robots) <= 31, "those of the last 3 s"


def test_a_pause_is_no_period():
    """A robot's first observation of the morning must not keep everybody's demand of that minute for a day."""
    planner = PhasePlanner()
    night_s = 8 * 3600.0
    for at in (0.0, 0.2, 0.4, night_s):
        planner.arrived(("", "early bird"), at)
    assert planner.demand_hz == 0.0
    for robot, begins in (("first shift", night_s), ("second shift", night_s + 600.0)):
        for turn in range(50):
            planner.arrived(("", robot), begins + 0.2 * turn)
    assert planner.demand_hz == pytest.approx(5.0)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0.05, 2.0), st.floats(0, 1.0)), min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_books_of_demand_always_balance(robots, steps):
    planner, times, now = PhasePlanner(), service_times(), 0.0
    for turn, listens in enumerate(steps):
        for number, (period_s, phase) in enumerate(robots):
            now = max(now, turn * period_s + phase)
            planner.arrived(("", str(number)), now)
            hint = planner.next_at(("", str(number)), now, SLACK_S, times, 1)
            assert hint is None or hint >= now
            if listens and hint is not None:
                now = max(now, hint)
        assert planner.demand_hz == pytest.approx(
            sum(planner.load_hz(("", str(number))) for number in range(len(robots))), rel=1e-6, abs=1e-6
        )


def test_hints_save_a_fleet_that_started_in_step():
    """The benchmark's simulation at small size: 20 robots at 50 Hz with 100 ms in their buffers when they ask."""
    robots, engine = fleet(20, 50.0, 25, 30, in_step=True), ENGINES[0]
    without = run(robots, Taktline(engine, hints=False), engine, warm_s=4.0, measure_s=4.0)
    told = run(robots, Taktline(engine, hints=True), engine, warm_s=4.0, measure_s=4.0)
    assert told.share > without.share + 0.2
    assert told.share >= 0.95


@pytest.mark.parametrize("in_step", [True, False])
def test_equal_robots_near_the_capacity_are_nobodys_debtors(in_step):
    """Their phases are locked, so the same ones meet a full queue each time: that must not count against them."""
    robots, engine = fleet(44, 50.0, 25, 50, in_step=in_step, seed=8001), ENGINES[0]
    outcome = run(robots, Taktline(engine, hints=False), engine, warm_s=4.0, measure_s=8.0, seed=8001)
    assert outcome.share >= 0.999


# ----- one more robot


def test_room_by_rate():
    """Batches of eight: 333/s, of which 80% may be promised."""
    promised = TARGET_LOAD * 8 / 0.024
    new = Demand(10.0, 1.0)
    assert schedulable(new, promised - 10.1, 1.0, [service_times()]).admissible
    refused = schedulable(new, promised - 9.9, 1.0, [service_times()])
    assert (refused.admissible, refused.reason, refused.spare) == (False, "rate", 0)
    empty = schedulable(new, 0.0, 1.0, [service_times()])
    assert (empty.batch, empty.spare) == (8, int(promised / 10.0) - 1)


def test_room_by_budget():
    """A batch of one just begun and its own: 20 ms at least; of four 32 ms, of eight 48."""
    verdicts = {ms: schedulable(Demand(1.0, ms / 1e3), 0.0, 9.0, [service_times()]) for ms in (19, 21, 33, 49)}
    assert {ms: verdict.batch for ms, verdict in verdicts.items()} == {19: 0, 21: 1, 33: 4, 49: 8}
    assert (verdicts[19].admissible, verdicts[19].reason) == (False, "budget")


def test_a_tight_robot_costs_the_others_their_large_batches():
    others = 0.7 * 8 / 0.024
    assert schedulable(Demand(1.0, 1.0), others, 1.0, [service_times()]).admissible
    tight = schedulable(Demand(1.0, 0.021), others, 1.0, [service_times()])
    assert (tight.admissible, tight.reason) == (False, "rate")


def test_every_worker_counts():
    one = schedulable(Demand(10.0, 1.0), 300.0, 1.0, [service_times()])
    two = schedulable(Demand(10.0, 1.0), 300.0, 1.0, [service_times(), service_times()])
    assert (one.admissible, two.admissible) == (False, True)


def test_a_share_of_a_batch_counts_as_that():
    """Alone its own batches are all there are; beside others the one before it may take all of T_sync."""
    part = Demand(10.0, 0.0055, share=0.25)
    alone = schedulable(part, 0.0, 9.0, [service_times()])
    assert (alone.admissible, alone.batch, alone.worst_s) == (True, 1, pytest.approx(0.5 * service_times().tail[1]))
    beside = schedulable(part, 1.0, 9.0, [service_times()])
    assert (beside.reason, beside.worst_s) == ("budget", pytest.approx(1.25 * service_times().tail[1]))
    room = [schedulable(Demand(10.0, 1.0, share), 10.0, 1.0, [service_times()]) for share in (1.0, 0.25)]
    assert room[1].spare + 1 == pytest.approx(4 * (room[0].spare + 1), abs=4)
    assert room[1].utilisation == pytest.approx(12.5 / 20.0 * room[0].utilisation)


def test_robots_that_need_a_share_are_seen_and_promised_as_that():
    planner = PhasePlanner()
    admissions, workers = Admissions(planner), [service_times()]
    for turn in range(3):
        planner.arrived(("", "seen"), float(turn), 0.5)
    assert planner.demand_hz == pytest.approx(0.5)
    planner.arrived(("", "seen"), 3.0, 0.25)
    assert planner.demand_hz == planner.load_hz(("", "seen")) == pytest.approx(0.25)
    question = AdmissionQuestion(robot_id="new", rate_hz=100.0, budget_ms=1000.0)
    told = [admissions.ask(("", name), question, 3.0, 1.0, workers, 0.1).utilisation for name in "ab"]
    assert told == [pytest.approx(hz / (8 / 0.024), rel=0.01) for hz in (10.25, 20.25)]
    planner.arrived(("", "seen"), 100.0, 1.0)  # after a pause it is new, and has no rhythm
    assert planner.demand_hz == pytest.approx(0.0)


def test_a_place_is_kept_until_the_robot_comes_or_its_time_is_over():
    planner = PhasePlanner()
    admissions, workers = Admissions(planner), [service_times()]

    def ask(robot, now):
        question = AdmissionQuestion(robot_id=robot, rate_hz=100.0, budget_ms=1000.0)
        return admissions.ask(("", robot), question, now, 1.0, workers)

    assert [ask(name, 0.0).admissible for name in "abc"] == [True, True, False]
    assert ask("a", 0.0).admissible, "asking again is not asking twice"
    assert ask("c", PROMISE_S + 0.1).admissible
    for turn in range(3):  # it has come, and asks for less than it said
        planner.arrived(("", "c"), PROMISE_S + turn * 1.0)
    assert ask("d", PROMISE_S + 2.1).utilisation == pytest.approx((100.0 + 1.0) / (8 / 0.024), rel=0.01)


# ----- through the gateway


class LinearBooks:
    """What `Admissions` counts, by looking at every promise."""

    def __init__(self, planner):
        self.planner, self.promised = planner, {}

    def demand(self, source, now, tightest_s):
        self.promised = {one: kept for one, kept in self.promised.items() if now - kept[0] <= PROMISE_S}
        self.promised.pop(source, None)
        rate_hz = self.planner.demand_hz - self.planner.load_hz(source)
        for _, demand, begun in self.promised.values():
            tightest_s = min(tightest_s, demand.budget_s)
            rate_hz += 0.0 if begun else demand.rate_hz
        return rate_hz, tightest_s

    def known(self, source):
        if source in self.promised:
            at, demand, _ = self.promised[source]
            self.promised[source] = (at, demand, True)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "observe", "wait"]),
            st.integers(0, 7),
            st.floats(0.5, 20.0),
            st.floats(30.0, 2000.0),
        ),
        max_size=80,
    )
)
def test_the_books_of_promises_are_those_of_looking_at_every_promise(steps):
    planner, workers, now = PhasePlanner(), [service_times()], 0.0
    admissions, plain = Admissions(planner), LinearBooks(planner)
    begun = planner.when_known
    planner.when_known = lambda source: (begun(source), plain.known(source))
    for what, robot, rate_hz, budget_ms in steps:
        now += 0.05
        source = ("", str(robot))
        if what == "wait":
            now += rate_hz
        elif what == "observe":
            planner.arrived(source, now)
        else:
            others_hz, tightest_s = plain.demand(source, now, 1.0)
            new = Demand(rate_hz, budget_ms / 1e3)
            expected = schedulable(new, max(0.0, others_hz), tightest_s, workers)
            question = AdmissionQuestion(robot_id=source[1], rate_hz=rate_hz, budget_ms=budget_ms)
            found = admissions.ask(source, question, now, 1.0, workers)
            assert found.admissible is expected.admissible
            assert found.utilisation == pytest.approx(expected.utilisation, abs=1e-3)
            if expected.admissible:
                plain.promised[source] = (now, new, planner.load_hz(source) > 0.0)


def test_promises_that_are_over_hold_no_memory():
    """Robots that ask again and again, and robots that never come."""
    admissions, workers = Admissions(PhasePlanner()), [service_times()]
    for turn in range(3000):
        question = AdmissionQuestion(robot_id=str(turn % 7), rate_hz=0.01, budget_ms=900.0)
        admissions.ask(("", question.robot_id), question, 0.01 * turn, 1.0, workers)
        assert len(admissions) <= 7
        assert len(admissions._budgets) <= 2 * len(admissions) + 65
    admissions.ask(("", "last"), question, 1e6, 1.0, workers)
    assert len(admissions) == 1
    assert admissions._waiting_hz == pytest.approx(0.01)


def test_a_question_costs_no_look_at_every_promise():
    """Counted in the promises that are looked at, not in time."""

    class Counted(dict):
        looks = 0

        def get(self, *key):
            Counted.looks += 1
            return super().get(*key)

        def items(self):
            for item in super().items():
                Counted.looks += 1
                yield item

        def values(self):
            return (value for _, value in self.items())

    admissions, workers = Admissions(PhasePlanner()), [service_times()]
    for number in range(2000):
        question = AdmissionQuestion(robot_id=str(number), rate_hz=0.01, budget_ms=100.0 + number % 97)
        admissions.ask(("", question.robot_id), question, 0.0, 1.0, workers)
    promised = Counted(admissions._promised)
    admissions._promised = promised
    admissions.ask(("", "one more"), question, 0.0, 1.0, workers)
    assert len(admissions) == 2001
    assert Counted.looks <= 4


def test_admission_and_hints_over_http(bare_stack):
    stack = bare_stack
    stack.write_routes(stack.start_worker())
    stack.start_gateway()
    stack.wait_workers(1)
    url = f"{stack.url}/v1/policies/scripted/admission"
    answer = stack.http.post(url, json={"robot_id": "a", "rate_hz": 5.0, "budget_ms": 500.0}).json()
    assert answer["admissible"] is True
    assert answer["spare"] > 10
    tight = stack.http.post(url, json={"robot_id": "b", "rate_hz": 5.0, "budget_ms": 5.0}).json()
    assert (tight["admissible"], tight["batch"]) == (False, 0)
    assert "tightest budget" in tight["reason"]
    wrong = stack.http.post(url, json={"robot_id": "b", "rate_hz": 0, "budget_ms": 5.0})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_body")
    assert stack.http.post(url.replace("scripted", "none"), json={}).status_code in (400, 404)
    hints = []
    for _ in range(4):
        for robot in ("a", "b"):
            status, chunk = stack.act(robot=robot)
            assert status == 200
            hints.append(chunk.next_observation_at_ms)
    assert hints[0] is None, "its rhythm is not known yet"
    assert any(hint is not None and 0 <= hint < 1000.0 for hint in hints)
