"""The kill matrix at a small size: whoever dies, every request gets exactly one outcome, none of them silence."""

from __future__ import annotations

import random
import shutil
import signal

import pytest
import uvloop

from benchmarks.gateway import chaos
from benchmarks.gateway.fleet import CONNECTION, SILENT
from benchmarks.gateway.links import CHUNK

REDIS = shutil.which("redis-server") is not None


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    made = chaos.build(folder, redis=REDIS)
    made.folder = folder
    yield made
    made.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
@pytest.mark.parametrize("target", chaos.TARGETS)
def test_every_request_is_accounted_for(stage, target, number):
    if target == "redis" and not REDIS:
        pytest.fail("redis-server is missing: run `make test-tools`")
    row = uvloop.run(chaos.scenario(stage, stage.folder, target, number, 14, random.Random(f"{target} {number}")))
    assert not chaos.faults(row), row
    assert row[CHUNK] > 0
    assert row[CHUNK] + row[CONNECTION] + row[SILENT] + sum(row["typed_errors"].values()) == row["requests"]
    if target != "gateway":
        assert row[CONNECTION] == 0, "no robot hears of a worker or of Redis going away through its connection"
    if target == "worker" and number is signal.SIGTERM:
        assert set(row["typed_errors"]) <= {"deadline_unreachable", "overloaded"}, "a drained worker loses nothing"


def test_the_account_shows_what_must_not_be():
    """The check itself: silence, a missing outcome and a gateway that does not come back are faults."""
    good = {"target": "redis", "signal": "SIGKILL", "requests": 5, "accounted": 5, "chunks_after": 1}
    good |= {SILENT: 0, CONNECTION: 0, "silent_robots": []}
    assert chaos.faults(good) == []
    for change in ({"accounted": 4}, {SILENT: 1}, {"chunks_after": 0}, {CONNECTION: 1}):
        assert len(chaos.faults(good | change)) == 1
