"""A bad rollout as people see it: the operator's own process on a real API, a real Prometheus, and the alert's life."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from taktline_local.kubectl import Kubectl, wait_until
from taktline_operator import platform_rules, routing
from taktline_operator.slo_windows import Clock
from taktline_protocol import slo

from benchmarks.operator.noisy_gateway import NoisyGateway
from tests.cluster.operator.measured_gateway import measured_gateway
from tests.dashboards.prometheus_run import PrometheusRun
from tests.operator.simulated_cluster import differing_trial
from tests.ports import free_port

pytestmark = [pytest.mark.usefixtures("node"), pytest.mark.timeout(900)]

Json = dict[str, Any]
POLICY = "rolled-badly"
PLAN = {"strategy": "Progressive", "stepSeconds": 0, "shadow": {"percent": 50, "minObservations": 100}}
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def prometheus(start_operator: Callable[..., Any], tmp_path: Path) -> Iterator[PrometheusRun]:
    """The operator, and a Prometheus that scrapes it and evaluates its rules."""
    printed = subprocess.run([ROOT / "tools/install-prometheus"], capture_output=True, text=True, check=True).stdout
    if not printed.strip():
        pytest.skip("no prometheus here: put prometheus and promtool on PATH, or use Debian or Ubuntu with apt-get")
    here = f"127.0.0.1:{free_port()}"
    start_operator("alerted", f"--health-listen={here}")
    groups = platform_rules.platform_groups(clock=Clock(0.01))
    found = PrometheusRun(Path(printed.strip()), tmp_path / "prometheus", {"operator": [here]}, groups)
    yield found
    found.stop()


@pytest.fixture
def gateway(kubectl: Kubectl, node: Any) -> Iterator[NoisyGateway]:
    """A gateway that measures what the candidate does."""
    with measured_gateway(kubectl, node, POLICY, rate=10.0) as found:
        yield found


def test_a_bad_rollout_is_taken_back_alerted_and_forgotten_with_its_cause(
    policies: Any, kubectl: Kubectl, prometheus: PrometheusRun, gateway: NoisyGateway
) -> None:
    def model(revision: str) -> Json:
        return {"family": "pi05", "source": {"path": "/srv/policies/reach"}, "revision": revision}

    kubectl.apply(policies.body(POLICY, rollout=PLAN, model=model("a")))
    policies.wait(POLICY, "Progressing", "False", "Complete")
    before = policies.routes()[POLICY]
    assert not prometheus.firing(slo.ROLLED_BACK, policy=POLICY)

    kubectl.apply(policies.body(POLICY, rollout=PLAN, model=model("b")))

    def taken_back() -> bool:
        table = routing.read_table(kubectl.get("configmap", "taktline-routes", "taktline-system"))
        candidate = table[POLICY].candidate if POLICY in table else None
        # What a gateway says of mirrored observations: one in four is answered with other actions.
        gateway.trial = None if candidate is None else differing_trial(candidate, 60.0)
        return bool(policies.get(POLICY)["status"]["rollout"]["phase"] == "RolledBack")

    wait_until(taken_back, f"it is taken back: {policies.get(POLICY)['status'].get('rollout')}", timeout_s=240.0)
    said = policies.wait(POLICY, "Degraded", "True")
    assert "revision b was taken back, revision a serves" in said["message"]
    assert policies.routes()[POLICY] == before
    events = policies.kubectl.list("events", policies.namespace)
    assert any(event["reason"] == said["reason"] and event["type"] == "Warning" for event in events)
    found = prometheus.until(lambda: prometheus.firing(slo.ROLLED_BACK, policy=POLICY), "the alert fires", 120)
    assert {(one["namespace"], one["reason"]) for one in found} == {(policies.namespace, said["reason"])}

    kubectl.apply(policies.body(POLICY, rollout=PLAN, model=model("a")))
    policies.wait(POLICY, "Degraded", "False")
    prometheus.until(lambda: not prometheus.firing(slo.ROLLED_BACK, policy=POLICY), "the alert clears", 120)
