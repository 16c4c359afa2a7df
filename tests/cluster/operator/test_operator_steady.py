"""A small instance of the steady state's measurement: the API server's own audit log says who wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from taktline_local.cluster import Cluster

from benchmarks.operator import steady

pytestmark = pytest.mark.timeout(900)


def test_an_operator_at_rest_writes_nothing_but_its_lease(control_plane: Cluster, tmp_path: Path) -> None:
    if control_plane.control_plane is None:
        pytest.skip("the audit log of a cluster that was brought is out of reach")
    names = ("processor", "group", "scaled", "nowhere")
    found = asyncio.run(steady.measure(control_plane, tmp_path, quiet_s=12.0, still_s=6.0, names=names))
    assert found["policies"] == len(names)
    assert found["writes_until_still"] > 10  # the log does count what the operator writes
    assert found["written"] == {}
    assert found["writes"] == 0
    assert found["lease_renewals"] > 0
    assert found["reads"] > 0  # it was awake
