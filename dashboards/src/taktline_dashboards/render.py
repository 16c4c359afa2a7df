"""Draws a committed dashboard with matplotlib from a real Prometheus' answers, where there is no Grafana.

It reads the same JSON that Grafana imports, asks the same queries and keeps titles, units, colours and layout. It is
not Grafana's picture: fonts, legends and interaction differ, and the head of each page says so.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator

Json = dict[str, Any]
Series = tuple[dict[str, str], np.ndarray, np.ndarray]
"""Labels, times in s, values."""

COLOURS = {
    "green": "#56a64b",
    "orange": "#ff9830",
    "red": "#e02f44",
    "blue": "#3274d9",
    "purple": "#8f3bb8",
    "yellow": "#f2cc0c",
    "super-light-blue": "#8ab8ff",
    "text": "#222222",
}
ROW_INCHES, COLUMN_INCHES = 0.36, 0.72
_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_SUFFIXES = {"ms": " ms", "s": " s", "reqps": "/s", "ops": "/s", "celsius": " °C", "watt": " W", "percent": " %"}


def shown(value: float, unit: str) -> str:
    """A value as a reader wants it."""
    if not math.isfinite(value):
        return "–"
    if unit == "percentunit":
        return f"{100 * value:.4g} %"
    scale, name = (1e6, "MHz") if unit == "hertz" else (1.0, "")
    if unit in ("bytes", "Bps"):
        scale, name = next((step for step in _BYTES if abs(value) >= step[0]), _BYTES[-1])
        name += "/s" if unit == "Bps" else ""
    number = value / scale
    text = f"{number:,.0f}" if abs(number) >= 10_000 else f"{number:.4g}"
    return f"{text}{f' {name}' if name else _SUFFIXES.get(unit, '')}"


class Source:
    """Asks one Prometheus about one span of time."""

    def __init__(self, url: str, start_s: float, end_s: float, variables: Mapping[str, str]) -> None:
        """`variables` are the dashboard's, and `__rate_interval` and `__range`, by name without the dollar sign."""
        self.start_s, self.end_s = start_s, end_s
        self._http = httpx.Client(base_url=url, timeout=30)
        self._variables = variables

    def filled(self, expr: str) -> str:
        """The expression with its variables replaced."""
        for name in sorted(self._variables, key=len, reverse=True):
            expr = expr.replace(f"${name}", self._variables[name])
        return expr

    def over_time(self, expr: str, step_s: float) -> list[Series]:
        """The series of a range query."""
        span = {"start": self.start_s, "end": self.end_s, "step": step_s}
        found = self._ask("/api/v1/query_range", {"query": self.filled(expr), **span})
        result = []
        for series in found:
            pairs = np.array([(float(t), float(v)) for t, v in series["values"]])
            result.append((series["metric"], pairs[:, 0], pairs[:, 1]))
        return result

    def at_end(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query at the end of the span."""
        found = self._ask("/api/v1/query", {"query": self.filled(expr), "time": self.end_s})
        return [(series["metric"], float(series["value"][1])) for series in found]

    def _ask(self, path: str, parameters: Mapping[str, Any]) -> list[Json]:
        body = json.loads(self._http.get(path, params=dict(parameters)).content)
        if body["status"] != "success":
            raise ValueError(f"{parameters['query']}: {body['error']}")
        result: list[Json] = body["data"]["result"]
        return result


def draw(dashboard: Json, source: Source, out: Path) -> None:
    """Writes one PNG with all panels of a dashboard."""
    mpl.use("Agg")
    placed = [panel["gridPos"] for panel in dashboard["panels"]]
    rows = max(place["y"] + place["h"] for place in placed) + 2
    figure = plt.figure(figsize=(24 * COLUMN_INCHES, rows * ROW_INCHES), dpi=72, facecolor="#f4f5f5")
    head = f"{dashboard['title']}   (drawn by matplotlib from Prometheus' answers; not a picture of Grafana)"
    figure.text(0.01, 1 - 0.8 / rows, head, fontsize=13, weight="bold", va="center")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, (place["y"] + 2) / rows
        if panel["type"] == "row":
            figure.text(0.01, 1 - top - 0.5 / rows, panel["title"], fontsize=11, weight="bold", va="center")
            continue
        margin = {"timeseries": (0.032, 0.9), "heatmap": (0.04, 0.9), "xychart": (0.035, 1.3), "bargauge": (0.09, 0.9)}
        inset, foot = margin.get(panel["type"], (0.006, 0.3))
        box = (
            left + inset,
            1 - top - (place["h"] - foot) / rows,
            place["w"] / 24 - inset - 0.008,
            (place["h"] - foot - 1.1) / rows,
        )
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], loc="left", fontsize=9, weight="bold")
        _DRAWERS[panel["type"]](axes, panel, source)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)


def _unit(panel: Json) -> str:
    return str(panel["fieldConfig"]["defaults"].get("unit", "none"))


def _name(labels: Mapping[str, str], legend: str) -> str:
    if not legend or legend == "__auto":
        return ", ".join(value for key, value in labels.items() if key != "__name__") or "value"
    # As Grafana does: a label that the series does not have is shown by its name.
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda found: labels.get(found[1]) or found[1], legend).strip()


def _overrides(panel: Json) -> dict[str, dict[str, Any]]:
    """Properties by series name."""
    merged: dict[str, dict[str, Any]] = {}
    for found in panel["fieldConfig"].get("overrides", []):
        properties = {prop["id"]: prop["value"] for prop in found["properties"]}
        merged.setdefault(str(found["matcher"]["options"]), {}).update(properties)
    return merged


def _no_data(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#888888", transform=axes.transAxes)


def _time_series(axes: Axes, panel: Json, source: Source) -> None:
    step_s = max(0.5, (source.end_s - source.start_s) / 120)
    grid = np.arange(source.start_s, source.end_s + step_s / 2, step_s)
    overrides, unit = _overrides(panel), _unit(panel)
    custom = panel["fieldConfig"]["defaults"].get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    drawn: list[tuple[str, np.ndarray, Json]] = []
    for target in panel["targets"]:
        for labels, times, values in source.over_time(target["expr"], step_s):
            full = np.full(len(grid), np.nan)
            full[np.clip(np.round((times - grid[0]) / step_s).astype(int), 0, len(grid) - 1)] = values
            name = _name(labels, target.get("legendFormat", ""))
            drawn.append((name, full, overrides.get(name, {})))
    base = np.zeros(len(grid))
    minutes = (grid - source.start_s) / 60
    for index, (name, values, properties) in enumerate(sorted(drawn, key=lambda item: item[0])):
        limit = properties.get("custom.lineStyle") is not None
        colour = COLOURS.get(str(properties.get("color", {}).get("fixedColor", "")), f"C{index % 10}")
        if stacked and not limit:
            top = base + np.nan_to_num(values)
            axes.fill_between(minutes, base, top, color=colour, alpha=0.6, linewidth=0, label=name)
            base = top
        else:
            style = "--" if limit else "-"
            axes.plot(
                minutes, values, style, color=colour, linewidth=1.4, label=name, marker="." if _lonely(values) else ""
            )
    if not drawn:
        _no_data(axes)
        return
    defaults = panel["fieldConfig"]["defaults"]
    low, high = axes.get_ylim()
    axes.set_ylim(defaults.get("min", low), 1.02 * defaults["max"] if "max" in defaults else high + 0.1 * abs(high))
    if unit in ("bytes", "Bps"):
        axes.yaxis.set_major_locator(MultipleLocator(whole_step(*axes.get_ylim())))
    axes.yaxis.set_major_formatter(lambda value, _: shown(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if 0 < len(drawn) <= 14:
        axes.legend(fontsize=6.5, loc="best", ncols=1 + len(drawn) // 7, framealpha=0.6)


def whole_step(low: float, high: float) -> float:
    """Bytes between the ticks of an axis: a power of two, so that they are round in KiB or MiB; at most eight ticks."""
    return float(2.0 ** max(0, math.ceil(math.log2(max(1.0, high - low) / 8))))


def _lonely(values: np.ndarray) -> bool:
    finite = np.isfinite(values)
    return bool(finite.sum() and not (finite[1:] & finite[:-1]).any())


def _colour_of(value: float, panel_or_steps: Json) -> str:
    colour = "blue"
    for step in panel_or_steps["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    return COLOURS.get(colour, colour)


def _single(axes: Axes, panel: Json, source: Source) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    found = source.at_end(panel["targets"][0]["expr"])
    if not found:
        _no_data(axes)
        return
    value = found[0][1]
    axes.set_facecolor(_colour_of(value, panel["fieldConfig"]["defaults"]["thresholds"]))
    text = shown(value, _unit(panel))
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=18, color="white", transform=axes.transAxes)


def _bars(axes: Axes, panel: Json, source: Source) -> None:
    target = panel["targets"][0]
    found = sorted((_name(labels, target["legendFormat"]), value) for labels, value in source.at_end(target["expr"]))
    if not found:
        _no_data(axes)
        return
    steps, unit = panel["fieldConfig"]["defaults"]["thresholds"], _unit(panel)
    names, values = [name for name, _ in found], [value for _, value in found]
    axes.barh(names, values, color=[_colour_of(value, steps) for value in values])
    for row, value in enumerate(values):
        axes.text(0, row, f" {shown(value, unit)}", va="center", fontsize=8)
    axes.xaxis.set_major_formatter(lambda value, _: shown(value, unit))
    axes.tick_params(labelsize=7)


def _heat_map(axes: Axes, panel: Json, source: Source) -> None:
    step_s = max(1.0, (source.end_s - source.start_s) / 60)
    found = source.over_time(panel["targets"][0]["expr"], step_s)
    found.sort(key=lambda item: float(item[0]["le"].replace("+Inf", "inf")))
    if not found:
        _no_data(axes)
        return
    grid = np.arange(source.start_s, source.end_s + step_s / 2, step_s)
    cumulative = np.zeros((len(found), len(grid)))
    for row, (_, times, values) in enumerate(found):
        cumulative[row, np.clip(np.round((times - grid[0]) / step_s).astype(int), 0, len(grid) - 1)] = values
    cells = np.clip(np.diff(np.vstack([np.zeros(len(grid)), cumulative]), axis=0), 0, None)
    minutes = (grid - source.start_s) / 60
    shade = np.ma.masked_less_equal(cells, 0)
    axes.pcolormesh(minutes, np.arange(len(found)), shade, cmap="Oranges", shading="nearest", norm="log")
    labels = [item[0]["le"] for item in found]
    every = 1 + len(labels) // 11
    axes.set_yticks(range(0, len(found), every), [f"≤ {label.removesuffix('.0')}" for label in labels[::every]])
    if "0.0" in labels:
        axes.axhline(labels.index("0.0") + 0.5, color=COLOURS["red"], linestyle="--", linewidth=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} min")
    axes.tick_params(labelsize=6.5)


def _merged(panel: Json, source: Source) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Labels, headings and rows of a table after Grafana's merge and organize."""
    organised = panel["transformations"][1]["options"]
    renamed: dict[str, str] = organised["renameByName"]
    labels = [name for name in organised["indexByName"] if name not in renamed]
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for target, heading in zip(panel["targets"], renamed.values(), strict=True):
        for found, value in source.at_end(target["expr"]):
            key = tuple(found.get(label, "") for label in labels)
            rows.setdefault(key, dict(zip(labels, key, strict=True)))[heading] = value
    return labels, list(renamed.values()), [rows[key] for key in sorted(rows)]


def _table(axes: Axes, panel: Json, source: Source) -> None:
    axes.axis("off")
    labels, headings, rows = _merged(panel, source)
    if not rows:
        _no_data(axes)
        return
    overrides = _overrides(panel)
    texts, colours = [], []
    for row in rows[:12]:
        cells = [str(row[label]) for label in labels]
        shades = ["white"] * len(labels)
        for heading in headings:
            value, properties = row.get(heading, math.nan), overrides.get(heading, {})
            cells.append(shown(value, properties.get("unit", "none")))
            steps = properties.get("thresholds")
            shades.append(_colour_of(value, steps) if steps and math.isfinite(value) else "white")
        texts.append(cells)
        colours.append(shades)
    table = axes.table(texts, cellColours=colours, colLabels=[*labels, *headings], loc="upper left", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width(list(range(len(labels) + len(headings))))
    table.scale(1, 1.25)


def _scatter(axes: Axes, panel: Json, source: Source) -> None:
    labels, (x, y), rows = _merged(panel, source)
    points = [row for row in rows if math.isfinite(row.get(x, math.nan)) and math.isfinite(row.get(y, math.nan))]
    if not points:
        _no_data(axes)
        return
    axes.scatter([row[x] for row in points], [row[y] for row in points], s=40, zorder=3)
    for row in points:
        axes.annotate(" " + "/".join(row[label] for label in labels), (row[x], row[y]), fontsize=8)
    axes.axvline(1.0, color=COLOURS["red"], linestyle="--", linewidth=1)
    axes.set_ylim(0, max(1.05, *(row[y] * 1.1 for row in points)))
    axes.set_xlim(0, max(1.5, *(row[x] * 1.3 for row in points)))
    axes.set_xlabel(textwrap.shorten(x, 60), fontsize=7)
    axes.set_ylabel(textwrap.shorten(y, 60), fontsize=7)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


_DRAWERS = {
    "timeseries": _time_series,
    "stat": _single,
    "bargauge": _bars,
    "heatmap": _heat_map,
    "table": _table,
    "xychart": _scatter,
}
