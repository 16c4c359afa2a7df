"""Which robots a candidate serves: a share of the active ones, the same ones all along."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from taktline_gateway.canary import Canary
from taktline_gateway.robot_split import ACTIVE_S, RobotSplit
from taktline_protocol import Observation
from taktline_protocol.deployment import Candidate


def split_of(weight: float, *, hold_s: float = 0.0, trial: str = "t", now: float = 100.0) -> RobotSplit:
    split = RobotSplit(trial, now=0.0)
    split.set_weight(weight, hold_s, now)
    return split


def seated(split: RobotSplit, count: int, now: float) -> set[str]:
    """Robots on the candidate after each of `count` robots has asked."""
    for number in range(count):  # the fleet becomes known
        split.note(f"arm-{number}", "s", now - 6.0)
    return {f"arm-{n}" for n in range(count) if split.is_on_candidate(f"arm-{n}", "s", now)}


@pytest.mark.parametrize("weight", [5, 25, 50, 100])
@pytest.mark.parametrize("count", [1, 4, 20, 500])
def test_the_share_is_kept_and_rounded_up_to_whole_robots(weight: int, count: int) -> None:
    found = seated(split_of(weight), count, 200.0)
    assert len(found) == -(-count * weight // 100)


def test_a_heavier_step_keeps_everybody_it_had() -> None:
    split = split_of(5)
    before = seated(split, 100, 200.0)
    for step, weight in enumerate((25, 50, 100)):
        now = 210.0 + step
        split.set_weight(weight, 0.0, now)
        after = {f"arm-{n}" for n in range(100) if split.is_on_candidate(f"arm-{n}", "s", now + 0.5)}
        assert before < after
        before = after


def test_another_trial_begins_with_other_robots() -> None:
    first = seated(split_of(10, trial="one"), 200, 200.0)
    second = seated(split_of(10, trial="two"), 200, 200.0)
    assert first != second


def test_gateways_agree_without_talking() -> None:
    assert seated(split_of(30), 50, 200.0) == seated(split_of(30), 50, 300.0)


def test_a_robot_in_a_session_waits_until_it_pauses_or_the_hold_is_over() -> None:
    split = split_of(0)
    assert not split.is_on_candidate("arm", "s", 100.0)
    split.note("arm", "s", 100.0)
    split.set_weight(100, 30.0, 101.0)
    assert not split.is_on_candidate("arm", "s", 102.0)  # in the middle of its work
    assert split.is_on_candidate("arm", "another session", 103.0)
    split.note("other", "s", 100.0)
    assert not split.is_on_candidate("other", "s", 104.0)
    assert not split.is_on_candidate("other", "s", 108.0)
    assert split.is_on_candidate("other", "s", 114.0)  # it was silent for more than 5 s
    split.note("third", "s", 129.0)
    assert not split.is_on_candidate("third", "s", 130.9)
    assert split.is_on_candidate("third", "s", 131.1)  # the hold is over


def test_a_seated_robot_stays_through_pauses_and_other_robots_coming() -> None:
    split = split_of(50)
    before = seated(split, 10, 200.0)
    for number in range(100):
        split.is_on_candidate(f"new-{number}", "s", 210.0)
    after = {f"arm-{n}" for n in range(10) if split.is_on_candidate(f"arm-{n}", "s", 220.0)}
    assert before <= after


def test_weight_zero_takes_everybody_back() -> None:
    split = split_of(100)
    assert seated(split, 5, 200.0)
    split.set_weight(0, 30.0, 201.0)
    assert not any(split.is_on_candidate(f"arm-{n}", "s", 201.5) for n in range(5))


def test_robots_that_left_are_forgotten() -> None:
    split = split_of(50)
    seated(split, 10, 200.0)
    assert split.active(200.0 + ACTIVE_S - 1)[0] == 10
    assert split.active(200.0 + ACTIVE_S) == (0, 0)


def test_a_gateway_that_has_just_started_does_not_put_its_first_robot_on_trial() -> None:
    ranks = []
    for number in range(200):
        split = RobotSplit("t", now=100.0)
        split.set_weight(5, 0.0, 100.0)
        ranks.append(split.is_on_candidate(f"arm-{number}", "s", 100.5))
    assert 2 <= sum(ranks) <= 25  # about 5 %, by rank, though each is the only robot its gateway knows


def test_robots_of_one_name_and_two_tenants_have_a_seat_each(monkeypatch):
    """With one seat for both, each would seem to begin a session every time, and move in the midst of its own."""
    monkeypatch.setattr("taktline_gateway.canary.time", SimpleNamespace(monotonic=lambda: 100.0))
    split = split_of(50, hold_s=1000.0)
    canary = SimpleNamespace(candidate=Candidate(id="t", step="s", weight=50.0), _split=split, stable=lambda: None)
    observation = Observation(
        robot_id="arm-1", session_id="", seq=1, captured_at=0.0, budget_ms=100.0, images={}, state=[], instruction=""
    )
    for tenant in ("a", "b", "a", "b"):
        theirs = msgspec.structs.replace(observation, session_id=f"session of {tenant}")
        Canary.pick(canary, theirs, f"{tenant}/arm-1")
    assert split.active(100.0)[0] == 2
    assert {name: seat.session_id for name, seat in split._seats.items()} == {
        "a/arm-1": "session of a",
        "b/arm-1": "session of b",
    }
