"""Frames that the robot fits give the chunk that the worker makes of whole ones, to the bit; or it is said why not."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
import taktline
from taktline_protocol import ErrorCode, TaktlineError

from tests.e2e.conftest import engine_config, started
from tests.worker.conftest import make_openpi_folder

CAMERAS = {name: name for name in ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")}
_names = itertools.count()
SIZES = [(480, 640), (112, 112), (300, 200)]


@pytest.fixture(scope="module")
def openpi_stack(tmp_path_factory):
    """The golden π0 weights as an openpi folder, which resizes by Pillow."""
    folder = tmp_path_factory.mktemp("fitted")
    facts = {"relative_mask": [], "adapt_to_pi": False, "action_horizon": 4, "state_dim": 8, "action_dim": 7}
    checkpoint = make_openpi_folder(folder / "policy", cameras=CAMERAS, **facts)
    with started(folder, engine_config("fitted", checkpoint, family="pi0")) as stack:
        yield stack


def pictures(seed):
    draw = np.random.default_rng(seed)
    sizes = zip(CAMERAS, SIZES, strict=True)
    return {name: draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for name, (height, width) in sizes}


async def chunks(stack, frames, transport="auto", **options):
    found = []
    async with taktline.AsyncRobot(
        stack.url, stack.policy, f"arm-{next(_names)}", transport=transport, **options
    ) as robot:
        for seed in (1, 2):
            chunk = await robot.act(frames, np.zeros(8), "reach", 120_000.0, seed=seed)
            found.append(chunk.actions)
        return found, robot.metrics.bytes_sent


@pytest.mark.parametrize("transport", ["stream", "http"])
def test_the_chunks_are_the_same_to_the_bit(openpi_stack, transport):
    frames = pictures(0)
    whole, many = asyncio.run(chunks(openpi_stack, frames, transport))
    fitted, few = asyncio.run(chunks(openpi_stack, frames, transport, fit_frames=True))
    assert all(map(np.array_equal, whole, fitted))
    assert not np.array_equal(whole[0], whole[1])
    assert few < many / 4
    other, _ = asyncio.run(chunks(openpi_stack, pictures(1), transport, fit_frames=True))
    assert not np.array_equal(other[0], fitted[0]), "the pictures matter"


def test_a_policy_that_resizes_otherwise_refuses_to_have_it_done(running_stack):
    names = running_stack.info().cameras
    frames = {name: np.zeros((48, 64, 3), np.uint8) for name in names}

    async def ask():
        async with taktline.AsyncRobot(running_stack.url, running_stack.policy, "arm", fit_frames=True) as robot:
            await robot.act(frames, np.zeros(running_stack.info().state_dim), "reach the red block", 120_000.0)

    with pytest.raises(TaktlineError, match="8-bit") as caught:
        asyncio.run(ask())
    assert caught.value.code is ErrorCode.CONFIG_INVALID


def test_the_rule_is_told(openpi_stack, running_stack):
    rule = openpi_stack.info().image_fit
    assert (rule.height, rule.width, rule.filter, rule.letterbox) == (112, 112, "bilinear", True)
    assert running_stack.info().image_fit is None
