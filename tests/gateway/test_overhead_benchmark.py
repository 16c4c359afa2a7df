"""The overhead benchmark at a small size: every server answers all of its robots, and the rows compare the servers."""

from __future__ import annotations

import pytest

from benchmarks.gateway import overhead

SERVERS = ("openpi", "fastapi", *overhead.OURS)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    found = []
    for name in SERVERS:
        found += overhead.measure(name, [2], 0.3, tmp_path_factory.mktemp(name.replace(" ", "-")))
    return found


def test_every_server_answers_every_request(measured):
    assert [one.server for one in measured] == list(SERVERS)
    for one in measured:
        assert one.errors == 0, one
        assert one.per_s > 0
        assert one.p50_ms <= one.p99_ms <= one.p99_9_ms


def test_rows_compare_each_server_with_the_bare_one(measured):
    rows = {row["server"]: row for row in overhead.rows_of(measured, 1, 0.3)}
    assert rows["openpi"]["ratio_to_openpi"] == 1.0
    assert rows["openpi"]["added_p50_ms"] == 0.0
    bare = next(one for one in measured if one.server == "openpi")
    ours = next(one for one in measured if one.server == "taktline stream")
    assert rows["taktline stream"]["ratio_to_openpi"] == pytest.approx(ours.per_s / bare.per_s, abs=1e-3)
    assert rows["taktline stream"]["ratio_to_ray"] is None, "Ray Serve was not part of this run"
    overhead.show(list(rows.values()))


def test_the_median_is_taken_of_each_figure():
    def one(per_s: float, p99_ms: float) -> overhead.Measured:
        return overhead.Measured("openpi", 1, per_s, 1.0, p99_ms, 9.0, 1, {"openpi": per_s})

    found = overhead.median_of([one(10.0, 5.0), one(30.0, 4.0), one(20.0, 6.0)])
    assert (found.per_s, found.p99_ms, found.errors, found.cpu_us) == (20.0, 5.0, 3, {"openpi": 20.0})


def one(server: str, clients: int, per_s: float, p50_ms: float = 1.0, p99_ms: float = 2.0) -> overhead.Measured:
    return overhead.Measured(server, clients, per_s, p50_ms, p99_ms, 9.0, 0, {})


def test_a_ratio_is_the_median_of_those_within_the_rounds():
    # The machine is half as fast in the second round, for both.
    found = {
        ("openpi", 16): [one("openpi", 16, rate) for rate in (4000.0, 2000.0, 4000.0)],
        ("taktline openpi", 16): [one("taktline openpi", 16, rate) for rate in (2400.0, 1200.0, 2200.0)],
    }
    assert overhead.ratio(found, "taktline openpi", "openpi", 16) == pytest.approx(0.6)
    assert overhead.ratio(found, "taktline openpi", "ray", 16) is None


def test_each_goal_is_judged_and_what_was_not_measured_is_no_goal_met(capsys):
    found = {
        ("openpi", 1): [one("openpi", 1, 2000.0, p50_ms=0.4)],
        ("taktline stream", 1): [one("taktline stream", 1, 900.0, p50_ms=1.3, p99_ms=2.5)],
        ("openpi", 16): [one("openpi", 16, 4000.0)],
        ("taktline openpi", 16): [one("taktline openpi", 16, 2400.0)],
    }
    overhead.show_goals(found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == ["met", "not measured", "not measured", "met", "NOT MET"]
    found["openpi", 16][0].others = 1.5
    overhead.show_goals(found)
    assert "quiet machine" in capsys.readouterr().out
