"""Success rates of a policy over fixed seeds: every layout is asked for every block, so that the words must decide."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from taktline_demo.arm import COLOURS
from taktline_demo.environment import ReachEnvironment
from taktline_demo.lockstep import Act, EpisodeResult, run_episode


@dataclass(frozen=True)
class Evaluation:
    """Results of one policy; `policy` says which, `episodes` holds one entry a seed and goal."""

    policy: str
    episodes: list[EpisodeResult]

    def successes(self, goal: str | None = None) -> int:
        """Episodes that reached the block they named, of one goal or of all."""
        return sum(episode.success for episode in self.of(goal))

    def of(self, goal: str | None = None) -> list[EpisodeResult]:
        """Episodes of one goal, or all."""
        return [episode for episode in self.episodes if goal in (None, episode.goal)]

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file: the rates, then every episode."""
        goals = {
            goal: {
                "episodes": len(self.of(goal)),
                "successes": self.successes(goal),
                "reached": dict(Counter(str(episode.reached).lower() for episode in self.of(goal))),
            }
            for goal in COLOURS
        }
        return {"policy": self.policy, "goals": goals, "runs": [asdict(episode) for episode in self.episodes]}


def evaluate(
    policy: str, act: Act, seeds: range, progress: Callable[[EpisodeResult], None] = lambda result: None
) -> Evaluation:
    """Runs every seed once a goal: the same layout, start and wording, only the colour differs."""
    environment = ReachEnvironment()
    results = []
    try:
        for seed in seeds:
            for goal in COLOURS:
                results.append(run_episode(environment, act, seed, goal))
                progress(results[-1])
    finally:
        environment.close()
    return Evaluation(policy, results)


def json_document(evaluations: list[Evaluation]) -> str:
    """All evaluations as a JSON list, one line an episode, so that two runs can be compared line by line."""
    documents = []
    for evaluation in evaluations:
        head = evaluation.as_dict()
        runs = ",\n".join(json.dumps(run) for run in head.pop("runs"))
        documents.append(f'{json.dumps(head)[:-1]}, "runs": [\n{runs}\n]}}')
    return "[\n" + ",\n".join(documents) + "\n]\n"


def print_evaluations(evaluations: list[Evaluation], console: Console) -> None:
    """One row a policy and goal."""
    table = Table(title="closed-loop success: the tip dwells at the named block, before any other, within 6 s")
    for heading in ("policy", "named", "episodes", "success", "reached instead", "reached none"):
        table.add_column(heading, justify="left" if heading in ("policy", "named") else "right")
    for evaluation in evaluations:
        for goal in COLOURS:
            episodes = evaluation.of(goal)
            others = sum(episode.reached not in (None, goal) for episode in episodes)
            none = sum(episode.reached is None for episode in episodes)
            share = f"{evaluation.successes(goal)} ({100 * evaluation.successes(goal) / len(episodes):.0f} %)"
            table.add_row(evaluation.policy, goal, str(len(episodes)), share, str(others), str(none))
    console.print(table)
