"""The control-time roofline as an SVG: X = L_env / L_inference, Y = L_env / L_control.

A serial loop waits for each chunk before it moves: L_control = L_env + L_inference, so Y = X / (1 + X). A loop that
asks for the next chunk while it executes the present one has L_control = max(L_env, L_inference), so Y = min(1, X):
below X = 1 inference sets the pace, above it the environment does.
"""

from __future__ import annotations

import math
from html import escape

import numpy as np

from taktline_demo.fleet.records import CycleRecord, FleetRun

WIDTH, HEIGHT = 880, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 34, 54
_Y_TOP = 1.12
SERIES = 8
"""Robot colours in the style sheet; more robots start over."""


def serial_efficiency(ratio: float) -> float:
    """Y of a loop that waits for each chunk, X / (1 + X)."""
    return ratio / (1.0 + ratio)


def overlapped_efficiency(ratio: float) -> float:
    """Y of a loop that asks ahead, min(1, X)."""
    return min(1.0, ratio)


def roofline_svg(run: FleetRun) -> str:
    """The plot with both curves, both regimes, one dot a cycle and one ring a robot."""
    plot = _Plot([cycle.ratio for cycle in run.cycles])
    parts = [
        f'<svg class="roofline" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="roofline-title">',
        '<title id="roofline-title">Control-time roofline: measured control cycles against both loops</title>',
        *_regimes(plot),
        *_grid(plot),
        *_curves(plot),
    ]
    for index, robot in enumerate(run.robots):
        series = f"s{index % SERIES}"
        parts += [_dot(plot, cycle, series, robot.robot) for cycle in robot.cycles]
        moving = [cycle for cycle in robot.cycles if not cycle.serial]
        if moving:
            x = float(np.median([cycle.ratio for cycle in moving]))
            y = float(np.median([cycle.efficiency for cycle in moving]))
            label = f"{escape(robot.robot)}: median X = {x:.1f}, Y = {y:.2f}"
            parts.append(
                f'<circle class="ring {series}" cx="{plot.x(x):.1f}" cy="{plot.y(y):.1f}" r="8">'
                f"<title>{label}</title></circle>"
            )
    parts.append("</svg>")
    return "\n".join(parts)


class _Plot:
    """Maps data to pixels: X logarithmic over whole decades around 1 and the data, Y linear."""

    def __init__(self, ratios: list[float]) -> None:
        positive = [ratio for ratio in ratios if ratio > 0] or [1.0]
        self.low = min(-1, math.floor(math.log10(min(positive))))
        self.high = max(1, math.ceil(math.log10(max(positive))))

    def x(self, ratio: float) -> float:
        share = (math.log10(max(ratio, 1e-9)) - self.low) / (self.high - self.low)
        return _LEFT + min(1.0, max(0.0, share)) * (WIDTH - _LEFT - _RIGHT)

    def y(self, efficiency: float) -> float:
        share = min(1.0, max(0.0, efficiency / _Y_TOP))
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def curve(self, ratios: list[float], efficiencies: list[float]) -> str:
        points = zip(ratios, efficiencies, strict=True)
        return " ".join(f"{self.x(ratio):.1f},{self.y(efficiency):.1f}" for ratio, efficiency in points)


def _regimes(plot: _Plot) -> list[str]:
    middle, right, bottom = plot.x(1.0), WIDTH - _RIGHT, HEIGHT - _BOTTOM
    return [
        f'<rect class="bound-inference" x="{_LEFT}" y="{_TOP}" width="{middle - _LEFT:.1f}" height="{bottom - _TOP}"/>',
        f'<rect class="bound-environment" x="{middle:.1f}" y="{_TOP}" width="{right - middle:.1f}" '
        f'height="{bottom - _TOP}"/>',
        f'<text class="regime" x="{(_LEFT + middle) / 2:.0f}" y="{_TOP - 12}">inference bound (X &lt; 1)</text>',
        f'<text class="regime" x="{(middle + right) / 2:.0f}" y="{_TOP - 12}">environment bound (X &gt; 1)</text>',
        f'<line class="knee" x1="{middle:.1f}" x2="{middle:.1f}" y1="{_TOP}" y2="{bottom}"/>',
    ]


def _grid(plot: _Plot) -> list[str]:
    bottom, parts = HEIGHT - _BOTTOM, []
    for decade in range(plot.low, plot.high + 1):
        x = plot.x(10.0**decade)
        label = f"{10.0**decade:g}"
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}">{label}</text>')
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = plot.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{_LEFT - 8}" y="{y + 4:.1f}">{value:g}</text>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="axis" x="{middle:.0f}" y="{HEIGHT - 12}">X = L_env / L_inference</text>')
    parts.append(
        f'<text class="axis" transform="translate(18 {(_TOP + bottom) / 2:.0f}) rotate(-90)">'
        "Y = L_env / L_control</text>"
    )
    return parts


def _curves(plot: _Plot) -> list[str]:
    # The knee at 1 is a point of its own, so that the roof has a corner and no cut.
    ratios = sorted({*np.logspace(plot.low, plot.high, 120).tolist(), 1.0})
    serial = plot.curve(ratios, [serial_efficiency(ratio) for ratio in ratios])
    roof = plot.curve(ratios, [overlapped_efficiency(ratio) for ratio in ratios])
    return [
        f'<polyline class="serial" points="{serial}"/>',
        f'<polyline class="roof" points="{roof}"/>',
        f'<text class="curve" x="{plot.x(0.62):.0f}" y="{plot.y(0.80):.0f}" text-anchor="end">'
        "overlapped: Y = min(1, X)</text>",
        # Below the curve on the inference-bound side: on the other one are the dots of a fleet that keeps pace.
        f'<text class="curve" x="{plot.x(0.36):.0f}" y="{plot.y(0.12):.0f}">serial: Y = X / (1 + X)</text>',
    ]


def _dot(plot: _Plot, cycle: CycleRecord, series: str, robot: str) -> str:
    kind = "first" if cycle.serial else "dot"
    note = "stood still until its chunk came" if cycle.serial else "asked ahead"
    label = (
        f"{escape(robot)}, {note}: X = {cycle.ratio:.1f}, Y = {cycle.efficiency:.2f}; L_env {cycle.env_ms:.0f} ms, "
        f"L_inference {cycle.inference_ms:.0f} ms, L_control {cycle.control_ms:.0f} ms"
    )
    return (
        f'<circle class="{kind} {series}" cx="{plot.x(cycle.ratio):.1f}" cy="{plot.y(cycle.efficiency):.1f}" r="4">'
        f"<title>{label}</title></circle>"
    )
