"""A state is its own length of finite numbers, whether it is short or long, float32 or float64."""

from __future__ import annotations

import numpy as np
import pytest
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.checks import state_length
from taktline_protocol.limits import DEFAULT_LIMITS, Limits
from taktline_protocol.messages import Array


@pytest.mark.parametrize("dtype", ["<f4", "<f8"])
@pytest.mark.parametrize("length", [1, 8, 64, 65, 200])
def test_its_length(dtype, length):
    state = np.linspace(-3e38, 3e38, length).astype(dtype)  # in float64 these do not overflow; larger ones may
    assert state_length(Array.from_numpy(state), DEFAULT_LIMITS) == length
    assert state_length([0.5] * length, DEFAULT_LIMITS) == length


def test_finite_numbers_may_add_up_to_infinity():
    assert state_length(Array.from_numpy(np.full(8, 1.7e308)), DEFAULT_LIMITS) == 8


@pytest.mark.parametrize(
    "state",
    [
        Array.from_numpy(np.asarray([0.0, np.nan])),
        Array.from_numpy(np.asarray([np.inf, 0.0], "<f4")),
        Array.from_numpy(np.asarray([np.inf, -np.inf])),
        Array.from_numpy(np.zeros((2, 2))),
        Array.from_numpy(np.zeros(0)),
        Array.from_numpy(np.zeros(9)),
        Array("int32", (2,), bytes(8)),
        Array("float64", (2,), bytes(15)),
        Array("float64", (2,), bytes(17)),
        Array("float32", (3,), bytes(8)),
        Array("float32", (), bytes(4)),
    ],
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(TaktlineError) as caught:
        state_length(state, Limits(state_length=8))
    assert caught.value.code is ErrorCode.STATE_INVALID
