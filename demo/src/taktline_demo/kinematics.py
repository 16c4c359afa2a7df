"""Closed-form kinematics of the demo arm: joint angles to tip position, and back with the tool pointing down."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

SHOULDER_HEIGHT = 0.12
"""Height of the shoulder axis above the table, m."""
UPPER_ARM = 0.22
FOREARM = 0.20
TOOL = 0.09
"""Lengths of the three links, m; the tool's tip is the point that reaches."""

JOINT_LOW = np.array([-1.6, -0.35, -2.6, -2.4])
JOINT_HIGH = np.array([1.6, 1.65, -0.15, 0.9])
"""Joint limits in rad: yaw, shoulder, elbow, wrist; positive shoulder, elbow and wrist angles lift the link."""


def tip_position(joints: NDArray[np.floating]) -> NDArray[np.float64]:
    """Position of the tool tip in the arm's frame, m, shape (3,), for `joints` of shape (4,) in rad."""
    yaw, shoulder, elbow, wrist = (float(value) for value in joints)
    upper, fore, tool = shoulder, shoulder + elbow, shoulder + elbow + wrist
    radius = UPPER_ARM * math.cos(upper) + FOREARM * math.cos(fore) + TOOL * math.cos(tool)
    height = SHOULDER_HEIGHT + UPPER_ARM * math.sin(upper) + FOREARM * math.sin(fore) + TOOL * math.sin(tool)
    return np.array([radius * math.cos(yaw), radius * math.sin(yaw), height])


def joints_for_tip(tip: NDArray[np.floating]) -> NDArray[np.float64]:
    """Joint angles, rad, shape (4,), that put the tip at `tip` (m, shape (3,)) with the tool pointing straight down.

    Of the two elbow solutions the upper one is taken. A tip out of reach gets the nearest stretched or folded pose, and
    angles are cut to the joint limits, so the answer is always a command that the arm accepts.
    """
    x, y, z = (float(value) for value in tip)
    radius, rise = math.hypot(x, y), z + TOOL - SHOULDER_HEIGHT
    cosine = (radius**2 + rise**2 - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
    elbow = -math.acos(min(1.0, max(-1.0, cosine)))
    shoulder = math.atan2(rise, radius) - math.atan2(FOREARM * math.sin(elbow), UPPER_ARM + FOREARM * math.cos(elbow))
    wrist = -math.pi / 2 - shoulder - elbow
    return np.asarray(np.clip([math.atan2(y, x), shoulder, elbow, wrist], JOINT_LOW, JOINT_HIGH))
