"""On-time share of the deadline queue against other servers' policies, on the same traces in one run.

python -m benchmarks.gateway.scheduling [--output FILE] [--part policies|bound|overload|all] [--engine NAME]
                                          [--seeds N]

policies: every trace, engine and policy on held-out seeds, with a loose bound that costs nothing. A seed stands for a
          day: its arrivals, and the spread of its batches' times. Ours is behind where the best of the others has a
          higher mean and the paired 95% interval over the seeds does not hold 0 (`paired`), else tied.
bound:    traces up to 90% load on ten seconds against the best schedule that knows all arrivals beforehand; batches
          take exactly their median, so that the bound is one. Of all engines but π0.5 on Hopper fleets of 8 only.
overload: on-time requests a second while the offered load grows to three times the capacity: ours and a FIFO.

Everything that was tuned was tuned on seeds below 1000; these traces come from others. Decisions are timed in CPU time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.bounds import SLOT_S, offline_bounds
from benchmarks.gateway.paired import difference
from benchmarks.gateway.peers import POLICIES, Fifo, Ours
from benchmarks.gateway.results import write_rows
from benchmarks.gateway.simulator import Result, simulate, upper_bound
from benchmarks.gateway.times import ENGINES, Engine
from benchmarks.gateway.traces import HELD_OUT_SEEDS, all_traces, bursty, even, fleet, poisson

BOUND_S = 10.0
SLOTS_OF_ONE = {"in step": 500, "out of step": 75}
"""Of fleets of 8, by how they come: time is rounded to such a part of a batch of one.

In step a turn is one or two batches, which a fraction of a millisecond lets fit or not.
"""
OVERLOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)


def policies(engines: Sequence[Engine], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Every policy on every trace."""
    rows = []
    for engine in engines:
        names = [make(engine).name for make in POLICIES]
        print(f"\n{engine.name}: best {engine.capacity_hz:.1f}/s ({engine.source}); seeds {', '.join(map(str, seeds))}")
        print(f"{'on-time %':<28}{'load':>5}" + "".join(f"{name:>16}" for name in names) + f"{'bound':>8}")
        for days in zip(*(all_traces(engine, seed) for seed in seeds), strict=True):
            total = sum(len(trace.jobs) for trace in days)
            results = [
                [simulate(trace, make(engine), engine, seed) for trace, seed in zip(days, seeds, strict=True)]
                for make in POLICIES
            ]
            shares = [sum(one.on_time for one in day) / total for day in results]
            bound = sum(upper_bound(trace, engine) * len(trace.jobs) for trace in days) / total
            best = max(range(1, len(shares)), key=shares.__getitem__)
            against = difference(*([one.share for one in results[which]] for which in (0, best)))
            mark = "" if against.standing == "ahead" else f"  <-- {against.standing}"
            trace = days[0]
            print(
                f"{trace.name:<28}{trace.load:>5.1f}"
                + "".join(f"{100 * share:>16.2f}" for share in shares)
                + f"{100 * bound:>8.2f}{mark}"
            )
            for name, day, share in zip(names, results, shares, strict=True):
                rows.append(
                    {
                        "bench": "gateway-scheduling",
                        "policy": engine.name,
                        "trace": trace.name,
                        "load": trace.load,
                        "scheduler": name,
                        "seeds": list(seeds),
                        **_summary(day, total, share),
                        "on_time_by_seed": [round(one.share, 5) for one in day],
                        "bound": round(bound, 5),
                        "ratio": round(shares[0] / max(share, 1e-9), 3),
                    }
                )
    return rows


def _summary(day: Sequence[Result], total: int, share: float) -> dict[str, Any]:
    margins = sorted(margin for result in day for margin in result.margins_ms)
    decisions = sorted(spent for result in day for spent in result.decisions_us)
    return {
        "requests": total,
        "on_time": round(share, 5),
        "late": sum(result.late for result in day),
        "p99_margin_ms": round(margins[int(0.01 * len(margins))], 2) if margins else None,
        "mean_batch": round(statistics.fmean([size for result in day for size in result.batches] or [0]), 2),
        "decision_us_median": round(statistics.median(decisions), 1),
        "decision_us_p99": round(decisions[int(0.99 * len(decisions))], 1),
    }


def near_bound(engines: Sequence[Engine], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Ours against the offline optimum."""
    rows = []
    for engine in (dataclasses.replace(engine, sigma=0.0) for engine in engines):
        print(f"\n{engine.name}, {BOUND_S:g} s, exact medians; the offline optimum lies between reached and bound")
        print(f"{'on-time %':<28}{'load':>5}{'ours':>9}{'Clockwork':>11}{'reached':>9}{'bound':>8}{'gap':>7}")
        for load in (0.7, 0.8, 0.9):
            for make in (_short_traces if engine.name == ENGINES[0].name else _small_fleets)(engine, load):
                days = [make(seed) for seed in seeds]
                total = sum(len(trace.jobs) for trace in days)
                ours, peer = (
                    sum(simulate(trace, policy(engine), engine).on_time for trace in days) / total
                    for policy in (Ours, POLICIES[-1])
                )
                bounds = [offline_bounds(trace.jobs, engine, slot_s=_slot_s(trace.name, engine)) for trace in days]
                reached, upper = (
                    sum(value * len(trace.jobs) for value, trace in zip(values, days, strict=True)) / total
                    for values in ([one.reached for one in bounds], [one.upper for one in bounds])
                )
                name = days[0].name
                figures = f"{100 * ours:>9.2f}{100 * peer:>11.2f}{100 * reached:>9.2f}{100 * upper:>8.2f}"
                print(f"{name:<28}{load:>5.1f}{figures}{100 * (upper - ours):>7.2f}", flush=True)
                rows.append(
                    {
                        "bench": "gateway-scheduling-bound",
                        "policy": engine.name,
                        "trace": name,
                        "load": load,
                        "scheduler": Ours(engine).name,
                        "seeds": list(seeds),
                        "requests": total,
                        "on_time": round(ours, 5),
                        "peer": POLICIES[-1](engine).name,
                        "peer_on_time": round(peer, 5),
                        "reached_offline": round(reached, 5),
                        "bound": round(upper, 5),
                        "ratio": round(ours / max(upper, 1e-9), 4),
                    }
                )
    return rows


def _slot_s(trace: str, engine: Engine) -> float:
    count, _, start = trace.partition(" robots ")
    return min(SLOT_S, engine.median_s(1) / SLOTS_OF_ONE[start]) if count == "8" else SLOT_S


def _short_traces(engine: Engine, load: float) -> list[Any]:
    rate = engine.capacity_hz

    def random(make: Any, name: str, budget: Any) -> Any:
        return lambda seed: make(name, load, rate, budget, seed, BOUND_S)

    return [
        random(poisson, "poisson, 150-500 ms", even(150, 500)),
        random(poisson, "poisson, 300-800 ms", even(300, 800)),
        random(poisson, "poisson, mixed", engine.pace.mixed),
        random(bursty, "bursty, 150-500 ms", even(150, 500)),
        *_small_fleets(engine, load),
        *_fleets(engine, load, 32),
    ]


def _small_fleets(engine: Engine, load: float) -> list[Any]:
    return _fleets(engine, load, 8)


def _fleets(engine: Engine, load: float, count: int) -> list[Any]:
    def robots(name: str, jitter_ms: float | None) -> Any:
        name, rate = f"{count} robots {name} step", engine.capacity_hz
        return lambda seed: fleet(name, load, rate, count, 0.8, jitter_ms=jitter_ms, seed=seed, duration_s=BOUND_S)

    return [robots("in", 2.0), robots("out of", None)]


def overload(engine: Engine, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Goodput while the offered load grows, with the engine's usual budgets."""
    rows, pace = [], engine.pace
    name = f"poisson, {pace.label}"
    print(f"\n{engine.name}: on-time requests a second under growing load (capacity {engine.capacity_hz:.1f}/s)")
    makers = (Ours, Fifo)
    goodput: dict[str, list[float]] = {make(engine).name: [] for make in makers}
    for load in OVERLOADS:
        days = [poisson(name, load, engine.capacity_hz, pace.even, seed, pace.duration_s) for seed in seeds]
        for make in makers:
            played = zip(days, seeds, strict=True)
            served = sum(simulate(trace, make(engine), engine, seed).on_time for trace, seed in played)
            goodput[make(engine).name].append(served / len(days) / pace.duration_s)
    print(f"{'load':<16}" + "".join(f"{load:>8.1f}" for load in OVERLOADS) + f"{'at 3x / peak':>14}")
    for name, values in goodput.items():
        print(f"{name:<16}" + "".join(f"{value:>8.1f}" for value in values) + f"{values[-1] / max(values):>14.3f}")
        for load, value in zip(OVERLOADS, values, strict=True):
            rows.append(
                {
                    "bench": "gateway-overload",
                    "policy": engine.name,
                    "trace": "poisson, 150-500 ms",
                    "load": load,
                    "scheduler": name,
                    "seeds": list(seeds),
                    "goodput_hz": round(value, 2),
                    "share_of_peak": round(value / max(values), 4),
                }
            )
    return rows


def main() -> None:
    """Runs the parts asked for, prints the tables, writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", choices=("policies", "bound", "overload", "all"), default="all")
    parser.add_argument("--engine", choices=[engine.name for engine in ENGINES], action="append")
    parser.add_argument("--seeds", type=int, default=len(HELD_OUT_SEEDS), help="how many of the held-out seeds")
    arguments = parser.parse_args()
    engines = [engine for engine in ENGINES if not arguments.engine or engine.name in arguments.engine]
    seeds = HELD_OUT_SEEDS[: arguments.seeds]
    rows: list[dict[str, Any]] = []
    if arguments.part in ("policies", "all"):
        rows += policies(engines, seeds)
    if arguments.part in ("overload", "all"):
        for engine in engines:
            rows += overload(engine, seeds)
    if arguments.part in ("bound", "all"):
        rows += near_bound([engine for engine in engines if engine.pace.chunk_ms == float("inf")], seeds)
    if arguments.output is not None:
        write_rows(arguments.output, rows, " ".join(["python -m benchmarks.gateway.scheduling", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
