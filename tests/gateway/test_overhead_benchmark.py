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
