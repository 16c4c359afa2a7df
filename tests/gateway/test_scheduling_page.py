"""docs/scheduling.md says what the committed rows say, and names tests that exist."""

from __future__ import annotations

import re

from benchmarks.gateway.figures import FIGURES, FROM, RESULTS
from benchmarks.gateway.paired import difference
from benchmarks.gateway.tables import PAGE, TABLES, filled, rows_of
from benchmarks.gateway.times import ENGINES


def test_its_tables_are_those_of_the_rows():
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- table: ([a-z-]+) -->", page)) == set(TABLES)
    assert filled(page, {name: make() for name, make in TABLES.items()}) == page, (
        "run python -m benchmarks.gateway.figures"
    )


def test_its_figures_are_those_of_the_rows():
    import json

    for name, (source, draw) in FROM.items():
        assert draw(json.loads((RESULTS / source).read_text())) == (FIGURES / name).read_text()
        assert f"figures/{name}" in PAGE.read_text()


def test_each_fault_that_was_reported_has_a_test_that_exists():
    section = PAGE.read_text().split("## Known faults of other servers")[1]
    rows = re.findall(r"^\| ([^|]*#\d+[^|]*) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    assert len(rows) == 25
    text = "\n".join(path.read_text() for path in (PAGE.parents[1] / "tests").rglob("test_*.py"))
    for reported, _, tests in rows:
        names = re.findall(r"`(test_\w+)`", tests)
        assert names, reported
        assert not [name for name in names if f"def {name}(" not in text], reported


def test_the_goals_that_the_rows_speak_of():
    """What the page claims in words: overload keeps the peak, and sharing beats one GPU a robot twelve times."""
    overload = [row for row in rows_of("gateway-scheduling.json", "gateway-overload") if row["load"] == 3.0]
    assert all(row["share_of_peak"] >= 0.9 for row in overload if row["scheduler"] == "Taktline")
    assert all(row["share_of_peak"] <= 0.5 for row in overload if row["scheduler"].startswith("FIFO"))
    robots = rows_of("gateway-robots-per-gpu.json", "gateway-robots-per-gpu")
    assert all(row["robots"] >= 12 for row in robots if row["scheduler"] == "Taktline")


def test_our_own_engines_are_measured_at_every_batch():
    """A line between two batches a long way apart was a tenth too quick, and put a rival ahead."""
    ours = [engine for engine in ENGINES if engine.name.endswith("-h200")]
    assert len(ours) == 3
    for engine in ours:
        assert {batch for batch, _ in engine.points} >= set(engine.buckets), engine.name


BEYOND = {
    ("pi05", "poisson, mixed", 0.8),
    ("pi05", "poisson, mixed", 0.9),
}
"""The cases that the page names as more than three points below the schedule that knows all arrivals beforehand."""


def test_ours_is_within_three_points_of_the_best_schedule_but_where_the_page_says_so():
    rows = rows_of("gateway-scheduling.json", "gateway-scheduling-bound")
    assert len(rows) == 42
    assert {row["load"] for row in rows} == {0.7, 0.8, 0.9}
    beyond = {(row["policy"], row["trace"], row["load"]) for row in rows if row["bound"] - row["on_time"] > 0.03}
    assert beyond == BEYOND
    assert f"{len(rows) - len(BEYOND)} of the {len(rows)} rows are within three points" in PAGE.read_text()


BEHIND: set[tuple[tuple[str, str, float], str]] = set()
"""The cases that the page names as behind: a new one fails here, and so does one that is mended and still named."""


def test_another_policy_is_ahead_with_certainty_only_where_the_page_says_so():
    rows = rows_of("gateway-scheduling.json", "gateway-scheduling")
    cases: dict[tuple[str, str, float], dict[str, list[float]]] = {}
    for row in rows:
        case = cases.setdefault((row["policy"], row["trace"], row["load"]), {})
        case[row["scheduler"]] = row["on_time_by_seed"]
    assert len(cases) == 4 * 42 + 54
    behind = set()
    for case, shares in cases.items():
        ours = shares.pop("Taktline")
        for name, others in shares.items():
            against = difference(ours, others)
            if against.standing == "behind":
                behind.add((case, name))
    assert behind == BEHIND
    section = PAGE.read_text().split("### Against other servers' policies")[1]
    assert f"behind it: {len(BEHIND)}." in section
