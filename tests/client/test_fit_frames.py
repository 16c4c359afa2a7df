"""Which rule frames are fitted by while revisions come and go: the answering one's, and none of another's."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest
import taktline
from taktline import Chunk, ErrorCode, TaktlineError, async_robot
from taktline_protocol.messages import Degraded, ImageFit, PolicyInfo, Timings

FIT = ImageFit(height=224, width=224, filter="bilinear", letterbox=True)
SMALLER = ImageFit(height=112, width=112, filter="bilinear", letterbox=True)
WHOLE, FITTED, FITTED_SMALLER = (480, 640, 3), (224, 224, 3), (112, 112, 3)


def told(revision, rule):
    return PolicyInfo(policy="p", family="pi05", revision=revision, ready=True, cameras=("c",), image_fit=rule)


class Gateway:
    """What a robot that fits frames asks, and what it gets: `route` is told of, `revision` answers."""

    def __init__(self, rule=FIT):
        self.route, self.revision, self.degraded = told("A", rule), "A", None
        self.asked, self.shapes = 0, []
        self.slow: asyncio.Event | None = None
        self.failing = False
        self.robot = taktline.AsyncRobot("http://127.0.0.1:9", "p", "r", fit_frames=True)
        self.robot.info, self.robot._ask = self._info, self._answer

    async def _info(self):
        self.asked += 1
        if self.slow is not None:
            await self.slow.wait()
        if self.failing:
            raise TaktlineError(ErrorCode.GATEWAY_UNREACHABLE, "gone", "wait")
        return self.route

    async def _answer(self, _, frames):
        self.shapes.append(frames["c"].image.shape)
        times = Timings(observe_ms=0.0, transfer_ms=0.0, queue_ms=0.0, inference_ms=1.0, actuate_ms=0.0)
        actions = np.zeros((10, 2), np.float32)
        return Chunk(actions, 0.05, 0.0, 0.5, times, 1.0, 1, "p", self.revision, "w", 1, "id", degraded=self.degraded)

    async def act(self, times=1):
        """The shapes that the frames of so many observations were sent in; what runs beside them goes on after each."""
        before = len(self.shapes)
        for _ in range(times):
            await asyncio.wait_for(self.robot.act({"c": np.zeros(WHOLE, np.uint8)}, [0.0], "go", 100.0), 5.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return self.shapes[before:]


def test_a_policy_without_a_rule_is_refused_before_the_first_chunk_only(caplog):
    async def run():
        refused = Gateway(rule=None)
        with pytest.raises(TaktlineError) as caught:
            await refused.act()
        assert caught.value.code is ErrorCode.CONFIG_INVALID
        gateway = Gateway()
        assert await gateway.act(3) == [FITTED] * 3
        gateway.route, gateway.revision = told("B", None), "B"
        assert await gateway.act(4) == [FITTED] + [WHOLE] * 3, "the first one is sent before B has answered"
        assert gateway.asked == 2
        gateway.revision = "A"
        assert await gateway.act(2) == [WHOLE, FITTED], "after a roll-back A's rule is still known"
        assert gateway.asked == 2
        await gateway.robot.close()

    with caplog.at_level(logging.WARNING, "taktline"):
        asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        "robot r sends whole frames: revision 'B' resizes them otherwise than in whole 8-bit pixels"
    ]


def test_the_first_question_is_waited_for_no_longer_than_an_answer(monkeypatch):
    """Its network is stalled; an observation behind it has its turn then."""
    monkeypatch.setattr(async_robot, "LATE_S", 0.2)

    async def run():
        gateway = Gateway()
        gateway.slow = asyncio.Event()
        with pytest.raises(TaktlineError, match="in time") as said:
            await gateway.act()
        assert said.value.code is ErrorCode.GATEWAY_UNREACHABLE
        with pytest.raises(TaktlineError) as wrong:
            await gateway.robot.act({"c": np.zeros(WHOLE, np.uint8)}, [0.0], "go", "100")
        assert wrong.value.code is ErrorCode.BUDGET_INVALID
        gateway.slow.set()
        assert await gateway.act() == [FITTED]

    asyncio.run(run())


def test_after_a_rollout_the_new_rule_is_learnt_beside_the_observations():
    async def run():
        gateway = Gateway()
        await gateway.act()
        gateway.route, gateway.revision, gateway.slow = told("B", SMALLER), "B", asyncio.Event()
        assert await gateway.act(4) == [FITTED] + [WHOLE] * 3, "none waits for the answer that is slow"
        assert gateway.asked == 2
        gateway.slow.set()
        await asyncio.sleep(0.01)
        assert await gateway.act(2) == [FITTED_SMALLER] * 2
        await gateway.robot.close()

    asyncio.run(run())


def test_a_candidate_that_the_gateway_does_not_speak_of_gets_whole_frames_and_is_asked_for_seldom(monkeypatch, caplog):
    now = [1000.0]
    monkeypatch.setattr(async_robot.time, "monotonic", lambda: now[0])

    async def run():
        gateway = Gateway()
        await gateway.act()
        gateway.revision = "B"
        assert await gateway.act(6) == [FITTED] + [WHOLE] * 5
        assert gateway.asked == 2
        gateway.route = told("B", SMALLER)  # promoted
        now[0] += async_robot.RELEARN_S
        assert await gateway.act(3) == [WHOLE, FITTED_SMALLER, FITTED_SMALLER]
        assert gateway.asked == 3

    with caplog.at_level(logging.WARNING, "taktline"):
        asyncio.run(run())
    assert len(caplog.records) == 1


def test_a_policy_that_stands_in_changes_nothing():
    async def run():
        gateway = Gateway()
        await gateway.act()
        gateway.revision, gateway.degraded = "of-another-policy", Degraded(policy="small")
        assert await gateway.act(3) == [FITTED] * 3
        assert gateway.asked == 1

    asyncio.run(run())


def test_a_question_that_fails_is_no_observations_error():
    async def run():
        gateway = Gateway()
        await gateway.act()
        gateway.revision, gateway.failing = "B", True
        assert await gateway.act(4) == [FITTED] + [WHOLE] * 3
        assert gateway.asked == 2

    asyncio.run(run())


def test_a_robot_that_is_closed_asks_no_more():
    async def run():
        gateway = Gateway()
        await gateway.act()
        gateway.revision, gateway.slow = "B", asyncio.Event()
        await gateway.act()
        await gateway.robot.close()
        await asyncio.sleep(0)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(run()) == []
