"""The ranks of a planner for a control budget: the fewest that keep it by the latency model, and why, in status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from taktline_operator import search_ranks, workload
from taktline_operator.engine_spec import Engine, Parallel, Search, SearchModel

# The published cluster: 2.14 s a round of 800 candidates, 8 units, on an A100, 1 ms for each further rank, 0.8 % lost
# by each.
MODEL = SearchModel(round_ms=2140, rank_ms=1, loss=0.008)


def engine(most: int = 8, rounds: int = 10, model: SearchModel | None = MODEL) -> Engine:
    return Engine(parallel=Parallel(search=most, search_model=model), search=Search(rounds=rounds, candidates=800))


@pytest.mark.parametrize(
    ("budget_ms", "rounds", "ranks"),
    [(30_000, 10, 1), (23_000, 10, 2), (11_900, 10, 3), (3_300, 10, 8), (7_200, 3, 1), (1_000, 3, 8)],
)
def test_the_fewest_ranks_that_keep_the_budget(budget_ms: float, rounds: int, ranks: int) -> None:
    choice = search_ranks.choose(engine(rounds=rounds), budget_ms)
    assert choice is not None
    assert choice.ranks == ranks
    assert choice.predicted_ms <= choice.deadline_ms == pytest.approx(0.9 * budget_ms)
    assert "within" in choice.message
    fewer = search_ranks.choose(engine(most=max(1, ranks - 1), rounds=rounds), budget_ms)
    assert fewer is not None
    assert ranks == 1 or fewer.predicted_ms > fewer.deadline_ms


def test_the_published_plan_on_eight_ranks() -> None:
    choice = search_ranks.choose(engine(), 3_300)
    assert choice is not None
    assert choice.predicted_ms == pytest.approx(2895, abs=1)
    assert "on 4 they would take 5508 ms" in choice.message  # 5 to 7 are no faster: some rank has two units


def test_ranks_that_make_no_share_smaller_are_not_taken() -> None:
    """By eff(W) alone five ranks would take 4457 ms; those with two units take 5561."""
    choice = search_ranks.choose(engine(), 5_000)
    assert choice is not None
    assert choice.ranks == 8
    most = search_ranks.choose(engine(most=7), 5_000)
    assert most is not None
    assert (most.ranks, most.predicted_ms) == (4, 5508)
    assert "not within 4500 ms" in most.message
    assert most.message.startswith("10 rounds on 4 ranks take 5508 ms")


def test_units_follow_the_search() -> None:
    small = Engine(parallel=Parallel(search=8, search_model=MODEL), search=Search(candidates=400))
    choice = search_ranks.choose(small, 7_000)
    assert choice is not None
    assert choice.ranks == 4
    coarse = Engine(parallel=Parallel(search=8, search_model=MODEL), search=Search(candidates=800, micro_batch=400))
    choice = search_ranks.choose(coarse, 7_000)
    assert choice is not None
    assert choice.ranks == 2


def test_where_no_number_keeps_the_budget_the_fastest_is_taken_and_said() -> None:
    choice = search_ranks.choose(engine(), 1_000)
    assert choice is not None
    assert choice.ranks == 8
    assert "not within 900 ms" in choice.message
    assert "fewer rounds" in choice.message
    # Each further rank costs more than it brings here.
    slow = search_ranks.choose(engine(model=SearchModel(round_ms=100, rank_ms=40)), 100)
    assert slow is not None
    assert slow.ranks == 2


def test_without_a_model_the_stated_ranks_stay() -> None:
    assert search_ranks.choose(engine(model=None), 1_000) is None
    assert search_ranks.choose(Engine(), 1_000) is None


def planner(make: Any, **parallel: Any) -> Any:
    return make.policy(
        model={"family": "vjepa2-ac", "source": {"path": "/srv/policies/planner"}, "revision": "a"},
        pools=[{"name": "gpus", "accelerator": "h200"}],
        slo={"controlBudgetMs": 11_900},
        engine={"parallel": parallel, "search": {"candidates": 800}},
    )


def test_pods_config_and_revision_follow_the_choice(make: Any) -> None:
    chosen = planner(make, search=8, searchModel={"roundMs": 2140, "rankMs": 1, "loss": 0.008})
    stated = planner(make, search=3)
    assert chosen.spec.engine.gpus == 3
    assert chosen.spec.engine.described() == stated.spec.engine.described()
    maps = [workload.config_map(one, one.spec.pools[0])["data"]["engine.json"] for one in (chosen, stated)]
    assert maps[0] == maps[1]
    assert json.loads(maps[0])["engine"]["parallel"]["search"] == 3
    # The model's noise changes nothing as long as the choice stays.
    again = planner(make, search=8, searchModel={"roundMs": 2150, "rankMs": 1.1, "loss": 0.008})
    assert again.spec.engine == chosen.spec.engine


def status(make: Any, policy: Any) -> Any:
    return make.plan(policy, make.Observed(live=make.body(), now=make.now), make.settings).status


def test_status_says_how_many_and_why(make: Any) -> None:
    chosen = planner(make, search=8, searchModel={"roundMs": 2140, "rankMs": 1, "loss": 0.008})
    found = status(make, chosen)["search"]
    assert found["ranks"] == 3
    assert found["mostRanks"] == 8
    assert found["deadlineMs"] == 10_710
    assert found["message"].startswith("10 rounds on 3 ranks take")
    assert "search" not in status(make, planner(make, search=3))
