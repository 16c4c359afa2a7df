"""The cluster demo says what stands in the way where its time runs out."""

from __future__ import annotations

from typing import Any, cast

import pytest
from taktline_local import cluster_demo
from taktline_local.kubectl import Kubectl, wait_until
from taktline_protocol.errors import ErrorCode, TaktlineError

Object = dict[str, Any]


def pod(name: str, ready: str) -> Object:
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready}]}}


def event(name: str, at: str, message: str, kind: str = "Warning") -> Object:
    return {"type": kind, "lastTimestamp": at, "message": message, "involvedObject": {"name": name}}


class Listed:
    """What kubectl lists."""

    def list(self, kind: str, namespace: str) -> list[Object]:
        if namespace != cluster_demo.SYSTEM_NAMESPACE:
            return []
        if kind == "pods":
            return [pod("gateway-1", "True"), pod("operator-1", "False"), pod("other-1", "False")]
        return [
            event("operator-1", "2026-03-01T08:00:09Z", "Readiness probe failed: 503 the CRD is too old"),
            event("operator-1", "2026-03-01T08:00:01Z", "Readiness probe failed: no connection"),
            event("operator-1", "2026-03-01T08:00:10Z", "Started", "Normal"),
            event("gateway-1", "2026-03-01T08:00:02Z", "FailedMount"),
            {"type": "Warning", "involvedObject": {"name": "gateway-1"}},
        ]


def test_pods_that_are_not_ready_are_told_with_their_last_warning() -> None:
    kubectl = cast("Kubectl", Listed())
    said = "operator-1 is not ready (Readiness probe failed: 503 the CRD is too old); other-1 is not ready"
    assert cluster_demo.unready(kubectl) == said
    with pytest.raises(TaktlineError) as caught:
        wait_until(
            lambda: None, "it serves", timeout_s=0, why=lambda: cluster_demo.unready(kubectl), next_step="read x"
        )
    assert caught.value.message == f"waited 0 s in vain until it serves: {said}"
    assert caught.value.next_step == "read x"


def test_what_was_waited_for_is_told_where_nobody_can_say_what_stands_in_the_way() -> None:
    def why() -> str:
        raise TaktlineError(ErrorCode.INTERNAL, "kubectl get pods failed: connection refused", "")

    with pytest.raises(TaktlineError) as caught:
        wait_until(lambda: None, "it serves", timeout_s=0, why=why, next_step="read x")
    cause = "what stands in the way is not known (kubectl get pods failed: connection refused)"
    assert caught.value.message == f"waited 0 s in vain until it serves: {cause}"
    assert caught.value.next_step == "read x"
