"""The Helm chart on a real API server: every object of every set of values is admitted."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

UNIT_TESTS = Path(__file__).resolve().parents[2] / "operator" / "test_operator_chart.py"


def chart_tests() -> Any:
    """The module that knows where helm and the sets of values are."""
    spec = importlib.util.spec_from_file_location("operator_chart", UNIT_TESTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHART = chart_tests()


@pytest.mark.parametrize("values", CHART.VALUES.values(), ids=CHART.VALUES)
def test_the_rendered_chart_is_admitted(kubectl: Any, installed: None, namespace: str, values: list[str]) -> None:
    helm = CHART.find_helm()
    if helm is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    named = [value.replace("line-1,line-2", namespace) for value in values]
    command = [helm, "template", "taktline", str(CHART.CHART), f"--namespace={namespace}", *named]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    answer = kubectl("apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", stdin=rendered)
    assert "deployment.apps/taktline-operator" in answer
