"""Closed-loop episodes where the simulation waits for each answer, so that equal seeds give equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taktline_demo.environment import ReachEnvironment
from taktline_demo.jpeg import encode_jpeg

REPLAN_STEPS = 8
"""Rows of a chunk that are executed before the next observation."""

Act = Callable[[Mapping[str, bytes], NDArray[np.float32], str, int], NDArray[np.float32]]
"""(camera -> JPEG, state (4,), instruction, seed of the solver's noise) -> joint targets (H, 4)."""


@dataclass(frozen=True)
class EpisodeResult:
    """How one episode ended; `reached` is the block at which the tip dwelt, None for none."""

    seed: int
    goal: str
    reached: str | None
    steps: int

    @property
    def success(self) -> bool:
        """The block reached is the block named."""
        return self.reached == self.goal


def observation_seed(episode_seed: int, index: int) -> int:
    """Seed of the solver's noise for observation `index` of an episode: the same wherever the policy runs."""
    return int(np.random.SeedSequence([episode_seed, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def run_episode(environment: ReachEnvironment, act: Act, seed: int, goal: str | None = None) -> EpisodeResult:
    """Runs episode `seed`, with its own goal or with `goal`. What `act` raises is passed on."""
    environment.reset(seed, goal)
    outcome = environment.outcome()
    index = 0
    while not outcome.done:
        images = {name: encode_jpeg(frame) for name, frame in environment.frames().items()}
        chunk = act(images, environment.state(), environment.instruction, observation_seed(seed, index))
        index += 1
        for command in chunk[:REPLAN_STEPS]:
            outcome = environment.step(command)
            if outcome.done:
                break
    return EpisodeResult(seed, environment.goal, outcome.reached, outcome.steps)


def run_episodes(act: Act, cases: Iterable[tuple[int, str | None]]) -> list[EpisodeResult]:
    """Runs (seed, goal) cases one after the other in one workcell."""
    environment = ReachEnvironment()
    try:
        return [run_episode(environment, act, seed, goal) for seed, goal in cases]
    finally:
        environment.close()
