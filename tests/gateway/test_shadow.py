"""How far two chunks lie apart, in tolerances."""

from __future__ import annotations

import numpy as np
import pytest
from taktline_gateway import shadow
from taktline_protocol.deployment import Candidate
from taktline_protocol.measurements import Shadow

BASE = np.zeros((4, 3), np.float32)


def moved(row: int, column: int, by: float) -> np.ndarray:
    chunk = BASE.copy()
    chunk[row, column] = by
    return chunk


def test_equal_chunks_agree_at_any_tolerance() -> None:
    assert shadow.difference(BASE, BASE.copy(), Candidate(id="c", tolerance=0.0)) == (0.0, 0.0)


@pytest.mark.parametrize(("by", "agrees"), [(0.019, True), (0.021, False), (-0.021, False)])
def test_the_worst_action_decides(by: float, agrees: bool) -> None:
    found = shadow.difference(BASE, moved(3, 1, by), Candidate(id="c", tolerance=0.02))
    assert found is not None
    assert (found[0] <= 1.0) is agrees
    assert found[1] == pytest.approx(abs(by), rel=1e-5)


def test_each_dimension_may_have_its_own_tolerance() -> None:
    candidate = Candidate(id="c", tolerance=1e-9, tolerances=(0.1, 0.001, 0.1))
    found = shadow.difference(BASE, moved(0, 0, 0.05), candidate)
    assert found is not None
    assert found[0] == pytest.approx(0.5, rel=1e-5)
    found = shadow.difference(BASE, moved(0, 1, 0.05), candidate)
    assert found is not None
    assert found[0] == pytest.approx(50.0, rel=1e-5)


def test_rows_that_no_robot_executes_may_be_left_out() -> None:
    assert shadow.difference(BASE, moved(3, 0, 9.0), Candidate(id="c", tolerance=0.1, rows=3)) == (0.0, 0.0)


def test_zero_tolerance_means_equal_bits() -> None:
    found = shadow.difference(BASE, moved(0, 0, 1e-30), Candidate(id="c", tolerance=0.0))
    assert found is not None
    assert found[0] == shadow.WORST_RATIO


def test_other_shapes_are_no_agreement() -> None:
    counts = Shadow()
    shadow.note(counts, shadow.difference(BASE, BASE[:2], Candidate(id="c", tolerance=1.0)))
    shadow.note(counts, shadow.difference(BASE, BASE, Candidate(id="c", tolerances=(1.0,))))
    assert (counts.compared, counts.agreed, counts.reshaped) == (2, 0, 2)


def test_counts_add_up() -> None:
    counts = Shadow()
    for by in (0.0, 0.01, 0.04):
        shadow.note(counts, shadow.difference(BASE, moved(0, 0, by), Candidate(id="c", tolerance=0.02)))
    assert (counts.compared, counts.agreed) == (3, 2)
    assert counts.ratio_max == pytest.approx(2.0, rel=1e-5)
    assert counts.ratio_sum == pytest.approx(2.5, rel=1e-5)
