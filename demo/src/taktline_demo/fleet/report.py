"""The HTML report of a fleet run: one file, no script, no outside resource, light and dark."""

from __future__ import annotations

import base64
from collections import Counter
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from taktline_demo.fleet.records import FleetRun, RobotReport
from taktline_demo.fleet.roofline import SERIES, roofline_svg

_TERMS = ("observe", "transfer", "queue", "inference", "actuate")
_BAR_WIDTH = 620.0


def write_report(path: Path, run: FleetRun) -> None:
    """Writes the report of `run` to `path`."""
    path.write_text(render_report(run), encoding="utf-8")


def render_report(run: FleetRun) -> str:
    """The report as a complete HTML document."""
    style = (files("taktline_demo.fleet") / "report.css").read_text(encoding="utf-8")
    body = "\n".join(
        (_head(run), _tiles(run), _roofline(run), _terms(run), _margins(run), _table(run), _workcells(run))
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Taktline fleet report: {escape(run.policy)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _head(run: FleetRun) -> str:
    return (
        f"<header><h1>Fleet report</h1><p>{len(run.robots)} simulated robots in closed loop with policy "
        f"<b>{escape(run.policy)}</b>{f' (revision {escape(run.revision)})' if run.revision else ''} at "
        f"{escape(run.url)}, control period {1000 * run.control_period_s:.0f} ms, seed {run.seed}.</p></header>"
    )


def _tiles(run: FleetRun) -> str:
    chunks = run.chunks
    late = sum(chunk.margin_ms < 0 for chunk in chunks)
    on_time = 100.0 * (1.0 - late / len(chunks)) if chunks else 0.0
    margin = float(np.median([chunk.margin_ms for chunk in chunks])) if chunks else 0.0
    inference = float(np.median([chunk.inference_ms for chunk in chunks])) if chunks else 0.0
    rate = sum(robot.chunk_rate_hz for robot in run.robots)
    tiles = (
        (f"{run.successes} / {len(run.episodes)}", "episodes reached the named block"),
        (f"{on_time:.1f} %", f"of {len(chunks)} chunks before their deadline"),
        (str(run.misses), "times a buffer ran dry"),
        (f"{margin:.0f} ms", "median control margin"),
        (f"{inference:.0f} ms", "median L_inference"),
        (f"{rate:.1f} /s", "chunks, all robots"),
    )
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for value, label in tiles)
    return f'<section class="tiles">{cells}</section>'


def _roofline(run: FleetRun) -> str:
    legend = "".join(
        f'<li><i class="s{index % SERIES}"></i>{escape(robot.robot)}</li>' for index, robot in enumerate(run.robots)
    )
    return (
        "<section><h2>Control-time roofline</h2>"
        f'<figure><div class="scroll">{roofline_svg(run)}</div><figcaption><ul class="legend">{legend}'
        '<li><svg width="14" height="14"><circle class="dot plain" cx="7" cy="7" r="4"/></svg>a cycle that asked '
        "ahead for the next chunk</li>"
        '<li><svg width="14" height="14"><circle class="first plain" cx="7" cy="7" r="4"/></svg>a serial cycle, '
        "first of its episode: the robot stood still</li>"
        '<li><svg width="20" height="20"><circle class="ring plain" cx="10" cy="10" r="8"/></svg>'
        "median of a robot's dots</li>"
        "</ul></figcaption></figure>"
        "<p>Left of X = 1 the robot waits for inference, right of it the arm's own motion sets the pace. A serial loop "
        "needs L_control = L_env + L_inference for a cycle; a loop that asks ahead needs the longer of the two. A "
        "cycle below its curve lost the rest to transfer, queueing and the hand-off at the next control step; a dot a "
        "hair above the roof shows the scatter of the control clock.</p>"
        "</section>"
    )


def _terms(run: FleetRun) -> str:
    longest = max((robot.median("critical_ms") for robot in run.robots), default=0.0) or 1.0
    rows = []
    for robot in run.robots:
        values = {term: robot.median(f"{term}_ms") for term in _TERMS}
        left, bars = 0.0, []
        for term, value in values.items():
            width = _BAR_WIDTH * value / (1.15 * longest)
            bars.append(
                f'<rect class="t-{term}" x="{left:.1f}" y="3" width="{width:.1f}" height="16">'
                f"<title>L_{term} {value:.1f} ms</title></rect>"
            )
            left += width
        total = sum(values.values())
        rows.append(
            f"<tr><th>{escape(robot.robot)}</th><td><svg viewBox='0 0 {_BAR_WIDTH + 90:.0f} 22' class='bar' "
            f"role='img' aria-label='{escape(robot.robot)}: {total:.0f} ms'>{''.join(bars)}"
            f"<text x='{left + 8:.1f}' y='16'>{total:.0f} ms</text></svg></td></tr>"
        )
    legend = "".join(f'<li><i class="t-{term}"></i>L_{term}</li>' for term in _TERMS)
    return (
        f'<section><h2>Where the time goes</h2><ul class="legend">{legend}</ul>'
        f'<div class="scroll"><table class="bars">{"".join(rows)}</table></div>'
        "<p>Medians of the five terms of the critical path.</p></section>"
    )


def _margins(run: FleetRun) -> str:
    values = [chunk.margin_ms for chunk in run.chunks] or [0.0]
    low, high = min(0.0, *values), max(0.0, *values)
    span = (high - low) or 1.0
    height, width, left = 26 * len(run.robots) + 34, 880, 64

    def place(value: float) -> float:
        return left + 20 + (width - left - 40) * (value - low) / span

    parts = [f'<svg class="margins" viewBox="0 0 {width} {height}" role="img" aria-label="control margins">']
    for index, robot in enumerate(run.robots):
        y = 16 + 26 * index
        parts.append(f'<text class="tick end" x="{left}" y="{y + 4}">{escape(robot.robot)}</text>')
        parts.append(f'<line class="grid" x1="{left + 10}" x2="{width - 10}" y1="{y}" y2="{y}"/>')
        parts += [
            f'<circle class="dot s{index % SERIES}" cx="{place(chunk.margin_ms):.1f}" cy="{y}" r="4">'
            f"<title>{chunk.margin_ms:.0f} ms</title></circle>"
            for chunk in robot.chunks
        ]
    bottom = height - 28
    parts.append(f'<line class="deadline" x1="{place(0):.1f}" x2="{place(0):.1f}" y1="2" y2="{bottom}"/>')
    parts.append(f'<text class="tick" x="{place(0):.1f}" y="{height - 8}">deadline</text>')
    if high > 0.15 * span:
        parts.append(f'<text class="tick end" x="{place(high) + 8:.1f}" y="{height - 8}">{high:.0f} ms</text>')
    parts.append("</svg>")
    return (
        f"<section><h2>Control margin of every chunk</h2><figure class='scroll'>{''.join(parts)}</figure>"
        "<p>Time left until the hand-off deadline when the chunk was there; left of the line it came too late.</p>"
        "</section>"
    )


def _table(run: FleetRun) -> str:
    headings = (
        "robot", "requests", "chunks/s", "L_transfer", "L_queue", "L_inference", "margin p50", "margin p99", "misses",
        "refused", "success",
    )  # fmt: skip
    rows = "".join(f"<tr>{''.join(_cells(robot))}</tr>" for robot in run.robots)
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return (
        f'<section><h2>Robots</h2><div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div><p>Medians in ms. Margin p99 is what 99 % of the chunks reach. A miss is "
        "an action buffer that ran dry; the arm then holds its pose. Refused are observations that the gateway turned "
        f"down with a reason{_reasons(run)}.</p></section>"
    )


def _reasons(run: FleetRun) -> str:
    counts: Counter[str] = Counter()
    for robot in run.robots:
        counts.update(robot.errors)
    listed = ", ".join(f"{count} {escape(code)}" for code, count in counts.most_common())
    return f" ({listed})" if listed else ""


def _cells(robot: RobotReport) -> list[str]:
    values = (
        str(robot.requests),
        f"{robot.chunk_rate_hz:.2f}",
        f"{robot.median('transfer_ms'):.1f}",
        f"{robot.median('queue_ms'):.1f}",
        f"{robot.median('inference_ms'):.1f}",
        f"{robot.margin_reached_by(0.5):.0f}",
        f"{robot.margin_reached_by(0.99):.0f}",
        str(robot.misses),
        str(sum(robot.errors.values())),
        f"{robot.successes}/{len(robot.episodes)}",
    )
    return [f"<th>{escape(robot.robot)}</th>", *(f"<td>{value}</td>" for value in values)]


def _workcells(run: FleetRun) -> str:
    cards = []
    for robot in run.robots:
        picture = base64.b64encode(robot.picture).decode("ascii")
        image = f'<img alt="the workcell at the end" src="data:image/jpeg;base64,{picture}">' if picture else ""
        lines = "".join(
            f'<li class="{"yes" if episode.success else "no"}">{escape(episode.instruction)} '
            f"<small>{'reached' if episode.success else _ending(episode.reached)} after {episode.duration_s:.1f} s"
            "</small></li>"
            for episode in robot.episodes
        )
        cards.append(f"<article>{image}<h3>{escape(robot.robot)}</h3><ol>{lines}</ol></article>")
    return f'<section><h2>Workcells</h2><div class="cards">{"".join(cards)}</div></section>'


def _ending(reached: str | None) -> str:
    return "gave up" if reached is None else f"went to {escape(reached)}"
