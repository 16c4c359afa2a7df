"""The watch: kopf is told to touch nothing, and a stream that died is noticed."""

from __future__ import annotations

from typing import Any

import kopf
import pytest
from kubernetes import client
from taktline_operator import watching
from taktline_operator.reconcile import ROUTES, Controller

Json = dict[str, Any]


KEY = ("line-1", "reach")


def live(version: str, name: str = "reach") -> Json:
    return {"metadata": {"namespace": "line-1", "name": name, "resourceVersion": version}}


def listed(*versions: str) -> list[tuple[Json, tuple[str, str]]]:
    """Pods p0, p1, ... of one policy, each at a version."""
    return [(live(version, f"p{number}"), KEY) for number, version in enumerate(versions)]


def test_a_version_that_two_lists_show_and_the_watch_never_brought_means_a_dead_watch() -> None:
    ledger = watching.WatchLedger()
    ledger.saw("Pod", live("1", "p0"), KEY)
    assert ledger.compare("Pod", listed("1")) == set()
    assert ledger.compare("Pod", listed("2")) == {KEY}, "reconciled although the watch said nothing"
    assert ledger.dead == "", "the watch may bring it any moment"
    assert ledger.compare("Pod", listed("2")) == {KEY}
    assert ledger.dead == "Pod"
    ledger.saw("Pod", live("2", "p0"), KEY)
    assert ledger.compare("Pod", listed("2")) == set()
    assert ledger.dead == ""


def test_a_deletion_that_the_watch_missed_is_found_once() -> None:
    ledger = watching.WatchLedger()
    ledger.saw("Pod", live("1", "p0"), KEY)
    assert ledger.compare("Pod", []) == {KEY}
    assert ledger.compare("Pod", []) == set()


def test_a_deletion_that_the_watch_brought_is_not_late() -> None:
    ledger = watching.WatchLedger()
    ledger.saw("Pod", live("1", "p0"), KEY)
    ledger.saw("Pod", live("2", "p0"), KEY, deleted=True)
    assert ledger.compare("Pod", []) == set()


def test_a_busy_object_whose_watch_is_just_behind_each_list_is_no_dead_watch() -> None:
    ledger = watching.WatchLedger()
    for version in range(1, 6):
        ledger.compare("Pod", listed(str(version)))
        assert ledger.dead == ""
        ledger.saw("Pod", live(str(version), "p0"), KEY)


def test_a_quiet_cluster_is_alive() -> None:
    ledger = watching.WatchLedger()
    ledger.saw("Pod", live("1", "p0"), KEY)
    for _ in range(3):
        assert ledger.compare("Pod", listed("1")) == set()
        assert ledger.dead == ""


class Listener:
    """Takes the place of the controller: remembers the keys it is told."""

    def __init__(self, namespaces: tuple[str, ...] = ()) -> None:
        self.queue = self
        self.keys: list[Any] = []
        self._namespaces = namespaces

    def add(self, key: Any) -> None:
        self.keys.append(key)

    def serves(self, namespace: str) -> bool:
        return not self._namespaces or namespace in self._namespaces


def handlers(listener: Any) -> kopf.OperatorRegistry:
    return watching.registry(listener, watching.WatchLedger(), client.Configuration())


def test_kopf_is_given_no_handler_that_writes_to_objects() -> None:
    """Finalizers and annotations come from change handlers, timers and daemons; there are none."""
    found = handlers(Listener())
    assert not found._changing.get_all_handlers()
    assert not found._spawning.get_all_handlers()
    assert len(found._watching.get_all_handlers()) == 7
    settings = watching.settings()
    assert settings.posting.enabled is False
    assert settings.watching.server_timeout is not None


def test_a_restart_does_not_hold_the_whole_cluster_in_memory() -> None:
    """All pods read in one piece, and each kept for seconds, were more than the chart's limit at 5,000 pods."""
    settings = watching.settings()
    assert settings.watching.chunk_size is not None
    assert settings.watching.chunk_size <= 500
    assert settings.queueing.idle_timeout < 1.0


@pytest.mark.parametrize(
    ("labels", "name", "expected"),
    [
        ({"taktline.dev/policy": "reach"}, "reach-cpu", [("line-1", "reach")]),
        ({}, "taktline-routes", [ROUTES]),
        ({}, "something", []),
    ],
)
async def test_a_childs_event_queues_its_owner(labels: Json, name: str, expected: list[Any]) -> None:
    listener = Listener()
    child = handlers(listener)._watching.get_all_handlers()[-1].fn
    await child(namespace="line-1", name=name, labels=labels)
    assert listener.keys == expected


async def test_events_of_other_namespaces_are_ignored() -> None:
    listener = Listener(("line-2",))
    found = handlers(listener)._watching.get_all_handlers()
    await found[-1].fn(namespace="line-1", name="x", labels={"taktline.dev/policy": "reach"})
    event = {"type": "ADDED", "object": live("1")}
    await found[0].fn(event=event, namespace="line-1", name="reach")
    await found[1].fn(event=event, namespace="line-1", labels={"taktline.dev/policy": "reach"})
    assert listener.keys == []


async def test_a_pods_event_queues_its_policy_and_is_remembered() -> None:
    listener, ledger = Listener(), watching.WatchLedger()
    found = watching.registry(listener, ledger, client.Configuration())._watching.get_all_handlers()
    event = {"type": "MODIFIED", "object": live("5", "p0")}
    await found[1].fn(event=event, namespace="line-1", labels={"taktline.dev/policy": "reach"})
    assert listener.keys == [KEY]
    assert ledger.compare("Pod", listed("5")) == set()


def test_the_listener_stands_in_for_what_the_controller_really_has() -> None:
    assert {"serves"} <= set(dir(Controller))
