"""ALOHA's conversion between the robot's joint space and the one that the published policies were trained in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SIGNS = np.array([1, -1, -1, 1, 1, 1, 1, 1, -1, -1, 1, 1, 1, 1], np.float64)
_GRIPPERS = [6, 13]
# Gripper openings in metres (robot, closed and open) and linkage angles in rad (policy, closed and open).
_OPENING_CLOSED, _OPENING_OPEN = 0.01844, 0.05800
_ANGLE_CLOSED, _ANGLE_OPEN = 0.5476, 1.6296
_ROBOT_CLOSED, _ROBOT_OPEN = -0.6213, 1.4910
_ARM, _HORN = 0.036, 0.022


def to_policy_state(state: NDArray[np.float64]) -> NDArray[np.float64]:
    """Robot state (14,) -> policy state (14,): joint signs, and grippers from opening to normalised linkage angle."""
    converted = state * _SIGNS
    opening = converted[_GRIPPERS] * (_OPENING_OPEN - _OPENING_CLOSED) + _OPENING_CLOSED
    ratio = (_HORN**2 + opening**2 - _ARM**2) / (2 * _HORN * opening)
    angle = np.arcsin(np.clip(ratio, -1.0, 1.0))
    converted[_GRIPPERS] = (angle - _ANGLE_CLOSED) / (_ANGLE_OPEN - _ANGLE_CLOSED)
    return converted


def to_policy_actions(actions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Robot actions (H, 14) -> policy actions (H, 14): the inverse of `to_robot_actions`."""
    converted = actions.copy()
    angle = converted[:, _GRIPPERS] * (_ROBOT_OPEN - _ROBOT_CLOSED) + _ROBOT_CLOSED
    converted[:, _GRIPPERS] = angle - _ANGLE_CLOSED
    return converted * _SIGNS


def to_robot_actions(actions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Policy actions (H, 14) -> robot actions (H, 14)."""
    converted = actions * _SIGNS
    angle = converted[:, _GRIPPERS] + _ANGLE_CLOSED
    converted[:, _GRIPPERS] = (angle - _ROBOT_CLOSED) / (_ROBOT_OPEN - _ROBOT_CLOSED)
    return converted
