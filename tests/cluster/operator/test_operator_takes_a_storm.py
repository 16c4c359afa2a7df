"""Edits by the hundred on a real API server: what was written last is what is in the end, and nothing fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kubernetes import client
from taktline_local.kubectl import wait_until
from taktline_operator import schema

pytestmark = pytest.mark.usefixtures("node")

POLICIES, EDITS = 4, 75  # two workers each in the end: the node has eight accelerators


def test_a_storm_of_edits_ends_in_the_last_ones(
    policies: Any, core_api: client.CoreV1Api, running_operator: Any
) -> None:
    names = [f"storm-{number}" for number in range(POLICIES)]
    policies.kubectl.apply(*(policies.body(name) for name in names))
    for name in names:
        policies.wait(name, "Available", "True")
    objects = client.CustomObjectsApi(core_api.api_client)
    kind = (schema.GROUP, schema.VERSION, policies.namespace, schema.PLURAL)

    def edit(name: str) -> None:
        for number in range(1, EDITS + 1):  # ends with two workers and a budget of its own
            pool = policies.body(name)["spec"]["pools"][0] | {"minReplicas": 1 + (number + 1) % 2, "maxReplicas": 2}
            if number == EDITS:
                pool["minReplicas"] = 2
            spec = {"slo": {"controlBudgetMs": 100 + number}, "pools": [pool]}
            objects.patch_namespaced_custom_object(*kind, name, {"spec": spec})

    with ThreadPoolExecutor(POLICIES) as people:
        list(people.map(edit, names))

    def through(name: str) -> bool:
        live = policies.get(name)
        (made,) = policies.kubectl.list("deployments", policies.namespace, f"taktline.dev/policy={name}")
        status = live["status"]
        return (
            status["observedGeneration"] == live["metadata"]["generation"]
            and made["spec"]["replicas"] == 2
            and status["readyReplicas"] == status["replicas"] == 2
        )

    for name in names:
        wait_until(lambda name=name: through(name), f"{name} is as it was written last: {policies.get(name)}")
        assert policies.wait(name, "Degraded", "False")
    failed = [line["message"] for line in running_operator.lines() if "unexpectedly" in line.get("message", "")]
    assert failed == []
