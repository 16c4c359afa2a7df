"""The numbers of the reach task: its clock, its frames, its words and when it counts as done."""

from __future__ import annotations

from taktline_demo.arm import BLOCK_HALF

CONTROL_PERIOD_S = 0.1
"""Time between two joint commands; the arm's servos and the physics run faster below it."""
FRAME_PIXELS = 84
HOVER = BLOCK_HALF + 0.025
"""Height of the point to reach above a block's centre, m."""
REACH_RADIUS = 0.03
"""The tip is at a block when it is within this distance of the point above it, m."""
DWELL_STEPS = 5
"""Control steps in a row that the tip must stay there."""
MAX_STEPS = 60
INSTRUCTIONS = ("reach the {} block", "go to the {} block", "move the tip over the {} block", "touch the {} block")
HORIZON = 16
"""Rows of an action chunk, one a control period."""
