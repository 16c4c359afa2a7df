"""A real gateway before a scripted worker, for the SDK and the command."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    made = Stack(tmp_path_factory.mktemp("client-stack"))
    made.write_routes(made.start_worker())
    made.start_gateway()
    made.wait_workers(1)
    yield made
    made.stop()
