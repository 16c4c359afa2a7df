"""The planner's control loops: what each plan is asked for, what overlaps, and what happens when a plan is lost."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from taktline import Chunk, ErrorCode, Search, TaktlineError, plan_and_move
from taktline_protocol.messages import Timings


class Arm:
    """A point that moves as told; `met` is where a plan and a move must be under way at once."""

    def __init__(self, met: threading.Barrier | None = None) -> None:
        self.at = 0.0
        self.met = met
        self.moves: list[float] = []

    def sense(self) -> tuple[dict[str, str], list[float]]:
        return {"camera": "frame", "goal": "goal"}, [self.at]

    def move(self, action: Any) -> None:
        if self.met is not None:
            self.met.wait(timeout=10)
        self.at += float(action[0])
        self.moves.append(float(action[0]))


class HalfWay:
    """Plans half of the way to 1.0 and the same again; refuses the calls it is told to."""

    def __init__(self, met: threading.Barrier | None = None, refuse: tuple[int, ...] = ()) -> None:
        self.met = met
        self.refuse = refuse
        self.asked: list[tuple[float, Search]] = []

    def act(
        self, images: Any, state: Any, instruction: str, budget_ms: float, *, search: Search | None = None
    ) -> Chunk:
        assert search is not None
        self.asked.append((state[0], search))
        if search.pending is not None and self.met is not None:
            self.met.wait(timeout=10)
        if len(self.asked) in self.refuse:
            raise TaktlineError(ErrorCode.DEADLINE_UNREACHABLE, "too late", "ask sooner")
        start = state[0] + (0.0 if search.pending is None else float(search.pending.to_numpy()[0, 0]))
        step = (1.0 - start) / 2
        return Chunk(
            actions=np.array([[step], [step / 2]], dtype=np.float32),
            dt_s=0.25,
            captured_at=0.0,
            valid_until=1.0,
            timings=Timings(observe_ms=0, transfer_ms=0, queue_ms=0, inference_ms=0, actuate_ms=0),
            margin_ms=1.0,
            seq=len(self.asked),
            policy="planner",
            revision="r1",
            worker="w",
            batch_size=1,
            request_id="",
        )


def take(count: int, *args: Any, **options: Any) -> list[Any]:
    loop = plan_and_move(*args, **options)
    steps = [next(loop) for _ in range(count)]
    loop.close()
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_the_arm_goes_the_same_way_with_and_without_overlap(overlap: bool) -> None:
    arm, planner = Arm(), HalfWay()
    steps = take(4, planner, arm.sense, arm.move, overlap=overlap)
    assert arm.moves == [0.5, 0.25, 0.125, 0.0625]
    assert [float(step.action[0]) for step in steps] == arm.moves
    assert all(step.idle_ms >= 0 and step.step_ms >= step.idle_ms for step in steps)


def test_the_next_plan_is_made_while_the_arm_moves() -> None:
    met = threading.Barrier(2)  # neither the move nor the plan ends unless both are under way
    arm, planner = Arm(met), HalfWay(met)
    take(3, planner, arm.sense, arm.move, overlap=True)
    assert [state for state, _ in planner.asked] == [0.0, 0.0, 0.5, 0.75]
    pending = [search.pending for _, search in planner.asked]
    assert pending[0] is None
    assert [float(one.to_numpy()[0, 0]) for one in pending[1:]] == [0.5, 0.25, 0.125]


def test_searches_begin_at_the_last_plan_unless_told_not_to() -> None:
    for warm in (True, False):
        arm, planner = Arm(), HalfWay()
        take(2, planner, arm.sense, arm.move, overlap=False, warm=warm, search=Search(rounds=3))
        assert all(search.rounds == 3 for _, search in planner.asked)
        assert [search.previous is not None for _, search in planner.asked] == [False, warm]


def test_a_plan_that_is_lost_is_made_again_from_what_is_seen_after_the_move() -> None:
    arm, planner = Arm(), HalfWay(refuse=(2,))
    take(3, planner, arm.sense, arm.move, overlap=True)
    assert arm.moves == [0.5, 0.25, 0.125]
    state, search = planner.asked[2]
    assert state == 0.5
    assert search.pending is None


def test_a_refusal_with_the_arm_at_rest_reaches_the_caller() -> None:
    arm, planner = Arm(), HalfWay(refuse=(2, 3))
    loop = plan_and_move(planner, arm.sense, arm.move, overlap=True)
    next(loop)
    with pytest.raises(TaktlineError) as caught:
        next(loop)
    assert caught.value.code == ErrorCode.DEADLINE_UNREACHABLE
    assert arm.moves == [0.5]


def test_an_arm_that_fails_ends_the_loop() -> None:
    def stuck(action: Any) -> None:
        raise RuntimeError("the arm is stuck")

    for overlap in (False, True):
        with pytest.raises(RuntimeError, match="stuck"):
            take(1, HalfWay(), Arm().sense, stuck, overlap=overlap)
