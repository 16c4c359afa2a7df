"""Objects of the Prometheus operator for one policy, where their kinds exist: a PrometheusRule and a PodMonitor."""

from __future__ import annotations

from typing import Any

from taktline_operator import naming, slo_rules, workload
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

API_VERSION = "monitoring.coreos.com/v1"
KINDS = ("PrometheusRule", "PodMonitor")
CONDITION = "Monitored"


def objects(policy: PolicyDeployment, kinds: frozenset[str], runbooks: str = slo_rules.RUNBOOKS) -> list[Json]:
    """The objects of a policy that a cluster with these kinds gets; alerts link to pages under `runbooks`."""
    found = [prometheus_rule(policy, runbooks)] if "PrometheusRule" in kinds else []
    return found + ([pod_monitor(policy)] if "PodMonitor" in kinds else [])


def condition(kinds: frozenset[str]) -> tuple[str, str, str]:
    """Status, reason and message of the condition that says whether Prometheus is told of the policy."""
    missing = [kind for kind in KINDS if kind not in kinds]
    if not missing:
        return "True", "Applied", "alerts and scraping are set up for the Prometheus operator"
    return (
        "False",
        "KindsAbsent",
        f"the cluster has no {' and no '.join(missing)} (Prometheus operator), or the operator may not use it;"
        " `taktline-operator rules` prints the alerts for any Prometheus",
    )


def prometheus_rule(policy: PolicyDeployment, runbooks: str = slo_rules.RUNBOOKS) -> Json:
    """The recording rules and alerts of a policy's SLO."""
    groups = slo_rules.policy_groups(policy, runbooks=runbooks)
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
                    "port": naming.METRICS_PORT_NAME,
                    "interval": "15s",
                    # The label that queries use, whatever the target label of the pod is called.
                    "relabelings": [
                        {
                            "sourceLabels": ["__meta_kubernetes_pod_label_taktline_dev_pool"],
                            "targetLabel": "pool",
                        },
                        # Of a group only the first pod has a metrics page.
                        {
                            "action": "drop",
                            "sourceLabels": [
                                "__meta_kubernetes_pod_label_taktline_dev_group",
                                "__meta_kubernetes_pod_label_apps_kubernetes_io_pod_index",
                            ],
                            "regex": ".+;[1-9][0-9]*",
                        },
                        {
                            "action": "drop",
                            "sourceLabels": ["__meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_worker_index"],
                            "regex": "[1-9][0-9]*",
                        },
                    ],
                }
            ],
        },
    }
