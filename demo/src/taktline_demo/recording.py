"""Records demonstrations: the expert drives the arm, and every block gets the expert's chunk as a label."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from taktline_demo.arm import CAMERAS, COLOURS
from taktline_demo.demonstrations import Demonstrations
from taktline_demo.environment import ReachEnvironment
from taktline_demo.expert import expert_chunk
from taktline_demo.task import HORIZON

_LINGER = 1
"""Observations recorded after the tip has arrived and once more, so that the policy learns to stay."""
_MAX_OBSERVATIONS = 6


def record(episodes: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> Demonstrations:
    """Records `episodes` episodes with seeds `seed`, `seed` + 1, ...; `progress` hears how many are done.

    Between two observations the arm follows the expert towards the episode's goal for three to six control periods,
    often with a disturbance on the commands, so that the observations also show how to recover. An observation is
    labelled with the expert's chunk for every block, not only for the goal: one picture, three instructions.
    """
    environment = ReachEnvironment()
    frames: dict[str, list[NDArray[np.uint8]]] = {name: [] for name in CAMERAS}
    states, chunks, seeds = [], [], []
    for index in range(episodes):
        rng = np.random.default_rng([seed + index, 1])
        environment.reset(seed + index)
        lingered = 0
        for _ in range(_MAX_OBSERVATIONS):
            for name, frame in environment.frames().items():
                frames[name].append(frame)
            state = environment.state()
            labels = {colour: expert_chunk(state, environment.target(colour)) for colour in COLOURS}
            states.append(state)
            chunks.append(np.stack([labels[colour] for colour in COLOURS]))
            seeds.append(seed + index)
            disturbance = rng.normal(0.0, 0.08, 4) if rng.random() < 0.4 else np.zeros(4)
            for command in labels[environment.goal][: int(rng.integers(3, 7))]:
                outcome = environment.step(command + disturbance)
            lingered += outcome.reached is not None
            if lingered > _LINGER:
                break
        progress(index + 1)
    environment.close()
    assert chunks[0].shape == (len(COLOURS), HORIZON, 4)
    return Demonstrations(
        {name: np.stack(value) for name, value in frames.items()},
        np.stack(states),
        np.stack(chunks),
        np.array(seeds, np.int64),
    )
