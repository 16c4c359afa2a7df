"""Objects of the Prometheus operator for one policy, where their kinds exist: a PrometheusRule and a PodMonitor."""

from __future__ import annotations

from typing import Any

from taktline_operator import naming, slo_rules, workload
from taktline_operator.slo_windows import DEFAULT_PERIOD_DAYS
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

API_VERSION = "monitoring.coreos.com/v1"
KINDS = ("PrometheusRule", "PodMonitor")
METRICS_PORT = "metrics"
"""Name of the worker container's port that a PodMonitor scrapes."""


def prometheus_rule(
    policy: PolicyDeployment, *, period_days: int = DEFAULT_PERIOD_DAYS, runbooks: str = slo_rules.RUNBOOKS
) -> Json:
    """The recording rules and alerts of a policy's SLO."""
    groups = slo_rules.policy_groups(policy, period_days=period_days, runbooks=runbooks)
    return {
        "apiVersion": API_VERSION,
        "kind": "PrometheusRule",
        "metadata": workload.owned_metadata(policy, f"{policy.name}-slo", None),
        "spec": slo_rules.rule_file(groups),
    }


def pod_monitor(policy: PolicyDeployment) -> Json:
    """Scrapes the policy's workers. The gateways are scraped by the installation's own monitor."""
    return {
        "apiVersion": API_VERSION,
        "kind": "PodMonitor",
        "metadata": workload.owned_metadata(policy, f"{policy.name}-workers", None),
        "spec": {
            "selector": {"matchLabels": naming.worker_selector(policy.name)},
            "podTargetLabels": [naming.LABEL_POOL, naming.LABEL_ACCELERATOR],
            "podMetricsEndpoints": [
                {
                    "port": METRICS_PORT,
                    "interval": "15s",
                    # The label that queries use, whatever the target label of the pod is called.
                    "relabelings": [
                        {
                            "sourceLabels": ["__meta_kubernetes_pod_label_taktline_dev_pool"],
                            "targetLabel": "pool",
                        }
                    ],
                }
            ],
        },
    }
