"""The scripted expert: knows where the blocks are, glides over to the named one and comes down on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from taktline_demo.kinematics import joints_for_tip, tip_position
from taktline_demo.task import HORIZON

_GAIN = 0.35
_MAX_STRIDE = 0.035
_CLEARANCE = 0.10
_SLOPE = 1.2


def expert_chunk(
    joints: NDArray[np.floating], target: NDArray[np.floating], horizon: int = HORIZON
) -> NDArray[np.float32]:
    """The next `horizon` joint targets, rad, float32, shape (horizon, 4), from the pose `joints` to the tip `target`.

    The tip moves in straight strides of at most 3.5 cm, shorter as it gets near, and keeps a height that falls with
    the horizontal distance, so that it passes over other blocks. The chunk depends on nothing but its arguments.
    """
    tip = tip_position(joints)
    chunk = np.empty((horizon, 4), np.float32)
    for row in range(horizon):
        away = float(np.linalg.norm(tip[:2] - target[:2]))
        aim = np.array([target[0], target[1], target[2] + min(_CLEARANCE, _SLOPE * max(0.0, away - 0.01))])
        stride = _GAIN * (aim - tip)
        length = float(np.linalg.norm(stride))
        tip = tip + stride * min(1.0, _MAX_STRIDE / max(length, 1e-9))
        chunk[row] = joints_for_tip(tip)
    return chunk
