"""How many ranks share a planner's search: the fewest that keep the control budget by the latency model. Pure."""

from __future__ import annotations

import msgspec
from taktline_protocol.search_latency import UNIT_ON_A_GPU, LatencyModel, units_of

from taktline_operator.capacity import OVERHEAD_SHARE
from taktline_operator.engine_spec import Engine, Parallel, Search


class Choice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """status.search; the CRD describes the fields."""

    ranks: int
    most_ranks: int
    predicted_ms: float
    deadline_ms: float
    message: str


def choose(engine: Engine, budget_ms: float) -> Choice | None:
    """The ranks of a plan for a control budget; None where `engine.parallel.searchModel` is not set.

    `engine.parallel.search` is then the most that may be used. Where not even they keep the budget, the fastest number.
    """
    parallel = engine.parallel
    if parallel is None or parallel.search_model is None:
        return None
    stated = parallel.search_model
    search = engine.search or Search()
    # What the model speaks of is GPUs.
    units = units_of(search.candidates, search.micro_batch or UNIT_ON_A_GPU)
    model = LatencyModel(stated.round_ms / 1000.0, stated.rank_ms / 1000.0, stated.loss, units)
    rounds = search.rounds
    deadline_ms = (1.0 - OVERHEAD_SHARE) * budget_ms
    most = parallel.search
    enough = model.ranks_for(deadline_ms / 1000.0, rounds, most)
    ranks = enough if enough is not None else model.fastest(rounds, most)
    took = 1000.0 * model.plan_s(ranks, rounds)
    plan = f"{rounds} rounds on {ranks} rank{'s' if ranks > 1 else ''} take {took:.4g} ms"
    allowed = f"{deadline_ms:.4g} ms, the control budget less {OVERHEAD_SHARE:.0%} for the way"
    if enough is None:
        message = (
            f"{plan}, the least of any number up to {most}, and not within {allowed}: ask for fewer rounds or "
            "candidates, raise slo.controlBudgetMs or engine.parallel.search, or use search.anytime"
        )
    elif ranks == 1:
        message = f"{plan}, within {allowed}"
    else:
        *_, fewer = model.useful(ranks - 1)
        message = f"{plan}, within {allowed}; on {fewer} they would take {1000.0 * model.plan_s(fewer, rounds):.4g} ms"
    return Choice(
        ranks=ranks,
        most_ranks=most,
        predicted_ms=_rounded(took),
        deadline_ms=_rounded(deadline_ms),
        message=message,
    )


def applied(engine: Engine, choice: Choice) -> Engine:
    """The engine with the chosen ranks in `parallel.search`, which is what pods and engine.json are made from."""
    parallel = engine.parallel or Parallel()
    return msgspec.structs.replace(
        engine, parallel=msgspec.structs.replace(parallel, search=choice.ranks, search_model=None)
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
