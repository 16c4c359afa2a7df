"""Twenty seconds of the soak: robots come and go at 80% load, and the gateway holds afterwards what it held before."""

from __future__ import annotations

import uvloop

from benchmarks.gateway import soak
from benchmarks.gateway.links import CHUNK
from benchmarks.gateway.soak import Sample


def test_nothing_is_left_behind(tmp_path):
    row = uvloop.run(soak.soak(tmp_path, seconds=20.0, load=0.8, robots=12, sample_s=1.0))
    # Twenty seconds are too short to tell growth from warming up; the long run judges memory.
    assert not soak.faults(row, growth_mib=64.0), row
    assert row[CHUNK] > 0
    assert min(row["peak"][name] for name in ("connections", "clients", "robots", "sessions")) > 0
    assert row["after"]["tasks"] <= row["before"]["tasks"]
    assert row["after"]["descriptors"] <= row["before"]["descriptors"]


def test_the_check_sees_a_leak():
    held = {"descriptors": 20, "tasks": 7, "connections": 0, "clients": 0, "robots": 0, "sessions": 0, "queued": 0}
    row = {"before": held, "after": held, "requests": 3, "accounted": 3, "silent": 0, "memory_growth_mib": 0.5}
    assert soak.faults(row, 8.0) == []
    for change in ({"after": held | {name: held[name] + 1}} for name in held):
        assert len(soak.faults(row | change, 8.0)) == 1
    assert len(soak.faults(row | {"memory_growth_mib": 9.0}, 8.0)) == 1
    flat = [Sample(float(at), 100.0 + (at == 7) * 50, 1, 1, 0, 0, 0, 0, 0) for at in range(40)]
    assert soak.growth_of(flat) == 0.0
    growing = [Sample(float(at), 100.0 + at, 1, 1, 0, 0, 0, 0, 0) for at in range(40)]
    assert soak.growth_of(growing) > 15.0
