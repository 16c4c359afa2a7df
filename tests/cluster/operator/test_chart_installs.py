"""The Helm chart on a real API server: every object of every set of values is admitted."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests.operator import test_operator_chart as chart


@pytest.mark.parametrize("values", chart.VALUES.values(), ids=chart.VALUES)
def test_the_rendered_chart_is_admitted(kubectl: Any, installed: None, namespace: str, values: list[str]) -> None:
    helm = chart.find_helm()
    if helm is None:
        pytest.skip("there is no helm here: run tools/install-helm")
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    named = [value.replace("line-1,line-2", namespace) for value in values]
    command = [helm, "template", "taktline", str(chart.CHART), f"--namespace={namespace}", *named]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    answer = kubectl("apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-", stdin=rendered)
    assert "deployment.apps/taktline-operator" in answer
