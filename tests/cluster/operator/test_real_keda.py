"""KEDA's own operator and metrics adapter, a real Prometheus and Kubernetes' own autoscaler, on what ours recommends.

Opt-in, as KEDA is built from its module once: `make controllers-test`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from taktline_local.keda import Keda
from taktline_local.kubectl import Kubectl, wait_until
from taktline_local.programs import find_controllers
from taktline_protocol import metrics

from benchmarks.operator.noisy_gateway import NoisyGateway
from tests.cluster.operator.measured_gateway import measured_gateway
from tests.dashboards.prometheus_run import PrometheusRun
from tests.ports import free_port

Json = dict[str, Any]
LIMIT_S = 300.0
pytestmark = pytest.mark.timeout(900)
POLICY = "scaled-by-keda"


@pytest.fixture(scope="module", autouse=True)
def controller(kubectl: Kubectl, installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keda]:
    """KEDA with its kinds, and its adapter behind the API server."""
    if os.environ.get("TAKTLINE_CONTROLLERS") != "1":
        pytest.skip("controllers of other products are tested by `make controllers-test`")
    programs = find_controllers("keda")
    assert programs is not None, "run `make controllers`"
    with Keda(programs, kubectl, tmp_path_factory.mktemp("keda")) as found:
        yield found


@pytest.fixture
def robots(kubectl: Kubectl, node: Any) -> Iterator[NoisyGateway]:
    """A gateway whose robots ask as often as the test says."""
    with measured_gateway(kubectl, node, POLICY, rate=2.0) as found:
        yield found


@pytest.fixture
def prometheus(start_operator: Callable[..., Any], tmp_path: Path) -> Iterator[PrometheusRun]:
    """The operator, and a Prometheus that scrapes it."""
    here = f"127.0.0.1:{free_port()}"
    start_operator("recommends", f"--health-listen={here}")
    found = PrometheusRun(programs(), tmp_path / "prometheus", {"operator": [here]}, [])
    yield found
    found.stop()


def programs() -> Path:
    """The folder with prometheus."""
    root = Path(__file__).resolve().parents[3]
    printed = subprocess.run([root / "tools/install-prometheus"], capture_output=True, text=True, check=True).stdout
    if not printed.strip():
        pytest.skip("no prometheus here: put prometheus and promtool on PATH, or use Debian or Ubuntu with apt-get")
    return Path(printed.strip())


def test_keda_sets_the_number_that_the_operator_recommends(
    policies: Any, kubectl: Kubectl, prometheus: PrometheusRun, robots: NoisyGateway
) -> None:
    keda = {"serverAddress": prometheus.url, "pollingSeconds": 5}
    scaling = {"mode": "Recommend", "downCooldownSeconds": 20, "scaleDownStep": 4, "keda": keda}
    body = policies.body(POLICY, replicas=1, scaling=scaling, slo={"controlBudgetMs": 1000})
    body["spec"]["pools"][0] |= {"minReplicas": 1, "maxReplicas": 6}
    kubectl.apply(body)

    def number() -> int:
        return int(policies.get(POLICY)["spec"]["replicas"])

    def recommended() -> int:
        return int((policies.get(POLICY).get("status") or {}).get("scaling", {}).get("desired", 0))

    def condition(kind: str) -> Any:
        found = kubectl.get("scaledobject", POLICY, policies.namespace) or {}
        return next((c["status"] for c in found.get("status", {}).get("conditions", []) if c["type"] == kind), None)

    wait_until(lambda: condition("Ready") == "True", "KEDA takes the ScaledObject", timeout_s=LIMIT_S)
    wait_until(lambda: recommended() == 1, "one worker is recommended", timeout_s=LIMIT_S)
    assert policies.wait(POLICY, "Integrated", "True")["reason"] == "Present"
    query = f'{metrics.POLICY_DEMAND}{{policy="{POLICY}"}}'
    wait_until(lambda: prometheus.query(query), "Prometheus has the recommendation", timeout_s=LIMIT_S)

    robots.rate = 70.0
    wait_until(lambda: recommended() >= 3, "more workers are recommended", timeout_s=LIMIT_S)
    wait_until(
        lambda: (wanted := recommended()) >= 3 and number() == wanted,
        "KEDA's autoscaler has set the number",
        timeout_s=LIMIT_S,
    )
    wait_until(
        lambda: policies.get(POLICY)["status"]["readyReplicas"] == number() >= 3, "they serve", timeout_s=LIMIT_S
    )
    (autoscaler,) = kubectl.list("hpa", policies.namespace)
    assert autoscaler["spec"]["scaleTargetRef"]["kind"] == "PolicyDeployment"
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["type"] == "External"
    # Who wrote the number: Kubernetes' autoscaler, and never the operator.
    shown = kubectl("-n", policies.namespace, "get", "pd", POLICY, "--show-managed-fields", "-o", "json")
    writers = {
        entry["manager"]
        for entry in json.loads(shown)["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }
    assert "kube-controller-manager" in writers
    assert not any("taktline" in writer for writer in writers)

    # The other way as soon as the recommendation has waited its own time: HPA's five minutes are not added to it.
    robots.rate = 2.0
    wait_until(lambda: recommended() == 1, "one worker is recommended again", timeout_s=LIMIT_S)
    wait_until(lambda: number() == 1, "and is what there is", timeout_s=150.0)
