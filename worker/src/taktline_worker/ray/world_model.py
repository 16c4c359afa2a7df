"""The WorldModel deployment: one replica a device, encoding images and scoring shards of plans."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import ray
from taktline_protocol.deployment import EngineConfig

from taktline_worker import logs
from taktline_worker.models.vjepa2_ac.adapter import check_deployment, load_world, problem_of
from taktline_worker.models.vjepa2_ac.processor import PlannerRow
from taktline_worker.planning.search import Plan, Problem
from taktline_worker.planning.shards import ScoredRound, ShardCall, ShardReply, ShardScorer
from taktline_worker.planning.world import Scene

logger = logging.getLogger(__name__)


class WorldModel:
    """A loaded and captured world model. Serve reports the replica ready once this constructor has returned.

    Args:
        config: the worker's engine.json, as bytes.
    """

    def __init__(self, config: bytes, log_level: str) -> None:
        logs.configure(log_level)
        deployed = check_deployment(msgspec.json.decode(config, type=EngineConfig))
        self._world = load_world(deployed)
        self._name = str(os.getpid())
        self._scorer = ShardScorer(self._world, self._name)
        logger.info("world model loaded", extra={"device": str(self._world.device), "pid": self._name})

    def who(self) -> str:
        """This replica's process."""
        return self._name

    def encode(self, rows: Sequence[PlannerRow], deadlines: Sequence[float | None]) -> list[Problem]:
        """The rows' searches with their images encoded, tensors on the CPU."""
        found = [problem_of(self._world, row, deadline) for row, deadline in zip(rows, deadlines, strict=True)]
        return [_on_cpu(problem) for problem in found]

    def score(self, call: ShardCall, problems: list[Any]) -> ShardReply:
        """See `ShardScorer.score`.

        Args:
            problems: a list of one reference. Serve would fetch a bare one for every call; only a plan that is new
                here needs it.
        """
        return self._scorer.score(call, lambda: ray.get(problems[0]))

    def finish(self, plan: str, rounds: Sequence[ScoredRound], problems: list[Any]) -> list[Plan]:
        """See `ShardScorer.finish`."""
        return self._scorer.finish(plan, rounds, lambda: ray.get(problems[0]))


def _on_cpu(problem: Problem) -> Problem:
    scene = problem.scene
    return replace(problem, scene=Scene(scene.latent.cpu(), scene.goal.cpu(), scene.pose.cpu()))
