"""Colours that mean the same on every page."""

from __future__ import annotations

from taktline_dashboards.panels import BAD, GOOD, WARN

ON_TIME_STEPS = ((None, BAD), (0.99, WARN), (0.999, GOOD))
BURN_STEPS = ((None, GOOD), (1.0, WARN), (6.0, BAD))
LEFT_STEPS = ((None, BAD), (0.1, WARN), (0.5, GOOD))
CAUSE_COLOURS = {"inference": "purple", "queue": "orange", "transfer": "blue", "refused": "red"}

TERM_COLOURS = {
    "observe": "super-light-blue",
    "transfer": "blue",
    "queue": "orange",
    "inference": "purple",
    "actuate": "green",
}
STATE_COLOURS = {"idle": "green", "busy": "blue", "suspended": "orange", "draining": "yellow", "down": "red"}
