"""A budget below what a pool's workers need is told, by what the gateways measure, also where nothing scales."""

from __future__ import annotations

from typing import Any

import pytest
from taktline_operator import demand
from taktline_operator.reconcile import Controller
from taktline_protocol.measurements import GatewayMeasurements, PolicyMeasurement, PoolTimes
from taktline_protocol.messages import BucketTime

Json = dict[str, Any]
KEY = ("line-1", "reach")


class Gateways:
    """Gateways that have measured the policy's workers, once they have."""

    def __init__(self) -> None:
        self.asked, self.p99_ms = 0, 0.0

    async def all(self) -> tuple[GatewayMeasurements, ...]:
        self.asked += 1
        times = (BucketTime(batch=1, median_ms=self.p99_ms, p99_ms=self.p99_ms),) if self.p99_ms else ()
        policy = PolicyMeasurement(policy="reach", pools=(PoolTimes(pool="cpu", workers=1, t_sync=times),))
        return (GatewayMeasurements(instance="a", seconds=float(self.asked), policies=(policy,)),)

    async def of_policy(self, policy: str) -> tuple[PolicyMeasurement, ...] | None:
        return None


def caution(api: Any) -> Json:
    conditions = api.objects["PolicyDeployment", *KEY]["status"]["conditions"]
    return next(found for found in conditions if found["type"] == "Cautioned")


async def test_a_budget_below_the_measured_floor_is_told_where_nothing_scales(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, due, gateways = [1000.0], [], Gateways()
    api = make.Api(
        make.body(slo={"controlBudgetMs": 30}), make.pod("a", owner=make.policy(slo={"controlBudgetMs": 30}))
    )
    controller = Controller(api, make.settings, clock=lambda: make.now, measurements=gateways, monotonic=lambda: now[0])
    monkeypatch.setattr(controller.queue, "add", lambda key, delay_s=0.0: due.append(key))

    async def turn(seconds: float) -> bool:
        """Let time pass and look; whether the policy has its turn again, which it gets."""
        now[0] += seconds
        due.clear()
        await controller.look_at_demand()
        found = KEY in due
        if found:
            await controller.handle(KEY)
        return found

    await controller.resync(everything=True)
    await controller.handle(KEY)
    assert caution(api)["status"] == "False"
    # Nobody has measured anything yet: it is asked again, but not at every look.
    assert not await turn(5.0)
    assert not await turn(5.0)
    assert gateways.asked == 1
    gateways.p99_ms = 48.0
    assert await turn(demand.UNKNOWN_S)
    said = caution(api)
    assert (said["status"], said["reason"]) == ("True", "BudgetBelowFloor")
    assert "one observation alone takes 48 ms, p99, measured" in said["message"]
    (pool,) = api.objects["PolicyDeployment", *KEY]["status"]["pools"]
    assert pool["tSync"] == [{"batch": 1, "medianMs": 48.0, "p99Ms": 48.0}]
    # Known, it is left alone, and looked at again every ten minutes.
    asked = gateways.asked
    assert not await turn(demand.UNKNOWN_S)
    assert gateways.asked == asked
    assert not await turn(demand.TIMES_S)
    assert gateways.asked == asked + 1
    # Other times are told as soon as they are seen.
    gateways.p99_ms = 5.0
    assert await turn(demand.TIMES_S)
    assert caution(api)["status"] == "False"
    # Workers of another revision are asked about at once.
    asked = gateways.asked
    body = api.objects["PolicyDeployment", *KEY]
    body["status"]["currentRevision"] = "before"
    await controller.handle(KEY)
    assert not await turn(5.0)
    assert gateways.asked == asked + 1


def test_what_is_refused_or_serves_nobody_is_not_asked_about() -> None:
    def live(accepted: str, **pool: Any) -> Json:
        conditions = [{"type": "Accepted", "status": accepted}]
        return {"status": {"conditions": conditions, "pools": [{"name": "cpu", **pool}]}}

    times = [{"batch": 1, "medianMs": 5.0, "p99Ms": 6.0}]
    statuses = {
        ("a", "new"): live("True", ready=1),
        ("a", "known"): live("True", ready=1, tSync=times),
        ("a", "refused"): live("False", ready=1),
        ("a", "starting"): live("True", ready=0),
        ("a", "fresh"): {"status": None},
    }
    assert demand.unmeasured(statuses) == [(("a", "new"), "cpu")]
