"""What hints buy: fleets that start in step and out of step, told when to observe next and not told.

python -m benchmarks.gateway.dephasing [--output FILE]

The closed loop of `closed_loop`, π0.5 on Hopper. Each case is a fleet of one kind; `left` is what its buffer holds when
it asks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path

from benchmarks.gateway.closed_loop import Taktline, fleet, run
from benchmarks.gateway.times import ENGINES

CASES = ((8, 50.0, 25, 30), (20, 50.0, 25, 30), (32, 50.0, 25, 34), (40, 50.0, 25, 50), (80, 20.0, 20, 25))
"""(robots, control rate, actions between two observations, chunk)."""
SEEDS = (7001, 7002, 7003)


def main() -> None:
    """Runs every case, prints the table, writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    engine, rows = ENGINES[0], []
    head = f"{'robots':>7}{'Hz':>4}{'left ms':>9}{'load':>6} {'start':<12}{'hints':<8}"
    print(f"{head}{'in time %':>10}{'p99 ms':>8}{'asked':>7}")
    for robots, control_hz, replan, horizon in CASES:
        for in_step in (True, False):
            for hints in ("none", "heard"):
                outcomes = []
                for seed in SEEDS:
                    members = fleet(robots, control_hz, replan, horizon, in_step=in_step, seed=seed)
                    policy = Taktline(engine, hints=hints != "none")
                    outcomes.append(run(members, policy, engine, warm_s=5.0, measure_s=10.0, seed=seed))
                share = statistics.fmean(one.share for one in outcomes)
                p99 = statistics.fmean(one.latency_ms(0.99) for one in outcomes)
                natural = 10.0 * robots * control_hz / replan
                asked = statistics.fmean(one.asked for one in outcomes) / natural
                left = 1e3 * (horizon - replan) / control_hz
                load = robots * control_hz / replan / engine.capacity_hz
                start = "in step" if in_step else "out of step"
                head = f"{robots:>7}{control_hz:>4.0f}{left:>9.0f}{load:>6.2f} {start:<12}{hints:<8}"
                print(f"{head}{100 * share:>10.2f}{p99:>8.0f}{asked:>7.2f}", flush=True)
                rows.append(
                    {
                        "bench": "gateway-dephasing",
                        "policy": engine.name,
                        "robots": robots,
                        "control_hz": control_hz,
                        "replan": replan,
                        "horizon": horizon,
                        "left_ms": left,
                        "load": round(load, 3),
                        "start": start,
                        "hints": hints,
                        "on_time": round(share, 5),
                        "p99_ms": round(p99, 1),
                        "asked_over_natural": round(asked, 3),
                        "seeds": list(SEEDS),
                        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                        "command": " ".join(["python -m benchmarks.gateway.dephasing", *sys.argv[1:]]),
                    }
                )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
