"""The latency model: its formula, the fit back from its own points, and the choice of ranks for a deadline."""

from __future__ import annotations

import random

import pytest
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.search_latency import LatencyModel
from taktline_worker.planning.latency import Measurement, fit

PUBLISHED = LatencyModel(round_s=2.14, rank_s=0.001, loss=0.008, units=8)


def test_formula_at_the_published_constants() -> None:
    assert PUBLISHED.plan_s(1, 10) == pytest.approx(21.4)
    assert PUBLISHED.plan_s(8, 10) == pytest.approx(2.895, abs=5e-4)
    assert PUBLISHED.efficiency(8) == pytest.approx(8 / 1.056)
    assert PUBLISHED.plan_s(8, 3) == pytest.approx(0.3 * PUBLISHED.plan_s(8, 10))


@pytest.mark.parametrize("model", [PUBLISHED, LatencyModel(0.338, 0.0, 0.02, 8), LatencyModel(0.05, 0.004, 0.0, 7)])
def test_fit_recovers_the_constants(model: LatencyModel) -> None:
    points = [Measurement(w, rounds, model.plan_s(w, rounds)) for w in (1, 2, 3, 4, 8) for rounds in (3, 10)]
    found = fit(points, model.units)
    assert found.round_s == pytest.approx(model.round_s, rel=1e-6)
    assert found.rank_s == pytest.approx(model.rank_s, abs=1e-7)
    assert found.loss == pytest.approx(model.loss, abs=1e-6)


def test_a_step_in_the_measurements_is_not_taken_for_a_loss() -> None:
    """On three ranks the largest share of eight units is three: 12.5 % more than a third, which is nobody's loss."""
    ideal = [Measurement(w, 10, 10.0 * -(-8 // w) / 8) for w in (1, 2, 3)]
    found = fit(ideal, 8)
    assert (found.loss, found.rank_s) == (pytest.approx(0.0, abs=1e-9), pytest.approx(0.0, abs=1e-9))
    assert found.plan_s(4, 10) == pytest.approx(2.5)


def test_fit_through_noise_predicts_within_the_noise() -> None:
    draw = random.Random(3)
    points = [
        Measurement(w, 10, PUBLISHED.plan_s(w, 10) * (1 + draw.uniform(-0.02, 0.02)))
        for w in (1, 2, 4, 8)
        for _ in range(5)
    ]
    found = fit(points, 8)
    for w in (1, 2, 3, 4, 6, 8):
        assert found.plan_s(w, 10) == pytest.approx(PUBLISHED.plan_s(w, 10), rel=0.04)
    assert found.rank_s >= 0
    assert found.loss >= 0


def test_no_constant_is_negative_where_ranks_help_more_than_they_can() -> None:
    found = fit([Measurement(w, 10, 10.0 / w**1.2) for w in (1, 2, 4, 8)], 8)
    assert (found.rank_s, found.loss) == (0.0, 0.0)
    assert found.round_s > 0


def test_ranks_for_a_deadline() -> None:
    assert PUBLISHED.ranks_for(30.0, 10, 8) == 1
    assert PUBLISHED.ranks_for(3.0, 10, 8) == 8
    assert PUBLISHED.ranks_for(2.0, 10, 8) is None
    # Five to seven ranks are no faster than four: one of them has two of the eight units.
    assert PUBLISHED.ranks_for(4.5, 10, 8) == 8
    assert PUBLISHED.ranks_for(4.5, 10, 7) is None
    assert PUBLISHED.fastest(10, 7) == 4
    assert list(PUBLISHED.useful(64)) == [1, 2, 3, 4, 8]
    # Past the best number of ranks, more of them only wait for each other.
    slow_gather = LatencyModel(round_s=0.01, rank_s=0.01, loss=0.0, units=8)
    assert slow_gather.ranks_for(0.012, 1, 8) == 1
    assert slow_gather.plan_s(8, 1) > slow_gather.plan_s(1, 1)


@pytest.mark.parametrize(
    "points",
    [
        [Measurement(1, 10, 1.0), Measurement(2, 10, 0.6)],
        [Measurement(2, 10, 1.0), Measurement(4, 10, 0.6), Measurement(8, 10, 0.4)],
        [Measurement(1, 10, 1.0), Measurement(2, 10, 0.0), Measurement(4, 10, 0.4)],
        [Measurement(1, 10, 1.0), Measurement(2, 0, 0.6), Measurement(4, 10, 0.4)],
        [Measurement(1, 10, float("nan")), Measurement(2, 10, 0.6), Measurement(4, 10, 0.4)],
    ],
)
def test_too_few_or_broken_measurements_are_refused(points: list[Measurement]) -> None:
    with pytest.raises(TaktlineError) as caught:
        fit(points, 8)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
