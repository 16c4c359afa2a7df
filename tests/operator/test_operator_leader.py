"""Leader election: one leads, a silent one is replaced, clocks of other machines do not matter."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from taktline_operator import leader
from taktline_operator.kube import ApiError
from taktline_operator.leader import Election

Json = dict[str, Any]


class LeaseDouble:
    """Not Kubernetes: one Lease with optimistic concurrency, and a clock that the test moves."""

    def __init__(self) -> None:
        self.lease: Json | None = None
        self.version = 0
        self.now = 0.0
        self.down = False
        self.rival_writes = False

    def _answer(self) -> None:
        if self.down:
            raise ApiError(0, "ClientError", "no route")

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        self._answer()
        return copy.deepcopy(self.lease)

    async def create(self, body: Json) -> bool:
        self._answer()
        if self.lease is not None:
            return False
        self._store(body)
        return True

    async def replace(self, body: Json) -> Json:
        self._answer()
        if self.rival_writes or body["metadata"]["resourceVersion"] != str(self.version):
            raise ApiError(409, "Conflict", "modified")
        self._store(body)
        return body

    def _store(self, body: Json) -> None:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)

    def candidate(self, identity: str) -> Election:
        return Election(self, "taktline-system", "operator", identity, monotonic=lambda: self.now)


async def test_the_first_leads_and_the_second_waits() -> None:
    api = LeaseDouble()
    first, second = api.candidate("a"), api.candidate("b")
    assert await first.try_once()
    for _ in range(5):
        api.now += leader.RETRY_S
        assert await first.try_once()
        assert not await second.try_once()


async def test_a_silent_leader_is_replaced_only_after_its_lease() -> None:
    api = LeaseDouble()
    first, second = api.candidate("a"), api.candidate("b")
    await first.try_once()
    assert not await second.try_once()
    api.now += leader.LEASE_S
    assert not await second.try_once()
    api.now += 0.1
    assert await second.try_once()
    assert not await first.try_once()
    assert api.lease is not None
    assert api.lease["spec"]["leaseTransitions"] == 1


async def test_a_leader_whose_clock_is_years_off_is_not_robbed(monkeypatch: pytest.MonkeyPatch) -> None:
    api = LeaseDouble()
    first, second = api.candidate("a"), api.candidate("b")
    for year in range(2001, 2007):
        monkeypatch.setattr(leader, "micro_time", lambda year=year: f"{year}-01-01T00:00:00.000000Z")
        assert await first.try_once()
        assert not await second.try_once()
        api.now += leader.LEASE_S - 1


async def test_of_two_that_write_at_once_one_loses() -> None:
    api = LeaseDouble()
    first = api.candidate("a")
    await first.try_once()
    api.now += 100
    api.rival_writes = True
    assert not await api.candidate("b").try_once()


async def test_a_planned_stop_hands_over_at_once() -> None:
    api = LeaseDouble()
    first, second = api.candidate("a"), api.candidate("b")
    await first.acquire()
    await first.release()
    assert not first.leads
    assert await second.try_once()


async def test_release_never_takes_a_lease_that_another_holds() -> None:
    api = LeaseDouble()
    first, second = api.candidate("a"), api.candidate("b")
    await first.acquire()
    assert not await second.try_once()
    api.now += 100
    assert await second.try_once()
    await first.release()
    assert api.lease is not None
    assert api.lease["spec"]["holderIdentity"] == "b"


async def test_a_restart_of_the_same_process_name_renews_its_own_lease() -> None:
    api = LeaseDouble()
    await api.candidate("a").try_once()
    assert await api.candidate("a").try_once()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RETRY_S", 0.01)
    monkeypatch.setattr(leader, "RENEW_LIMIT_S", 0.2)


@pytest.mark.usefixtures("quick")
async def test_a_leader_that_cannot_renew_stops_before_its_lease_ends() -> None:
    api = LeaseDouble()
    found = Election(api, "taktline-system", "operator", "a")
    await found.acquire()
    keeping = asyncio.create_task(found.keep())
    await asyncio.sleep(0.05)
    assert found.leads
    api.down = True
    await asyncio.wait_for(keeping, timeout=30)
    assert not found.leads
    assert leader.RENEW_LIMIT_S < leader.LEASE_S


@pytest.mark.usefixtures("quick")
async def test_a_short_outage_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "RENEW_LIMIT_S", 60.0)
    api = LeaseDouble()
    found = Election(api, "taktline-system", "operator", "a")
    await found.acquire()
    keeping = asyncio.create_task(found.keep())
    api.down = True
    await asyncio.sleep(0.03)
    api.down = False
    await asyncio.sleep(0.05)
    assert found.leads
    keeping.cancel()


@pytest.mark.usefixtures("quick")
async def test_a_leader_that_was_robbed_notices() -> None:
    api = LeaseDouble()
    found = Election(api, "taktline-system", "operator", "a")
    await found.acquire()
    assert api.lease is not None
    api.lease["spec"]["holderIdentity"] = "b"
    await asyncio.wait_for(found.keep(), timeout=30)
    assert not found.leads


@pytest.mark.usefixtures("quick")
async def test_the_election_outlives_an_api_that_is_down_at_the_start() -> None:
    api = LeaseDouble()
    api.down = True
    found = Election(api, "taktline-system", "operator", "a")
    acquiring = asyncio.create_task(found.acquire())
    await asyncio.sleep(0.03)
    assert not acquiring.done()
    api.down = False
    await asyncio.wait_for(acquiring, timeout=30)
    assert found.leads
