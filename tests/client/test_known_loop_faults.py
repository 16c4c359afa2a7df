"""Faults of robots' control loops that users of other clients report, each as a test that ours does not have it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.client.test_player import DT_S, Loop, chunk

HORIZON = 16


class Arm:
    """A loop whose policy answers after a time; each action is the number of the control step it is meant for."""

    def __init__(self, latency_s: Callable[[], float], horizon: int = HORIZON, **options) -> None:
        self.loop = Loop(**options)
        self.done: list[float | None] = []
        self._latency_s = latency_s
        self._horizon = horizon
        self._due: list[tuple[float, int]] = []

    def run(self, ticks: int) -> None:
        robot = self.loop.robot
        for _ in range(ticks):
            for number, (due, begins) in enumerate(self._due):
                if due <= self.loop.now and not robot.futures[number].done():
                    robot.futures[number].set_result(chunk(range(begins, begins + self._horizon)))
            self.done.append(self.loop.tick())
            executed = sum(action is not None for action in self.done[:-1])
            while len(self._due) < len(robot.asked):
                self._due.append((self.loop.now - DT_S + self._latency_s(), executed))

    def after_the_first(self) -> list[float | None]:
        first = next(number for number, action in enumerate(self.done) if action is not None)
        return self.done[first:]


@pytest.mark.parametrize("rtc", [False, True])
def test_the_arm_neither_waits_nor_jerks_between_chunks_though_inference_takes_86_ms(rtc):
    """openpi: the arm stands still for each inference and jumps where the next chunk begins."""
    arm = Arm(lambda: 0.086, replan_rows=8, rtc=rtc)
    arm.run(400)
    assert arm.after_the_first() == [float(step) for step in range(len(arm.after_the_first()))]
    assert arm.loop.player.metrics()["hand_offs"] > 30


@pytest.mark.parametrize("seed", range(5))
def test_jitter_of_the_network_does_not_reach_the_arm(seed):
    """openpi, asynchronous chunks: jitter and stalls, as answers come now early and now late."""
    dice = random.Random(seed)
    arm = Arm(lambda: dice.uniform(0.01, 0.35), replan_rows=4, rtc=True)
    arm.run(600)
    assert arm.after_the_first() == [float(step) for step in range(len(arm.after_the_first()))]
    assert arm.loop.player.metrics()["dry_events"] <= 1, "only before the first chunk"


def test_late_chunks_are_used_for_what_is_left_of_them_and_not_made_again_until_the_arm_stalls():
    """LeRobot, trained real-time chunking: a chunk later than foreseen is discarded and asked for again."""
    late = iter([0.05, 0.05, 0.05] + [0.3] * 400)
    arm = Arm(lambda: next(late), replan_rows=2, rtc=True)
    arm.run(400)
    assert arm.after_the_first() == [float(step) for step in range(len(arm.after_the_first()))]
    metrics = arm.loop.player.metrics()
    assert metrics["late_chunks"] == 0
    assert metrics["hand_offs"] >= len(arm.loop.robot.asked) - 2, "each chunk that was asked for is used"


def test_one_slow_first_answer_does_not_make_every_hand_off_late():
    """LeRobot: the delay is a maximum, which warm-up inflates for ever, so that later hand-offs jump."""
    slow = iter([0.7, 0.5] + [0.06] * 400)
    arm = Arm(lambda: next(slow), replan_rows=4, rtc=True)
    arm.run(200)
    assert arm.loop.player.buffer.expected_delay <= 2
    assert arm.after_the_first() == [float(step) for step in range(len(arm.after_the_first()))]
