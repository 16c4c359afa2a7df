"""On-time share of the deadline queue against other servers' policies, on the same traces in one run.

python -m benchmarks.gateway.scheduling [--output FILE] [--quick]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path

from benchmarks.gateway.peers import POLICIES
from benchmarks.gateway.simulator import simulate, upper_bound
from benchmarks.gateway.times import ENGINES
from benchmarks.gateway.traces import all_traces


def main() -> None:
    """Runs every policy on every trace of every engine, prints the tables, writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="the first engine only")
    arguments = parser.parse_args()
    rows = []
    for engine in ENGINES[:1] if arguments.quick else ENGINES:
        names = [make(engine).name for make in POLICIES]
        print(f"\n{engine.name}: best {engine.capacity_hz:.1f}/s ({engine.source})")
        print(f"{'on-time %':<32}{'load':>5}" + "".join(f"{name:>16}" for name in names) + f"{'bound':>8}")
        for trace in all_traces(engine.capacity_hz):
            results = {make(engine).name: simulate(trace, make(engine), engine) for make in POLICIES}
            bound = upper_bound(trace, engine)
            shares = [results[name].share for name in names]
            mark = "" if shares[0] >= max(shares) - 5e-4 else "  <-- behind"
            print(
                f"{trace.name:<32}{trace.load:>5.1f}"
                + "".join(f"{100 * share:>16.2f}" for share in shares)
                + f"{100 * bound:>8.2f}{mark}"
            )
            ours = results[names[0]]
            for name in names:
                result = results[name]
                rows.append(
                    {
                        "bench": "gateway-scheduling",
                        "policy": engine.name,
                        "trace": trace.name,
                        "load": trace.load,
                        "scheduler": name,
                        "requests": result.total,
                        "on_time": round(result.share, 5),
                        "bound": round(bound, 5),
                        "late": result.late,
                        "p99_margin_ms": round(result.p99_margin_ms, 2),
                        "mean_batch": round(statistics.fmean(result.batches or [0]), 2),
                        "decision_us_median": round(statistics.median(result.decisions_us), 1),
                        "decision_us_p99": round(sorted(result.decisions_us)[int(0.99 * len(result.decisions_us))], 1),
                        "ratio": round(ours.on_time / max(1, result.on_time), 3),
                        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                        "command": " ".join(["python -m benchmarks.gateway.scheduling", *sys.argv[1:]]),
                    }
                )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
