"""Robots that one worker serves with 99.9% of their chunks in time, by scheduler, and the knee where it stops.

python -m benchmarks.gateway.robots_per_gpu [--output FILE] [--part table|knee|all] [--engine NAME]

A closed loop (`closed_loop`): each robot executes chunks of 50 actions at its control rate, asks again after `replan`
of them, and stands still when its buffer is dry. The fleet starts in step, as after a shift change or a power cut, and
out of step. For each scheduler the largest fleet is sought that meets 99.9%, by doubling and halving; the next larger
step has been seen to fail. One GPU a robot is the deployment without sharing: one robot a GPU, whatever the rate.
`python -m benchmarks.gateway.figures` draws the knee.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gateway.closed_loop import Taktline, fleet, run
from benchmarks.gateway.peers import ClockworkLike, Fifo, Policy, RayLike, TritonLike
from benchmarks.gateway.results import write_rows
from benchmarks.gateway.times import ENGINES, Engine

GOAL = 0.999
HORIZON = 50
CONTROL_HZ = (10.0, 20.0, 50.0)
REPLANS = (10, 25)
SEED = 8001
Make = Callable[[Engine], Policy]
SCHEDULERS: dict[str, Make] = {
    "Taktline + hints": lambda engine: Taktline(engine, hints=True),
    "Taktline": lambda engine: Taktline(engine, hints=False),
    "Clockwork-like": ClockworkLike,
    "Triton-like": TritonLike,
    "FIFO + 20 ms": Fifo,
    "Ray-Serve-like": RayLike,
}


def share(engine: Engine, make: Make, robots: int, control_hz: float, replan: int, *, in_step: bool) -> float:
    """On-time share of one fleet in its steady state.

    A chunk that lasts for seconds hides a backlog for as long as it takes to grow to that length: at a few percent over
    the capacity many times the chunk. So the fleet runs for eight chunks before it counts.
    """
    period = replan / control_hz
    outcome = run(
        fleet(robots, control_hz, replan, HORIZON, in_step=in_step, seed=SEED),
        make(engine),
        engine,
        warm_s=8.0 * HORIZON / control_hz,
        measure_s=max(4.0, 4 * period, 1500 * period / robots),
        seed=SEED,
    )
    return outcome.share


def capacity(engine: Engine, make: Make, control_hz: float, replan: int, *, in_step: bool) -> int:
    """Largest fleet that meets the goal; steps of about 2%."""
    limit = int(1.05 * engine.capacity_hz * replan / control_hz) + 2

    def meets(robots: int) -> bool:
        return share(engine, make, robots, control_hz, replan, in_step=in_step) >= GOAL

    low, high = 0, 1
    while high <= limit and meets(high):
        low, high = high, 2 * high
    high = min(high, limit)
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def table(engines: list[Engine]) -> list[dict[str, Any]]:
    """Every engine, rate, replanning and start."""
    rows = []
    for engine in engines:
        print(f"\n{engine.name}: best {engine.capacity_hz:.1f}/s ({engine.source}); one GPU a robot: 1 robot")
        head = "".join(f"{name:>18}" for name in SCHEDULERS)
        print(f"{'Hz':>4}{'replan':>7}{'start':>14}{head}{'full load':>11}")
        for control_hz, replan, in_step in itertools.product(CONTROL_HZ, REPLANS, (True, False)):
            found = {
                name: capacity(engine, make, control_hz, replan, in_step=in_step) for name, make in SCHEDULERS.items()
            }
            full = engine.capacity_hz * replan / control_hz
            start = "in step" if in_step else "out of step"
            print(
                f"{control_hz:>4.0f}{replan:>7}{start:>14}"
                + "".join(f"{count:>18}" for count in found.values())
                + f"{full:>11.1f}",
                flush=True,
            )
            for name, count in found.items():
                rows.append(
                    {
                        "bench": "gateway-robots-per-gpu",
                        "policy": engine.name,
                        "control_hz": control_hz,
                        "replan": replan,
                        "horizon": HORIZON,
                        "start": start,
                        "scheduler": name,
                        "robots": count,
                        "goal": GOAL,
                        "dedicated": 1,
                        "ratio": float(count),
                        "full_load_robots": round(full, 1),
                    }
                )
    return rows


def knee(engine: Engine, control_hz: float, replan: int) -> list[dict[str, Any]]:
    """On-time share against fleet size, started in step, around full load."""
    rows = []
    full = engine.capacity_hz * replan / control_hz
    for name, make in SCHEDULERS.items():
        for part in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1, 1.2, 1.5):
            robots = max(1, round(part * full))
            value = share(engine, make, robots, control_hz, replan, in_step=True)
            rows.append(
                {
                    "bench": "gateway-robots-knee",
                    "policy": engine.name,
                    "control_hz": control_hz,
                    "replan": replan,
                    "horizon": HORIZON,
                    "start": "in step",
                    "scheduler": name,
                    "robots": robots,
                    "on_time": round(value, 5),
                    "load": part,
                }
            )
    return rows


def main() -> None:
    """Runs the table and the knee, writes the rows and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", choices=("table", "knee", "all"), default="all")
    parser.add_argument("--engine", choices=[engine.name for engine in ENGINES], action="append")
    arguments = parser.parse_args()
    wanted = arguments.engine or [engine.name for engine in ENGINES if engine.name.startswith("pi05")]
    engines = [engine for engine in ENGINES if engine.name in wanted]
    rows: list[dict[str, Any]] = []
    if arguments.part in ("table", "all"):
        rows += table(engines)
    if arguments.part in ("knee", "all"):
        rows += knee(engines[0], 50.0, 25)
    if arguments.output is not None:
        write_rows(arguments.output, rows, " ".join(["python -m benchmarks.gateway.robots_per_gpu", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
