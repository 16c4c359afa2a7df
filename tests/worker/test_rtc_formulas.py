"""Real-time chunking: weights, guidance, clipping, and robot units to model units and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import RtcOptions
from taktline_worker.models.pi import aloha
from taktline_worker.models.pi.normalise import Normaliser, identity
from taktline_worker.models.pi.rtc import model_tail, settings_of
from taktline_worker.rtc import SCHEDULES, RtcSettings, guidance_weight, plan_rtc, prefix_weights, read_tail

GUIDED = RtcSettings("guided")
TRAINED = RtcSettings("trained", max_delay=4)


def plain_weight(i: int, d: int, e: int, schedule: str) -> float:
    """The formula for one action, as the facts state it."""
    start = min(d, e)
    if i < start:
        return 1.0
    if i >= e:
        return 0.0
    falling = (e - i) / (e - start + 1)
    return {
        "linear": falling,
        "exp": falling * (math.exp(falling) - 1) / (2.718281828459045 - 1),
        "ones": 1.0,
        "zeros": 0.0,
    }[schedule]


def test_the_published_example() -> None:
    assert prefix_weights(2, 6, 10, "linear") == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0])


@given(d=st.integers(0, 20), e=st.integers(0, 16), schedule=st.sampled_from(SCHEDULES))
def test_weights_follow_the_formula_and_never_rise(d: int, e: int, schedule: Any) -> None:
    weights = prefix_weights(d, e, 16, schedule)
    assert weights == pytest.approx([plain_weight(i, d, e, schedule) for i in range(16)], abs=1e-12)
    assert (np.diff(weights) <= 1e-12).all()


def test_guidance_weight() -> None:
    assert guidance_weight(0.0, 10.0) == 10.0
    assert guidance_weight(0.01, 10.0) == 10.0
    assert guidance_weight(0.5, 10.0) == pytest.approx(2.0)
    assert guidance_weight(0.9, 10.0) == pytest.approx((0.1 / 0.9) * (0.81 + 0.01) / 0.01)
    assert guidance_weight(0.9, 5.0) == 5.0


@pytest.mark.parametrize(
    ("tail", "delay", "s", "e", "expected"),
    [
        (8, 2, None, None, (2, 8)),  # guidance ends with the tail
        (8, 2, None, 5, (2, 5)),
        (8, 2, 4, None, (2, 6)),  # H - s
        (8, 2, 2, None, (2, 8)),
        (4, 2, 3, None, (2, 4)),  # clipped to the tail
        (3, 5, None, None, (3, 3)),  # more is executed than is known: all that is known is held
        (8, 6, None, 3, (3, 3)),
        (8, 0, None, None, (0, 8)),
    ],
)
def test_what_is_applied(tail: int, delay: int, s: int | None, e: int | None, expected: tuple[int, int]) -> None:
    plan = plan_rtc(GUIDED, 10, tail, delay, s, e)
    assert (plan.delay, plan.end) == expected


@pytest.mark.parametrize(
    ("settings", "tail", "delay", "s", "word"),
    [
        (GUIDED, 8, None, None, "not stated"),
        (GUIDED, 8, 11, None, "a chunk has 10"),
        (GUIDED, 8, 4, 3, "between 4 and 6"),
        (TRAINED, 8, 5, None, "at most 4"),
        (TRAINED, 2, 3, None, "the tail holds 2"),
    ],
)
def test_what_is_refused(settings: RtcSettings, tail: int, delay: int | None, s: int | None, word: str) -> None:
    with pytest.raises(TaktlineError) as caught:
        plan_rtc(settings, 10, tail, delay, s, None)
    assert caught.value.code is ErrorCode.RTC_INVALID
    assert word in caught.value.message
    assert caught.value.next_step


@pytest.mark.parametrize(
    "tail", [np.zeros((3, 6)), np.zeros((11, 7)), np.zeros((0, 7)), np.zeros(7), np.zeros((3, 7), np.int64)]
)
def test_tails_of_another_shape(tail: Any) -> None:
    with pytest.raises(TaktlineError) as caught:
        read_tail(tail, 10, 7)
    assert caught.value.code is ErrorCode.RTC_INVALID


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tails_that_are_not_finite(value: float) -> None:
    tail = np.zeros((3, 7), np.float32)
    tail[1, 6] = value
    with pytest.raises(TaktlineError, match=r"tail\[1\]"):
        read_tail(tail, 10, 7)


def normaliser(mode: Any, *, openpi: bool, width: int = 7) -> Normaliser:
    draw = np.random.default_rng(3)
    dtype = np.float64 if openpi else np.float32
    low = draw.normal(size=width).astype(dtype)
    high = (np.abs(low) if mode == "MEAN_STD" else low) + draw.uniform(0.1, 2.0, width).astype(dtype)
    return Normaliser(mode, low, high.astype(dtype), 1e-6 if openpi else 1e-8, openpi)


NORMALISERS = [identity()] + [
    normaliser(mode, openpi=openpi) for openpi in (False, True) for mode in ("MEAN_STD", "MIN_MAX", "QUANTILES")
]


@pytest.mark.parametrize("normalise", NORMALISERS, ids=lambda n: f"{n.mode}-{n.low.dtype}")
@pytest.mark.parametrize("relative", [(), (True,) * 6 + (False,), (True, False, True)])
def test_robot_units_and_back(network: Any, normalise: Normaliser, relative: tuple[bool, ...]) -> None:
    """What the policy answered, sent back as a tail, stands for the same network output, and the other way round."""
    processor = _processor(network, normalise, relative)
    state = np.linspace(-2, 2, 8)
    output = torch.from_numpy(np.random.default_rng(1).normal(size=(10, 32)).astype(np.float32))
    actions = processor.finish(output, state)
    back = model_tail(processor.conventions, actions.astype(np.float64), state)
    assert back == pytest.approx(output[:, :7].numpy(), abs=3e-5)
    again = processor.finish(torch.from_numpy(np.pad(back, ((0, 0), (0, 25))).astype(np.float32)), state)
    assert again == pytest.approx(actions, rel=1e-5, abs=2e-6)


def test_a_relative_tail_is_taken_against_the_new_state(network: Any) -> None:
    processor = _processor(network, NORMALISERS[1], (True,) * 7)
    tail = np.random.default_rng(1).normal(size=(5, 7))
    old, new = np.zeros(8), np.full(8, 0.25)
    moved = model_tail(processor.conventions, tail, new)
    assert moved == pytest.approx(model_tail(processor.conventions, tail - 0.25, old))
    padded = torch.from_numpy(np.pad(moved, ((0, 0), (0, 25))).astype(np.float32))
    assert processor.finish(padded, new) == pytest.approx(tail, abs=1e-5)


def test_aloha_actions_and_back() -> None:
    actions = np.random.default_rng(5).normal(size=(6, 14))
    assert aloha.to_policy_actions(aloha.to_robot_actions(actions)) == pytest.approx(actions)
    assert aloha.to_robot_actions(aloha.to_policy_actions(actions)) == pytest.approx(actions)


@pytest.mark.parametrize("openpi", [False, True])
@pytest.mark.parametrize(("mode", "expected"), [("MEAN_STD", 0.0), ("QUANTILES", -1.0)])
def test_a_dimension_that_never_moved_gets_its_training_value(mode: Any, expected: float, openpi: bool) -> None:
    dtype = np.float64 if openpi else np.float32
    low = np.array([0.7], dtype)
    high = np.zeros(1, dtype) if mode == "MEAN_STD" else low
    constant = Normaliser(mode, low, high, 1e-6 if openpi else 1e-8, openpi)
    # The last digit of a float32 0.7 is larger than the whole range of this dimension.
    assert constant.undo(np.array([[np.float32(0.7) + np.float32(6e-8)]], np.float64)).tolist() == [[expected]]


def _processor(network: Any, normalise: Normaliser, relative: tuple[bool, ...]) -> Any:
    from taktline_worker.models.pi.processor import PiProcessor

    conventions = network.conventions(
        "pi05", state_dim=8, action_dim=7, action_normaliser=normalise, relative_mask=relative
    )
    return PiProcessor(None, conventions, None, {})  # type: ignore[arg-type]  # only `finish` is called


@pytest.mark.parametrize(
    ("options", "checkpoint", "expected"),
    [
        ({}, {}, RtcSettings("guided")),
        ({}, {"rtc_schedule": "exp", "rtc_max_guidance_weight": 5.0}, RtcSettings("guided", "exp", 5.0)),
        (
            {"schedule": "ones", "max_guidance_weight": 2.0, "gradient": "vjp"},
            {"rtc_schedule": "exp", "rtc_max_guidance_weight": 5.0},
            RtcSettings("guided", "ones", 2.0, exact=True),
        ),
        ({}, {"rtc_max_delay": 3}, RtcSettings("trained", max_delay=3)),
        ({"mode": "trained"}, {"rtc_max_delay": 30}, RtcSettings("trained", max_delay=10)),
        ({"mode": "guided"}, {"rtc_max_delay": 3}, RtcSettings("guided")),
        ({"mode": "off"}, {"rtc_max_delay": 3}, None),
    ],
)
def test_settings(network: Any, options: dict[str, Any], checkpoint: dict[str, Any], expected: Any) -> None:
    assert settings_of(network.conventions("pi05", **checkpoint), RtcOptions(**options)) == expected


def test_trained_mode_needs_a_trained_checkpoint(network: Any) -> None:
    with pytest.raises(TaktlineError) as caught:
        settings_of(network.conventions("pi05"), RtcOptions(mode="trained"))
    assert caught.value.code is ErrorCode.CONFIG_INVALID
