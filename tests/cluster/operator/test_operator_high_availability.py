"""Two operators and one Lease on a real API server: a stand-by takes over, at once after a planned stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from taktline_local.kubectl import wait_until

LEASE = "taktline-operator"  # the name that the manifests grant


def works(process: Any) -> bool:
    """Whether this operator has begun to reconcile."""
    return any(line["message"] == "operator started" for line in process.lines())


def holder(kubectl: Any) -> str:
    found: str = (kubectl.get("lease", LEASE, "taktline-system") or {}).get("spec", {}).get("holderIdentity", "")
    return found


def test_a_standby_takes_over_from_a_dead_leader_and_then_from_one_that_stops(
    kubectl: Any, policies: Any, node: Any, start_operator: Callable[..., Any]
) -> None:
    first = start_operator("first", f"--lease={LEASE}")
    wait_until(lambda: works(first), "the first leads")
    second = start_operator("second", f"--lease={LEASE}")
    policies.kubectl.apply(policies.body("pick-ha"))
    policies.wait("pick-ha", "Available", "True")
    assert not works(second), "only one of them may work"
    before = holder(kubectl)

    first.stop(kill=True)
    wait_until(lambda: works(second), "the second took over")
    assert holder(kubectl) not in ("", before)
    assert policies.routes()["pick-ha"], "the route outlived the leader"
    policies.kubectl("-n", policies.namespace, "delete", "pd", "pick-ha", "--timeout=30s")
    wait_until(lambda: "pick-ha" not in policies.routes(), "the new leader takes the route away")

    third = start_operator("third", f"--lease={LEASE}")
    wait_until(lambda: third.log.exists(), "the third is started")
    assert second.stop() == 0
    assert all(line["level"] != "error" for line in second.lines())
    wait_until(lambda: works(third), "a planned stop hands the lease over")
