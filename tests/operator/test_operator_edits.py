"""Edits that come by the hundred: they are worked off together, and what was written last is what is in the end."""

from __future__ import annotations

import asyncio
from typing import Any

from taktline_operator.reconcile import ROUTES, Controller
from taktline_operator.service import WORKERS, Service
from taktline_operator.telemetry import Telemetry
from taktline_operator.watching import WatchLedger

Json = dict[str, Any]
POLICIES, ROUNDS = 20, 15


class Counting(Controller):
    """Counts reconciliations, and those of one policy at a time."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.turns = 0
        self.active: set[Any] = set()

    async def handle(self, key: Any) -> None:
        assert key not in self.active, "two workers at one policy"
        self.turns += key != ROUTES
        self.active.add(key)
        try:
            await asyncio.sleep(0)  # others get their turn in between
            await super().handle(key)
        finally:
            self.active.discard(key)


def engine_of(live: Json, api: Any) -> str:
    """The engine.json that the Deployment of a policy mounts."""
    place = live["metadata"]["namespace"], f"{live['metadata']['name']}-cpu"
    volumes = api.objects["Deployment", *place]["spec"]["template"]["spec"]["volumes"]
    (name,) = [volume["configMap"]["name"] for volume in volumes if volume["name"] == "engine"]
    found: str = api.objects["ConfigMap", place[0], name]["data"]["engine.json"]
    return found


def is_seen(live: Json) -> bool:
    """Whether the status speaks of the last edit."""
    return bool(live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"])


async def test_a_storm_of_edits_ends_in_the_last_ones_with_few_turns(make: Any) -> None:
    bodies = [make.body(name=f"p{number}", uid=f"uid-{number}") for number in range(POLICIES)]
    api = make.Api(*bodies)
    controller = Counting(api, make.settings, clock=lambda: make.now)
    service = Service(api, controller, WatchLedger(), Telemetry())
    await controller.resync(everything=True)
    workers = [asyncio.create_task(service.work()) for _ in range(WORKERS)]
    policies = [live for live in api.objects.values() if live["kind"] == "PolicyDeployment"]
    try:
        for live in policies:
            for edit in range(ROUNDS):
                live["spec"]["engine"] = {"controlPeriodMs": 20 + edit}
                live["metadata"]["generation"] += 1
                controller.queue.add((live["metadata"]["namespace"], live["metadata"]["name"]))
            await asyncio.sleep(0)
        async with asyncio.timeout(120):
            while not all(map(is_seen, policies)) or controller.queue.depth or controller.active:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    last = f'"control_period_ms": {20 + ROUNDS - 1}'
    assert all(last in engine_of(live, api) for live in policies)
    assert controller.turns <= 4 * POLICIES, f"{POLICIES * ROUNDS} edits were worked off together"
    # And it is over: another look at each writes nothing.
    writes = len(api.writes)
    for live in policies:
        await controller.handle((live["metadata"]["namespace"], live["metadata"]["name"]))
    assert len(api.writes) == writes
