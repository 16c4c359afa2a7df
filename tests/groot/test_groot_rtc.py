"""GR00T's real-time chunking against its formula stated row by row, and the tail's way into the network's units."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import RtcOptions
from taktline_worker.adapter import GuidedChunk
from taktline_worker.models.groot.adapter import load
from taktline_worker.models.groot.rtc import RtcRow, strengths
from taktline_worker.observation import RtcInput
from taktline_worker.rtc import RtcPlan


def test_strengths_are_the_stated_ramp() -> None:
    for delay, end, horizon, rate in ((2, 5, 6, 6.0), (0, 6, 6, 1.5), (3, 3, 6, 6.0), (0, 0, 4, 2.0), (6, 6, 6, 2.0)):
        expected = []
        for i in range(horizon):
            t = (i - delay + 1) / (end - delay + 1) if end > delay else 0.0
            ramp = (1 - math.exp(-rate * t)) / (1 - math.exp(-rate))
            expected.append(0.0 if i < delay else ramp if i < end else 1.0)
        assert strengths(delay, end, horizon, rate) == pytest.approx(expected)
    between = strengths(1, 5, 6, 6.0)[1:5]
    assert ((between > 0) & (between < 1)).all()
    assert (np.diff(between) > 0).all()


def with_tail(row: Any, seed: int, delay: int, end: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    strength = torch.from_numpy(strengths(delay, end, 6, 6.0)).float()[:, None].expand(6, 20).clone()
    strength[:, 11:] = 1.0  # dimensions that the robot does not have
    return dataclasses.replace(row, rtc=RtcRow(torch.randn(6, 20, generator=generator), strength, RtcPlan(delay, end)))


def test_rows_follow_their_own_tails_and_others_none(kit: Any) -> None:
    runner = kit.runner()
    case, (first, second) = kit.case("case_b2")
    rows = [with_tail(first, 1, 2, 4), second, with_tail(second, 2, 0, 6)]
    seen: list[Any] = []
    actions = runner.run(rows, lambda step, x, velocity: seen.append((x.clone(), velocity.clone())))
    for index, row in enumerate(rows):
        own: list[Any] = []
        alone = runner.run([row], lambda step, x, velocity: own.append((x, velocity)))  # noqa: B023
        assert kit.distance(actions[index], alone[0]) < 1e-6
        if row.rtc is None:
            assert kit.distance(alone[0], case["actions_row_alone"][1]) < 1e-5
            continue
        # The solver by hand, from the velocities that were seen.
        x = torch.where(row.rtc.strength < 1, row.rtc.start, row.noise)
        for given, velocity in own:
            assert torch.allclose(given[0], x, atol=1e-6)
            x = x + 0.25 * velocity[0] * row.rtc.strength
        assert torch.allclose(alone[0], x, atol=1e-6)
        frozen = row.rtc.strength == 0
        assert torch.equal(alone[0][frozen], row.rtc.start[frozen])


@pytest.mark.parametrize("tag", ["libero_sim", "droid"])
def test_a_tail_in_robot_units_comes_back_where_it_is_fixed(kit: Any, tmp_path: Path, pool: Any, tag: str) -> None:
    adapter = load(kit.config(kit.folder(tmp_path / "checkpoint"), tag))
    assert adapter.description.rtc == "guided"
    changes: dict[str, Any] = {}
    if tag == "droid":
        images = {"exterior@-15": kit.raw(), "exterior": kit.raw(seed=1)}
        state = np.array([0.4, 0.1, 0.3, 0, 1, 0, -1, 0, 0, 0.5, -0.5, 0.2])
        changes = {"images": images, "state": state}
    last = adapter.begin(kit.observe(seed=3, **changes), pool).result()
    (chunk,) = adapter.finish([last], adapter.run([last], 1))
    tail = chunk[1:].astype(np.float64)
    moved = changes.get("state", kit.observe().state).copy()
    moved[0] += 0.02  # the arm has moved on since that chunk
    observation = kit.observe(seed=4, **(changes | {"state": moved}), rtc=RtcInput(tail, delay=2))
    row = adapter.begin(observation, pool).result()
    (answer,) = adapter.finish([row], adapter.run([row], 1))
    assert isinstance(answer, GuidedChunk)
    assert (answer.mode, answer.schedule, answer.delay, answer.prefix_end) == ("guided", "exp", 2, len(tail))
    # The joints' bounds there grow with the action, and what lies beyond them is cut off as for any answer.
    exact = slice(9) if tag == "droid" else slice(None)
    assert answer.actions[:2, exact] == pytest.approx(tail[:2, exact], abs=2e-3 if tag == "droid" else 1e-5)
    assert not np.allclose(answer.actions[2:], np.pad(tail, ((0, 1), (0, 0)))[2:], atol=1e-3)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (RtcInput(np.zeros((2, 3)), delay=1), "float rows of 4"),
        (RtcInput(np.full((2, 4), np.nan), delay=1), "NaN"),
        (RtcInput(np.zeros((7, 4)), delay=1), "1 to 6"),
        (RtcInput(np.zeros((2, 4))), "delay is not stated"),
        (RtcInput(np.full((2, 4), 1e300), delay=1), "out of all proportion"),
    ],
)
def test_bad_tails_are_refused(kit: Any, tmp_path: Path, pool: Any, sent: RtcInput, said: str) -> None:
    adapter = load(kit.config(kit.folder(tmp_path / "checkpoint")))
    with pytest.raises(TaktlineError, match=said) as caught:
        adapter.begin(kit.observe(rtc=sent), pool)
    assert caught.value.code == ErrorCode.RTC_INVALID


def test_a_deployment_can_refuse_tails(kit: Any, tmp_path: Path) -> None:
    adapter = load(kit.config(kit.folder(tmp_path / "checkpoint"), rtc=RtcOptions(mode="off")))
    assert adapter.description.rtc == ""
