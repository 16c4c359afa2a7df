"""A policy behind a Taktline gateway as a lockstep `Act`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from taktline import Robot

from taktline_demo.lockstep import Act

LOCKSTEP_BUDGET_MS = 30_000.0
"""The simulation stands still while it waits, so the answer may take its time."""


def gateway_act(url: str, policy: str, robot_id: str = "lockstep") -> Act:
    """Asks `policy` behind the gateway at `url`; TaktlineError passes through."""
    robot = Robot(url, policy, robot_id)

    def act(
        images: Mapping[str, bytes], state: NDArray[np.float32], instruction: str, seed: int
    ) -> NDArray[np.float32]:
        return robot.act(images, state, instruction, LOCKSTEP_BUDGET_MS, seed=seed).actions

    return act
