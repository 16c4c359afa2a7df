"""KEDA: a ScaledObject that sets spec.replicas from the number of workers that scaling recommends."""

from __future__ import annotations

from typing import Any

from taktline_protocol import metrics

from taktline_operator import schema, workload
from taktline_operator.spec import PolicyDeployment

Json = dict[str, Any]

API_VERSION = "keda.sh/v1alpha1"
KIND = "ScaledObject"


def scaled_object(policy: PolicyDeployment) -> Json | None:
    """The ScaledObject of a policy that asks for one.

    It asks Prometheus for what the operator recommends and hands the number on, one worker for each: KEDA only acts.
    """
    scaling = policy.spec.scaling
    if scaling is None or scaling.keda is None:
        return None
    pools = policy.spec.pools
    query = f'max({metrics.POLICY_DEMAND}{{namespace="{policy.namespace}",policy="{policy.name}"}})'
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": workload.owned_metadata(policy, policy.name, None),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": f"{schema.GROUP}/{schema.VERSION}",
                "kind": schema.KIND,
                "name": policy.name,
            },
            "pollingInterval": scaling.keda.polling_seconds,
            "cooldownPeriod": scaling.keda.cooldown_seconds,
            "minReplicaCount": sum(pool.min_replicas for pool in pools),
            "maxReplicaCount": max(1, sum(pool.ceiling for pool in pools)),
            # A recommendation has waited its cool-down already: another five minutes would only cost workers.
            "advanced": {
                "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}
            },
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": scaling.keda.server_address,
                        "query": query,
                        "threshold": "1",
                    },
                }
            ],
        },
    }
