"""What overlap, fewer rounds and warm starts are worth to an arm under a planner, with a world model as simulator.

    python benchmarks/planner_control.py [--seeds 20] [--seen prediction frames] [--device cuda] [--out DIR] [--go-on]
    python benchmarks/planner_control.py --times-only [--out DIR]

The SDK's own loop (`taktline.plan_and_move`) drives a simulated arm as in the published study of this planner: one
second an action, 4 mm of execution error, a goal 21.6 cm away, twelve steps. Search and energies are the worker's,
through a small V-JEPA 2-AC of the published structure that has learned a drawn arm (`benchmarks/toy_arm.py`). What is
seen after a move is that model's own prediction of it, as in the study, or the frame that the arm's camera would have
taken (`--seen frames`). Final distances are of the arm's pose, which no model predicts. Seconds a plan are those of the
published size, from `results/h200/planner.json`: a step's length is counted on a simulated clock, so that the search's
own speed here is of no account. `--times-only` counts them anew for the episodes of the file; with `--go-on` a run that
was ended keeps what its file has.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import toy_arm
from taktline import Chunk, Search, plan_and_move
from taktline_protocol.messages import Timings
from taktline_worker.models.vjepa2_ac import poses
from taktline_worker.models.vjepa2_ac.processor import to_pixels
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.planning.search import Problem
from taktline_worker.planning.search import search as find
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene
from torch import Tensor

MOVE_S = 1.0
ERROR_M = 0.004
STEPS = 12
START = (0.4, 0.0, 0.3, 0.0, 0.0, 0.0, toy_arm.GRIPPER)
GOAL = (0.15, -0.12, 0.10)  # 21.6 cm from the start
SETTINGS = SearchSettings(candidates=800, elites=80, horizon=2, max_step_m=toy_arm.MAX_STEP_M, pins={3: 0.0})
PLAN_TIMES = Path(__file__).with_name("results") / "h200" / "planner.json"
UNIT = 100


@dataclass
class SimulatedTime:
    """Seconds of each step: what is planned while the arm stands, then the longer of planning and moving."""

    standing_s: float = 0.0
    planned_s: float = 0.0
    step_s: list[float] = field(default_factory=list)

    def end_step(self) -> None:
        """Adds a step of one move and what has been planned since the last one."""
        self.step_s.append(self.standing_s + max(self.planned_s, MOVE_S))
        self.standing_s = self.planned_s = 0.0


class Arm:
    """Carries actions out with an error, and shows what is seen then: a prediction of the world model, or a frame."""

    def __init__(self, world: VJepa2World, goal: Tensor, pose: Tensor, seen: str, noise: np.random.Generator) -> None:
        self.pose, self._world, self._goal, self._seen, self._noise = pose, world, goal, seen, noise
        self.latent = latent_of(world, pose)
        self._lock = threading.Lock()

    def sense(self) -> tuple[Mapping[str, Any], Tensor]:
        """What is seen and where the arm is, before or after a move and never in between."""
        with self._lock:
            return {"camera": self.latent}, self.pose

    def move(self, action: Any) -> None:
        """One action, and what was meant beside what was hit."""
        missed = np.zeros(len(self.pose), np.float32)
        missed[:3] = self._noise.normal(0.0, ERROR_M / math.sqrt(3.0), 3)
        hit = torch.from_numpy(np.asarray(action) + missed)
        pose = poses.integrate(self.pose, hit)
        with self._lock:
            if self._seen == "prediction":
                scene = Scene(self.latent, self._goal, self.pose.to(self._world.device))
                self.latent = self._world.predict(scene, hit[None]).latent
            else:
                self.latent = latent_of(self._world, pose)
            self.pose = pose


def latent_of(world: VJepa2World, pose: Tensor) -> Tensor:
    """The frame that the camera takes of a pose, encoded."""
    return world.encode(to_pixels(toy_arm.frames(pose[None])[0].numpy(), toy_arm.SIZE)[None])[0]


class Planner:
    """Answers as a worker does: from what is seen, or from where the model expects the pending action to lead."""

    def __init__(self, world: VJepa2World, goal: Tensor, settings: SearchSettings, seed: int, plan_s: float) -> None:
        self._world, self._goal, self._settings, self._seed = world, goal, settings, seed
        self._plan_s = plan_s
        self.clock = SimulatedTime()
        self._calls = 0

    def act(
        self,
        images: Mapping[str, Any],
        state: Any,
        instruction: str,
        budget_ms: float,
        *,
        search: Search | None = None,
    ) -> Chunk:
        """See `taktline.Robot.act`."""
        assert search is not None
        self._calls += 1
        scene = Scene(images["camera"], self._goal, state.to(self._world.device))
        if search.pending is None:
            self.clock.standing_s += self._plan_s
        else:
            self.clock.planned_s += self._plan_s
            scene = self._world.predict(scene, torch.from_numpy(search.pending.to_numpy().copy()))
        previous = None if search.previous is None else torch.from_numpy(search.previous.to_numpy().copy())
        problem = Problem(scene, self._settings, 1000 * self._seed + self._calls, previous)
        zero = Timings(observe_ms=0, transfer_ms=0, queue_ms=0, inference_ms=0, actuate_ms=0)
        actions = find(self._world, [problem])[0].actions.cpu().numpy()
        return Chunk(actions, MOVE_S, 0.0, 1.0, zero, 1.0, 0, "planner", "", "", 1, "")


@dataclass(frozen=True, slots=True)
class Episode:
    """Seconds of each step with `plan_s` seconds a plan, and the distance to the goal after each, in metres."""

    step_s: tuple[float, ...]
    distance_m: tuple[float, ...]


def episode(
    world: VJepa2World, settings: SearchSettings, seed: int, overlap: bool, warm: bool, seen: str, plan_s: float
) -> Episode:
    """One way from the start to the goal."""
    start = torch.tensor(START)
    target = start + torch.tensor((*GOAL, 0.0, 0.0, 0.0, 0.0))
    goal = latent_of(world, target)
    arm = Arm(world, goal, start, seen, np.random.default_rng(seed))
    planner = Planner(world, goal, settings, seed, plan_s)
    distances = []
    loop = plan_and_move(planner, arm.sense, arm.move, overlap=overlap, warm=warm)
    for _ in range(STEPS):
        next(loop)
        planner.clock.end_step()
        distances.append(float((arm.pose - target)[:3].norm()))
    loop.close()
    return Episode(tuple(planner.clock.step_s), tuple(distances))


def step_seconds(plan_s: float, overlap: bool) -> list[float]:
    """What `episode` counts, without searching: the first plan is made while the arm stands in either loop."""
    later = max(plan_s, MOVE_S) if overlap else plan_s + MOVE_S
    return [plan_s + max(plan_s, MOVE_S) if overlap else later] + [later] * (STEPS - 1)


def plan_seconds(path: Path = PLAN_TIMES) -> dict[tuple[str, int], float]:
    """Seconds of one robot's plan at the published size on one GPU, by precision and rounds."""
    rows = json.loads(path.read_text())
    return {
        (row["dtype"], row["shape"]["rounds"]): row["median_ms"] / 1000.0
        for row in rows
        if row["batch"] == 1 and row["gpus"] == 1 and row["shape"]["rounds"] in (3, 10)
    }


def timed(row: dict[str, Any], times: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """A row with what steps last at the published size."""
    lasts = {}
    for (dtype, rounds), plan_s in times.items():
        if rounds == row["shape"]["rounds"]:
            steps = step_seconds(plan_s, row["overlap"])
            lasts[dtype] = {"plan_s": plan_s, "step_s": statistics.median(steps), "episode_s": sum(steps)}
    return row | {"median_ms": 1000.0 * lasts["bf16"]["step_s"], "steps": lasts}


def episodes(
    world: VJepa2World,
    search: SearchSettings,
    seeds: int,
    seen: Sequence[str],
    times: Mapping[tuple[str, int], float],
    known: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """A row for each simulator, number of rounds, kind of start, and loop; what `known` has is not played again."""
    for simulator in seen:
        for rounds in (10, 3):
            for warm in (False, True):
                for overlap in (False, True):
                    settings = replace(search, rounds=rounds)
                    about = {
                        "shape": {
                            name: getattr(settings, name) for name in ("candidates", "rounds", "elites", "horizon")
                        },
                        "seen": simulator,
                        "warm": warm,
                        "overlap": overlap,
                        "n": seeds,
                    }
                    kept = [row for row in known if about.items() <= row.items()]
                    if kept:
                        yield timed(kept[0], times)
                        continue
                    plan_s = times["bf16", rounds]
                    found = [episode(world, settings, seed, overlap, warm, simulator, plan_s) for seed in range(seeds)]
                    assert all(list(one.step_s) == step_seconds(plan_s, overlap) for one in found)
                    finals = sorted(one.distance_m[-1] for one in found)
                    nearest = [statistics.median(one.distance_m[step] for one in found) for step in range(STEPS)]
                    row = {
                        "bench": "planner-control",
                        "policy": "vjepa2-ac",
                        **about,
                        "move_s": MOVE_S,
                        "final_distance_m": statistics.median(finals),
                        "final_distances_m": finals,
                        "distance_m_by_step": nearest,
                        "date": time.strftime("%Y-%m-%d"),
                        "command": "python benchmarks/planner_control.py",
                    }
                    yield timed(row, times)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    loop, start = "overlapped" if row["overlap"] else "blocking", "warm" if row["warm"] else "cold"
    steps = " ".join(f"{dtype} {one['step_s']:.2f} s" for dtype, one in row["steps"].items())
    finals = row["final_distances_m"]
    spread = f"({100 * finals[0]:.2f} to {100 * finals[-1]:.2f})"
    final = f"{100 * row['final_distance_m']:.2f} cm {spread}"
    return f"{row['seen']:>10} {row['shape']['rounds']:>3} rounds {start} {loop:>10}: {final}, a step {steps}"


def main() -> None:
    """Run all combinations and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--candidates", type=int, default=SETTINGS.candidates, help="of a round; a tenth are elites")
    parser.add_argument("--seen", nargs="+", choices=("prediction", "frames"), default=("prediction", "frames"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", type=Path, default=toy_arm.FOLDER, help="what benchmarks/toy_arm.py wrote")
    parser.add_argument("--go-on", action="store_true", help="keep the rows that the file has, play the others")
    parser.add_argument("--times-only", action="store_true", help="count the seconds of the file's rows anew")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # operations are too small to share
    target = options.out / "planner_control.json"
    times = plan_seconds()
    known = json.loads(target.read_text()) if options.go_on and target.exists() else []
    found: Iterable[dict[str, Any]]
    if options.times_only:
        found = [timed(row, times) for row in json.loads(target.read_text())]
    else:
        world = toy_arm.world_of(toy_arm.trained(options.weights), torch.device(options.device), micro_batch=UNIT)
        world.capture()
        wanted = replace(SETTINGS, candidates=options.candidates, elites=options.candidates // 10)
        found = episodes(world, wanted, options.seeds, options.seen, times, known)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in found:
        rows.append(row)
        print(line(row), flush=True)
        target.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
