"""Figures and tables of docs/scheduling.md from the rows of the gateway's benchmarks, without a plotting library.

python -m benchmarks.gateway.figures   draws docs/figures/*.svg and fills the tables of docs/scheduling.md again from
                                       benchmarks/results/cpu/*.json
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.tables import PAGE, TABLES, filled

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
FIGURES = ROOT / "docs" / "figures"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 40, 48
COLOURS = ("#0b6e4f", "#7fb069", "#c1121f", "#e09f3e", "#3d5a80", "#8d6a9f")
INK, GRID = "#444444", "#dddddd"

Series = dict[str, list[tuple[float, float]]]


def line_chart(
    series: Series,
    *,
    title: str,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float],
    x_mark: tuple[float, str] | None = None,
    y_format: Callable[[float], str] = "{:g}".format,
) -> str:
    """An SVG of lines with a legend; text and lines are readable on light and dark ground."""
    xs = [x for points in series.values() for x, _ in points]
    low_x, high_x = min(xs), max(xs)
    low_y, high_y = y_range

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / ((high_x - low_x) or 1.0) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (min(max(y, low_y), high_y) - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return round(across, 1), round(up, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14" fill="{INK}">{title}</text>',
    ]
    for value in _ticks(low_y, high_y, 5):
        x, y = at(low_x, value)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GRID}"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end" fill="{INK}">{y_format(value)}</text>')
    for value in _ticks(low_x, high_x, 6):
        x, y = at(value, low_y)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle" fill="{INK}">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" fill="{INK}">{x_label}</text>')
    turn = f'transform="rotate(-90 16 {HEIGHT / 2})"'
    parts.append(f'<text x="16" y="{HEIGHT / 2}" text-anchor="middle" fill="{INK}" {turn}>{y_label}</text>')
    if x_mark is not None:
        x, bottom = at(x_mark[0], low_y)
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{bottom}" stroke="{INK}" stroke-dasharray="3 4"/>')
        parts.append(f'<text x="{x}" y="{TOP - 4}" text-anchor="middle" fill="{INK}">{x_mark[1]}</text>')
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join("{},{}".format(*at(x, y)) for x, y in sorted(points))
        width = 2.6 if index == 0 else 1.6
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        y = TOP + 14 + 20 * index
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 14}" y1="{y - 4}" x2="{WIDTH - RIGHT + 38}" y2="{y - 4}" stroke="{colour}"'
            f' stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{WIDTH - RIGHT + 44}" y="{y}" fill="{INK}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float, count: int) -> list[float]:
    step = (high - low) / count
    scale = 10.0 ** len(str(int(step))) / 10.0 if step >= 1 else 0.1
    nice = next(unit * scale for unit in (1, 2, 2.5, 5, 10) if unit * scale >= step)
    first = -(-low // nice)
    return [round(nice * (first + index), 6) for index in range(int((high - nice * first) / nice + 1e-9) + 1)]


def knee_figure(rows: Sequence[dict[str, Any]]) -> str:
    """On-time share against robots on one GPU."""
    chosen = [row for row in rows if row["bench"] == "gateway-robots-knee"]
    series: Series = {}
    for row in chosen:
        series.setdefault(row["scheduler"], []).append((row["robots"], 100 * row["on_time"]))
    first = chosen[0]
    full = max(row["robots"] / row["load"] for row in chosen if row["load"] == 1.0)
    return line_chart(
        series,
        title=f"Robots on one GPU: {first['policy']}, {first['control_hz']:g} Hz, chunk {first['horizon']},"
        f" replanning every {first['replan']} actions, started {first['start']}",
        x_label="robots",
        y_label="chunks in time, %",
        y_range=(0, 100),
        x_mark=(full, "full load"),
    )


def overload_figure(rows: Sequence[dict[str, Any]]) -> str:
    """On-time requests a second against the offered load."""
    chosen = [row for row in rows if row["bench"] == "gateway-overload" and row["policy"] == "pi05"]
    series: Series = {}
    for row in chosen:
        series.setdefault(row["scheduler"], []).append((row["load"], row["goodput_hz"]))
    top = max(row["goodput_hz"] for row in chosen)
    return line_chart(
        series,
        title="Goodput under growing load: pi05, Poisson arrivals, budgets of 150 to 500 ms",
        x_label="offered load over capacity",
        y_label="chunks in time, 1/s",
        y_range=(0, 10.0 * (int(top / 10.0) + 1)),
        x_mark=(1.0, "capacity"),
    )


FROM: dict[str, tuple[str, Callable[[Sequence[dict[str, Any]]], str]]] = {
    "robots-knee.svg": ("gateway-robots-per-gpu.json", knee_figure),
    "overload.svg": ("gateway-scheduling.json", overload_figure),
}


def main() -> None:
    """Draws every figure and fills every table."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for name, (source, draw) in FROM.items():
        (FIGURES / name).write_text(draw(json.loads((RESULTS / source).read_text())))
        print(FIGURES / name)
    PAGE.write_text(filled(PAGE.read_text(), {name: make() for name, make in TABLES.items()}))
    print(PAGE)


if __name__ == "__main__":
    main()
