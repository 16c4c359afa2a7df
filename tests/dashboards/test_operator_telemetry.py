"""What the operator tells Prometheus about itself and about each PolicyDeployment."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from taktline_operator import health
from taktline_operator.kube import kind_of, path_of
from taktline_operator.telemetry import Telemetry
from taktline_protocol import metrics


def samples(telemetry: Telemetry) -> dict[tuple, float]:
    """Values by name and labels."""
    families = text_string_to_metric_families(telemetry.exposition().decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def live(name: str, **status) -> dict:
    return {"metadata": {"name": name, "namespace": "factory"}, "status": status}


def test_every_operator_metric_of_the_protocol_is_exported_with_its_labels():
    telemetry = Telemetry()
    status = {
        "conditions": [{"type": "Available", "status": "True", "reason": "WorkersReady"}],
        "pools": [{"name": "a", "desired": 2, "updated": 1, "ready": 2}],
        "currentRevision": "r1",
        "candidateRevision": "r2",
        "rollout": {"phase": "Shifting", "weight": 25},
        "scaling": {"desired": 3},
        "delivery": {"percent": 40},
    }
    gauges = [m.name for m in metrics.OPERATOR_METRICS if m.kind == "gauge" and not m.labels]
    telemetry.watch(lambda: dict.fromkeys(gauges, 1.0), lambda: [live("p", **status)])
    telemetry.requested("GET", "Pod", 200, 0.01)
    telemetry.reconciled("done", 0.02)
    telemetry.reviewed("allowed")

    seen = {}
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        for sample in family.samples:
            seen[sample.name.removesuffix("_bucket")] = set(sample.labels) - {"le"}
    for metric in metrics.OPERATOR_METRICS:
        assert seen[metric.name] == set(metric.labels), metric.name


def test_conditions_replicas_and_revisions_of_a_policy_are_series():
    telemetry = Telemetry()
    status = {
        "conditions": [
            {"type": "Available", "status": "False", "reason": "NoReadyWorker"},
            {"type": "Progressing", "status": "Unknown", "reason": "X"},
        ],
        "pools": [{"name": "a", "desired": 3, "updated": 1, "ready": 0}],
        "currentRevision": "r1",
    }
    telemetry.watch(dict, lambda: [live("p", **status)])
    found = samples(telemetry)
    owner = {"namespace": "factory", "policy": "p"}

    def value(name, **labels):
        return found[(name, *sorted((owner | labels).items()))]

    assert value(metrics.POLICY_CONDITION, condition="Available", reason="NoReadyWorker") == 0
    assert value(metrics.POLICY_CONDITION, condition="Progressing", reason="X") == -1
    assert value(metrics.POLICY_REPLICAS, pool="a", state="desired") == 3
    assert value(metrics.POLICY_REPLICAS, pool="a", state="ready") == 0
    assert value(metrics.POLICY_REVISION, revision="r1", track="current") == 1
    assert not any("candidate" in str(key) for key in found)


def test_a_policy_that_is_gone_and_one_without_a_status_leave_no_series():
    telemetry = Telemetry()
    shown = [live("p", conditions=[{"type": "Available", "status": "True", "reason": "R"}]), live("new")]
    telemetry.watch(dict, lambda: shown)
    assert any("p" in str(key) for key in samples(telemetry) if key[0] == metrics.POLICY_CONDITION)
    shown.pop(0)
    assert not [key for key in samples(telemetry) if key[0] == metrics.POLICY_CONDITION]


def test_a_request_is_counted_by_kind_and_not_by_name():
    assert kind_of(path_of("Pod", "factory", "p-0")) == "Pod"
    assert kind_of(path_of("PolicyDeployment", None)) == "PolicyDeployment"
    assert kind_of(path_of("Deployment", "factory", "p") + "/status") == "Deployment"
    assert kind_of("/version") == "other"


async def test_the_metrics_are_beside_the_health_endpoints():
    telemetry = Telemetry()
    runner = await health.serve("127.0.0.1:0", lambda: "", lambda: "not yet", telemetry.exposition)
    try:
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/metrics") as reply:
                assert reply.status == 200
                assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                assert metrics.OPERATOR_RECONCILE in await reply.text()
            async with session.get("/readyz") as reply:
                assert reply.status == 503
    finally:
        await runner.cleanup()
