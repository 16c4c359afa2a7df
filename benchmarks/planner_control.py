"""What overlap, fewer rounds and warm starts are worth to an arm under a planner, on a simulated clock.

    python benchmarks/planner_control.py [--plan-s 10=5.02 3=1.52] [--out DIR]

The SDK's own loop (`taktline.plan_and_move`) drives a simulated arm: one second an action, 4 mm of execution error, a
goal 21.6 cm away, as in the published study of this planner. The search is the worker's; its world model here
integrates poses in closed form and measures metres, because random weights lead nowhere and trained ones are not to be
had: the figures are about the loop and the search, not about vision. Seconds a plan are taken from `--plan-s`, by
default what `benchmarks/planner.py` measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from taktline import Chunk, Search, plan_and_move
from taktline_protocol.messages import Timings
from taktline_worker.models.vjepa2_ac import poses
from taktline_worker.planning.search import Problem
from taktline_worker.planning.search import search as find
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene
from torch import Tensor

MOVE_S = 1.0
ERROR_M = 0.004
STEPS = 12
SEEDS = 20
GOAL = (0.15, -0.12, 0.10)  # 21.6 cm from the start
SETTINGS = SearchSettings(candidates=800, elites=80, horizon=2)


class PointWorld:
    """The distance of the last pose to a goal pose, in metres; scenes carry poses only."""

    device, dtype, micro_batch = torch.device("cpu"), torch.float32, 100

    def prepare(self, scene: Scene) -> Scene:
        """Nothing is shared beyond the scene itself."""
        return scene

    def score(self, prepared: Scene, actions: Tensor, energies: Tensor) -> None:
        """Distances after the last action; rotations are zero here, so positions simply add up."""
        energies.copy_((prepared.pose[:3] + actions[..., :3].sum(dim=1) - prepared.goal[:3]).norm(dim=1))

    def poses(self, scene: Scene, actions: Tensor) -> Tensor:
        """Poses after each action."""
        found = [scene.pose]
        for action in actions:
            found.append(poses.integrate(found[-1], action))
        return torch.stack(found[1:])

    def synchronize(self) -> None:
        """Nothing runs elsewhere."""


class SimulatedTime:
    """Two timelines that meet at the end of each step: the planner's and the arm's."""

    def __init__(self) -> None:
        self.planned_s = self.moved_s = self.now = 0.0
        self.step_s: list[float] = []

    def end_step(self, overlapped: bool) -> None:
        """Adds a step of what has been planned and moved since the last one."""
        parts = self.planned_s, self.moved_s
        self.step_s.append(max(parts) if overlapped else sum(parts))
        self.planned_s = self.moved_s = 0.0


def episode(seed: int, rounds: int, overlap: bool, warm: bool, plan_s: float) -> tuple[list[float], float]:
    """Seconds of each step, and the final distance to the goal in metres."""
    world, clock = PointWorld(), SimulatedTime()
    noise = np.random.default_rng(seed)
    start = torch.tensor([0.4, 0.0, 0.3, 0.0, 0.0, 0.0, 0.5])
    goal = start + torch.tensor([*GOAL, 0.0, 0.0, 0.0, 0.0])
    arm = {"pose": start}

    class Planner:
        calls = 0

        def act(
            self, images: Any, state: Any, instruction: str, budget_ms: float, *, search: Search | None = None
        ) -> Chunk:
            assert search is not None
            self.calls += 1
            clock.planned_s += plan_s
            pose = torch.as_tensor(state)
            if search.pending is not None:
                pose = poses.integrate(pose, torch.from_numpy(search.pending.to_numpy()[0].copy()))
            previous = None if search.previous is None else torch.from_numpy(search.previous.to_numpy().copy())
            problem = Problem(
                Scene(torch.zeros(1), goal, pose), replace(SETTINGS, rounds=rounds), seed * 1000 + self.calls, previous
            )
            return chunk_of(find(world, [problem])[0].actions.numpy())

    def move(action: Any) -> None:
        missed = torch.from_numpy(noise.normal(0.0, ERROR_M / 3**0.5, 3)).float()
        moved = poses.integrate(arm["pose"], torch.as_tensor(action))
        arm["pose"] = torch.cat((moved[:3] + missed, moved[3:]))
        clock.moved_s += MOVE_S

    loop = plan_and_move(Planner(), lambda: ({}, arm["pose"]), move, overlap=overlap, warm=warm)
    for _ in range(STEPS):
        next(loop)
        clock.end_step(overlap)
    loop.close()
    return clock.step_s, float((arm["pose"] - goal)[:3].norm())


def chunk_of(actions: Any) -> Chunk:
    """A chunk of nothing but actions."""
    zero = Timings(observe_ms=0, transfer_ms=0, queue_ms=0, inference_ms=0, actuate_ms=0)
    return Chunk(actions, 0.25, 0.0, 1.0, zero, 1.0, 0, "planner", "", "", 1, "")


def main() -> None:
    """Run all combinations and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan-s", nargs="+", default=["10=5.02", "3=1.52"], metavar="ROUNDS=SECONDS")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cpu"))
    options = parser.parse_args()
    plan_s = {int(rounds): float(seconds) for rounds, seconds in (one.split("=") for one in options.plan_s)}
    torch.set_num_threads(1)
    rows = []
    print(f"{'rounds':>6} {'start':>6} {'loop':>11} {'s a step':>9} {'s in all':>9} {'final cm':>9}")
    for rounds, seconds in plan_s.items():
        for warm in (False, True):
            for overlap in (False, True):
                episodes = [episode(seed, rounds, overlap, warm, seconds) for seed in range(SEEDS)]
                step_s = statistics.median(step for steps, _ in episodes for step in steps[1:])
                total_s = statistics.median(sum(steps) for steps, _ in episodes)
                final_m = statistics.median(final for _, final in episodes)
                rows.append(
                    {
                        "bench": "planner-control",
                        "policy": "vjepa2-ac",
                        "shape": {"candidates": SETTINGS.candidates, "rounds": rounds, "elites": 80, "horizon": 2},
                        "warm": warm,
                        "overlap": overlap,
                        "plan_s": seconds,
                        "move_s": MOVE_S,
                        "median_ms": 1000 * step_s,
                        "episode_s": total_s,
                        "final_distance_m": final_m,
                        "n": SEEDS,
                        "command": "python benchmarks/planner_control.py " + " ".join(sys.argv[1:]),
                    }
                )
                loop = "overlapped" if overlap else "blocking"
                start = "warm" if warm else "cold"
                print(f"{rounds:>6} {start:>6} {loop:>11} {step_s:>9.2f} {total_s:>9.1f} {100 * final_m:>9.2f}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "planner_control.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
