"""A robot is handed finite numbers only, whichever of the ways of seeing that looks at them."""

from __future__ import annotations

import numpy as np
import pytest
from taktline_gateway.pending import _finite
from taktline_protocol.messages import Array

LARGE = [3.4e38, -3.4e38, 2.0**127, -(2.0**127), 1.7e38, 1e-45, 0.0, -0.0]


@pytest.mark.parametrize("at", [0, 1, 1599])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_is_seen(value, at):
    actions = np.linspace(-1, 1, 1600, dtype="<f4").reshape(50, 32)
    assert _finite(Array.from_numpy(actions))
    actions.flat[at] = value
    assert not _finite(Array.from_numpy(actions))


def test_large_numbers_are_numbers():
    assert _finite(Array.from_numpy(np.asarray([LARGE], "<f4")))
    assert _finite(Array.from_numpy(np.full((50, 32), 3.4e38, "<f4")))
    assert not _finite(Array.from_numpy(np.asarray([[*LARGE, np.nan]], "<f4")))


def test_every_pattern_of_bits_at_the_edge_is_told_as_numpy_tells_it():
    bits = np.arange(1 << 16, dtype=np.uint32) << 16 | 1
    for value in np.concatenate([bits, bits & 0xFFFF0000]).view("<f4")[::3]:
        assert _finite(Array.from_numpy(value.reshape(1, 1))) == np.isfinite(value)
