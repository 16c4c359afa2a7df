"""The scheduling policies on recorded traces: on-time shares with the spread of the batches' times, and the bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.bounds import offline_bounds
from benchmarks.gateway.paired import difference
from benchmarks.gateway.peers import POLICIES, Ours
from benchmarks.gateway.recorded import recordings
from benchmarks.gateway.results import write_rows
from benchmarks.gateway.simulator import simulate, upper_bound
from benchmarks.gateway.times import ENGINES, Engine
from benchmarks.gateway.traces import HELD_OUT_SEEDS, Trace

LOADS = (0.7, 0.9, 1.5)
NAMES = ("pi05", "pi05-h200")
WINDOW_S = 2.0
WINDOWS = 3
"""Two seconds each, evenly over the recording, against the best schedule that knows all arrivals beforehand."""


def compare(names: Sequence[str] | None, seeds: int, output: Path | None, command: str) -> None:
    """Prints and writes one row for each recording, engine, load and policy, and the bounds up to 90% load."""
    rows: list[dict[str, Any]] = []
    for engine in (engine for engine in ENGINES if engine.name in (names or NAMES)):
        makers = [make(engine).name for make in POLICIES]
        head = "".join(f"{name:>16}" for name in makers)
        print(f"\n{engine.name}\n{'on-time %':<22}{'load':>5}{head}{'bound':>8}")
        for recording in recordings():
            for load in (None, *LOADS):
                trace = recording.trace(engine, load)
                found = _policies(trace, engine, HELD_OUT_SEEDS[:seeds])
                rows += [{**row, "own_pace": load is None} for row in found.pop("rows")]
                print(f"{recording.name:<22}{trace.load:>5.2f}{found['line']}", flush=True)
                if trace.load <= 0.95:
                    rows.append(_bound(trace, engine) | {"own_pace": load is None})
                    print(f"{'':<27}ours {100 * rows[-1]['on_time']:.2f} of {100 * rows[-1]['bound']:.2f}", flush=True)
    if output is not None:
        write_rows(output, rows, command)


def _policies(trace: Trace, engine: Engine, seeds: Sequence[int]) -> dict[str, Any]:
    shares = {
        make(engine).name: [simulate(trace, make(engine), engine, seed).share for seed in seeds] for make in POLICIES
    }
    means = {name: sum(each) / len(each) for name, each in shares.items()}
    ours = Ours(engine).name
    best = max((name for name in means if name != ours), key=means.__getitem__)
    standing = difference(shares[ours], shares[best]).standing
    bound = upper_bound(trace, engine)
    rows = [
        {
            "bench": "gateway-scheduling-recorded",
            "policy": engine.name,
            "trace": trace.name,
            "load": round(trace.load, 3),
            "scheduler": name,
            "seeds": list(seeds),
            "requests": len(trace.jobs),
            "on_time": round(means[name], 5),
            "on_time_by_seed": [round(share, 5) for share in each],
            "bound": round(bound, 5),
            "ratio": round(means[ours] / max(means[name], 1e-9), 3),
        }
        for name, each in shares.items()
    ]
    mark = "" if standing == "ahead" else f"  <-- {standing}"
    line = "".join(f"{100 * mean:>16.2f}" for mean in means.values()) + f"{100 * bound:>8.2f}{mark}"
    return {"rows": rows, "line": line}


def _bound(trace: Trace, engine: Engine) -> dict[str, Any]:
    """Ours against the offline optimum on a few windows; batches take their medians, so that the bound is one."""
    exact = dataclasses.replace(engine, sigma=0.0)
    total = ours = 0
    upper = reached = 0.0
    last = trace.jobs[-1].arrival
    for window in range(WINDOWS):
        start = (window + 0.5) * last / WINDOWS - WINDOW_S / 2
        jobs = tuple(
            dataclasses.replace(job, arrival=job.arrival - start, deadline=job.deadline - start)
            for job in trace.jobs
            if start <= job.arrival < start + WINDOW_S
        )
        bounds = offline_bounds(jobs, exact)
        ours += simulate(Trace(trace.name, trace.load, jobs), Ours(exact), exact).on_time
        total += len(jobs)
        upper += min(1.0, bounds.upper) * len(jobs)  # where labels were joined it may be more
        reached += bounds.reached * len(jobs)
    return {
        "bench": "gateway-scheduling-recorded-bound",
        "policy": engine.name,
        "trace": trace.name,
        "load": round(trace.load, 3),
        "scheduler": Ours(engine).name,
        "requests": total,
        "on_time": round(ours / total, 5),
        "reached_offline": round(reached / total, 5),
        "bound": round(upper / total, 5),
        "ratio": round(ours / max(upper, 1e-9), 4),
    }
