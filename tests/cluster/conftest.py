"""Fixtures of the tests that need a real Kubernetes API: one control plane and one process node for the whole run.

Which API:
- TAKTLINE_KUBECONFIG names a cluster to use (never the plain KUBECONFIG, which may point at somebody's factory);
- else the programs that `make control-plane` built, built first where a Go toolchain is present;
- else the tests are skipped with what to install; with CI=true or TAKTLINE_REQUIRE_CLUSTER=1 they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from taktline_local.cluster import KUBECONFIG_VARIABLE, Cluster, missing_reason
from taktline_local.programs import build_programs, find_programs
from taktline_protocol.errors import TaktlineError


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the cluster."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.cluster)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs before the first test, whose time limit a build would exceed."""
    wanted = any(item.get_closest_marker("cluster") for item in session.items)
    if not wanted or session.config.option.collectonly or missing_reason() or os.environ.get(KUBECONFIG_VARIABLE):
        return
    if find_programs() is None:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            try:
                build_programs()
            except TaktlineError as error:
                raise pytest.UsageError(str(error)) from error


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with one ready process node, `process-node`, labelled `taktline.dev/pool=cpu`."""
    reason = missing_reason()
    if reason:
        required = os.environ.get("CI") == "true" or os.environ.get("TAKTLINE_REQUIRE_CLUSTER") == "1"
        if required:
            pytest.fail(f"the cluster tests may not be skipped here, but {reason}")
        pytest.skip(reason)
    with Cluster.open(tmp_path_factory.mktemp("cluster")) as opened:
        opened.start_node(
            "process-node",
            labels={"taktline.dev/pool": "cpu"},
            restart_base_s=0.5,
        )
        yield opened


@pytest.fixture(scope="session")
def control_plane(cluster: Cluster) -> Cluster:
    """The same cluster, under the name of what it is to an operator's tests."""
    return cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace, deleted with everything in it after the test."""
    name = cluster.create_namespace()
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
