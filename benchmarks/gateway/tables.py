"""Markdown tables of docs/scheduling.md from the rows of the gateway's benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gateway.paired import difference

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
PAGE = ROOT / "docs" / "scheduling.md"
Row = dict[str, Any]


def rows_of(name: str, bench: str) -> list[Row]:
    """Rows of one benchmark from one committed file."""
    return [row for row in json.loads((RESULTS / name).read_text()) if row["bench"] == bench]


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """One table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in body)])


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with each `<!-- table: NAME -->` ... `<!-- end -->` filled. Raises KeyError for an unknown name."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{tables[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- table: ([a-z-]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


def _table(
    rows: Sequence[Row],
    head: Sequence[str],
    key: Callable[[Row], tuple[str, ...]],
    column: str,
    cell: Callable[[Row], str],
) -> str:
    columns = list(dict.fromkeys(str(row[column]) for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        lines.setdefault(key(row), {})[str(row[column])] = cell(row)
    return markdown(
        (*head, *columns), ((*keys, *(cells.get(name, "") for name in columns)) for keys, cells in lines.items())
    )


def scheduling() -> str:
    """On-time shares of all policies on the traces of π0.5 on Hopper."""
    rows = [row for row in rows_of("gateway-scheduling.json", "gateway-scheduling") if row["policy"] == "pi05"]
    return _table(
        rows,
        ("trace", "load"),
        lambda row: (row["trace"], f"{row['load']:g}"),
        "scheduler",
        lambda row: f"{100 * row['on_time']:.2f}",
    )


def best_of() -> str:
    """In how many cases ours is the best, and where it is not, against which of the others and by how much."""
    groups: dict[tuple[str, str, float], dict[str, Row]] = {}
    for row in rows_of("gateway-scheduling.json", "gateway-scheduling"):
        groups.setdefault((row["policy"], row["trace"], row["load"]), {})[row["scheduler"]] = row
    below = []
    for (policy, trace, load), rows in groups.items():
        ours = rows.pop("Taktline")
        best = max(rows.values(), key=lambda row: row["on_time"])
        against = difference(ours["on_time_by_seed"], best["on_time_by_seed"])
        if against.standing != "ahead":
            shares = (f"{100 * row['on_time']:.2f}" for row in (ours, best))
            gap = f"{100 * against.mean:+.2f} ± {100 * against.half:.2f}"
            below.append((policy, trace, f"{load:g}", *shares, best["scheduler"], gap, against.standing))
    tied = sum(cells[-1] == "tied" for cells in below)
    text = (
        f"Best, or within 0.05 points of the best: {len(groups) - len(below)} of {len(groups)} cases; "
        f"tied with it: {tied}; behind it: {len(below) - tied}."
    )
    head = ("engine", "trace", "load", "ours", "best", "by", "difference (95%)", "")
    return f"{text}\n\n{markdown(head, below)}" if below else text


def bound() -> str:
    """Ours against the offline optimum."""
    rows = rows_of("gateway-scheduling.json", "gateway-scheduling-bound")
    return markdown(
        (
            "engine",
            "trace",
            "load",
            "ours",
            "Clockwork-like",
            "offline, reached",
            "offline, bound",
            "ours below the bound",
        ),
        (
            (
                row["policy"],
                row["trace"],
                f"{row['load']:g}",
                *(f"{100 * row[name]:.2f}" for name in ("on_time", "peer_on_time", "reached_offline", "bound")),
                f"{100 * (row['bound'] - row['on_time']):.2f}",
            )
            for row in rows
        ),
    )


def online_bound() -> str:
    """Ours against the bound of rules that do not know the future."""
    return markdown(
        ("load", "ours", "bound without foresight", "ours below the bound"),
        (
            (
                f"{row['load']:g}",
                f"{100 * row['on_time']:.2f} ± {100 * row['on_time_half']:.2f}",
                f"{100 * row['bound']:.2f}",
                f"{100 * (row['bound'] - row['on_time']):.2f}",
            )
            for row in rows_of("gateway-online-bound.json", "gateway-online-bound")
        ),
    )


def recorded() -> str:
    """On-time shares on the recordings; the last column is the offline bound of the windows where there is one."""
    rows = rows_of("gateway-recorded.json", "gateway-scheduling-recorded")
    bounds = {
        (row["policy"], row["trace"], row["load"]): f"{100 * row['on_time']:.2f} of {100 * row['bound']:.2f}"
        for row in rows_of("gateway-recorded.json", "gateway-scheduling-recorded-bound")
    }
    names = list(dict.fromkeys(row["scheduler"] for row in rows))
    cells: dict[tuple[str, str, float], dict[str, str]] = {}
    for row in rows:
        key = (row["policy"], row["trace"], row["load"])
        cells.setdefault(key, {})[row["scheduler"]] = f"{100 * row['on_time']:.2f}"
        cells[key]["load"] = f"{row['load']:g}{' (its own)' if row['own_pace'] else ''}"
    return markdown(
        ("engine", "recording", "load", *names, "ours of the bound"),
        (
            (policy, trace, found["load"], *(found[name] for name in names), bounds.get((policy, trace, load), ""))
            for (policy, trace, load), found in cells.items()
        ),
    )


def overload() -> str:
    """Goodput at three times the capacity."""
    rows = [row for row in rows_of("gateway-scheduling.json", "gateway-overload") if row["load"] == 3.0]
    return _table(
        rows, ("engine",), lambda row: (row["policy"],), "scheduler", lambda row: f"{row['share_of_peak']:.3f}"
    )


def robots() -> str:
    """Robots on one GPU."""
    rows = rows_of("gateway-robots-per-gpu.json", "gateway-robots-per-gpu")
    return _table(
        rows,
        ("engine", "Hz", "replan", "start", "full load"),
        lambda row: (
            row["policy"],
            f"{row['control_hz']:g}",
            str(row["replan"]),
            row["start"],
            f"{row['full_load_robots']:g}",
        ),
        "scheduler",
        lambda row: str(row["robots"]),
    )


def hints() -> str:
    """What hints buy."""
    rows = rows_of("gateway-dephasing.json", "gateway-dephasing")
    return _table(
        rows,
        ("robots", "Hz", "left ms", "load", "start"),
        lambda row: (
            str(row["robots"]),
            f"{row['control_hz']:g}",
            f"{row['left_ms']:g}",
            f"{row['load']:g}",
            row["start"],
        ),
        "hints",
        lambda row: f"{100 * row['on_time']:.2f} % (p99 {row['p99_ms']:.0f} ms)",
    )


LOOKS = ("plan", "wait", "wait, poll")
"""Decisions that look at who is about to come: a plan for a small fleet, and a wait for company."""


def decisions() -> str:
    """CPU time of the scheduler's operations."""
    rows = rows_of("gateway-decisions.json", "gateway-decisions")
    rows = [row for row in rows if row["workers"] == 1 and row["operation"] not in LOOKS]
    return _table(
        rows,
        ("operation", "mix"),
        lambda row: (row["operation"], row["mix"]),
        "queued",
        lambda row: f"{row['median_us']:.0f} / {row['p99_us']:.0f}",
    )


def looks() -> str:
    """CPU time of decisions that look at who is about to come."""
    rows = [row for row in rows_of("gateway-decisions.json", "gateway-decisions") if row["operation"] in LOOKS]
    return _table(
        rows,
        ("decision", "fleet", "workers"),
        lambda row: (row["operation"], row["mix"], str(row["workers"])),
        "queued",
        lambda row: f"{row['median_us']:.0f} / {row['p99_us']:.0f}",
    )


TABLES: dict[str, Callable[[], str]] = {
    "scheduling": scheduling,
    "best-of": best_of,
    "bound": bound,
    "online-bound": online_bound,
    "recorded": recorded,
    "overload": overload,
    "robots": robots,
    "hints": hints,
    "decisions": decisions,
    "looks": looks,
}
