"""A real gateway before a scripted worker, for the SDK and the command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_GATEWAY_TESTS = Path(__file__).parents[1] / "gateway"


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    # The stack of the gateway's own tests, loaded by path: test folders are no packages.
    spec = importlib.util.spec_from_file_location("taktline_test_stack", _GATEWAY_TESTS / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    made = module.Stack(tmp_path_factory.mktemp("client-stack"))
    made.write_routes(made.start_worker())
    made.start_gateway()
    made.wait_workers(1)
    yield made
    made.stop()
