"""Overload of real processes at a small size: every request gets its outcome, and batches are sent ahead."""

from __future__ import annotations

import uvloop

from benchmarks.gateway import overload
from benchmarks.gateway.links import CHUNK


def test_half_more_than_the_engine_can_do_leaves_nobody_without_an_answer(tmp_path):
    row = uvloop.run(overload.measure(tmp_path, 1.5, 3.0, work_ms=320.0, protocols=("rest",)))
    assert row["requests"] == row["accounted"]
    assert row["silent"] == 0
    assert row["words"][CHUNK] > 0
    assert row["behind"] > 0


def test_the_verdict_shows_what_must_not_be():
    good = [
        {"load": 1.0, "requests": 9, "accounted": 9, "silent": 0, "share_of_peak": 1.0},
        {"load": 3.0, "requests": 9, "accounted": 9, "silent": 0, "share_of_peak": 0.9},
    ]
    assert overload.faults(good) == []
    for change in ({"accounted": 8}, {"silent": 1}, {"share_of_peak": 0.89}):
        assert len(overload.faults([good[0], good[1] | change])) == 1
