"""Groups of pods on nodes that are too few for all of them, and no queue that admits them whole, step by step."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from taktline_operator import group_pods, groups, naming, stuck
from taktline_operator.plan import ref_of
from test_operator_groups import planner, sets_of

Json = dict[str, Any]
START = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
STEP_S, ENDS_S, LOADS_S, JOINS_S = 10, 30, 120, 900
"""Of the simulation: a step, how long a pod takes to end, how long a group that has all its nodes loads, and how long a
worker waits for its peers until it starts anew."""
INSUFFICIENT = "0/9 nodes are available: 9 Insufficient nvidia.com/gpu."


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Site:
    """Nodes of eight GPUs, the scheduler, the StatefulSet controller and the operator's plans for some policies.

    A group of a policy has two pods of eight ranks, so it needs two nodes. The scheduler takes pods one by one, in the
    order that leaves the most groups half placed.
    """

    def __init__(self, make: Any, nodes: int, pool: Json | None = None, **wanted: int) -> None:
        self.make, self.nodes, self.now, self.pool = make, nodes, 0.0, pool or {}
        self.stolen = False  # whether others take each node that becomes free
        self.policies = {name: self._policy(name, count, 1) for name, count in wanted.items()}
        self.images = dict.fromkeys(wanted, 1)
        self.sets: dict[str, dict[Any, Json]] = {name: {} for name in wanted}
        self.status: dict[str, Json] = {name: {} for name in wanted}
        self.pods: dict[str, Json] = {}
        self.made = 0
        self.seen: dict[str, tuple[str, float]] = {}  # what the operator saw last, and when it looks again anyway

    def _policy(self, name: str, count: int, image: int) -> Any:
        pool = {"gpusPerNode": 8, "minReplicas": count, "image": f"registry.example/worker:{image}"}
        found = planner(self.make, pool=pool | self.pool)
        return msgspec.structs.replace(found, name=name, uid=f"uid-{name}")

    def scale(self, name: str, count: int) -> None:
        self.policies[name] = self._policy(name, count, self.images[name])

    def roll(self, name: str, count: int) -> None:
        self.images[name] += 1
        self.scale(name, count)

    # ----- what there is

    def own(self, name: str) -> list[Json]:
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"][naming.LABEL_POLICY] == name]

    def serving(self, name: str, *, current: bool = False) -> int:
        units = [unit for unit in group_pods.units(self.own(name)).values() if group_pods.is_whole(unit)]
        image = f"registry.example/worker:{self.images[name]}"
        return sum(not current or unit[0]["spec"]["containers"][0]["image"] == image for unit in units)

    def said(self, name: str) -> str:
        return next(c["message"] for c in self.status[name]["conditions"] if c["type"] == "Progressing")

    # ----- what happens

    def lose(self, pod: Json) -> None:
        """The node of a pod is gone for good, and the pod with it."""
        del self.pods[pod["metadata"]["name"]]
        self.nodes -= 1

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / STEP_S)):
            self.step()

    def step(self) -> None:
        self.now += STEP_S
        self._pods_end()
        self._stateful_set_controller()
        self._scheduler()
        self._workers()
        for name in self.policies:
            self._operator(name)

    def _operator(self, name: str) -> None:
        """It looks when something has changed, and when it said that it would."""
        sight = repr((self.own(name), self.sets[name], self.policies[name]))
        before, due = self.seen.get(name, ("", 0.0))
        if sight == before and self.now < due:
            return
        live = self.make.body(name=name, uid=f"uid-{name}") | {"status": self.status[name]}
        seen = self.make.Observed(live=live, now=at(self.now), children=self.sets[name], pods=self.own(name))
        plan = self.make.plan(self.policies[name], seen, self.make.settings)
        self.status[name] = plan.status
        self.seen[name] = sight, self.now + (plan.again_s if plan.again_s is not None else 600.0)
        for found in plan.writes:
            before = self.sets[name].get(ref_of(found))
            self.made += found["kind"] == "StatefulSet" and before is None
            created = before["metadata"]["creationTimestamp"] if before else at(self.now)
            self.sets[name][ref_of(found)] = copy.deepcopy(found)
            self.sets[name][ref_of(found)]["metadata"]["creationTimestamp"] = created
        for ref in plan.deletions:
            del self.sets[name][ref]
        for removal in plan.removals:
            self._delete(removal.pod)
        kept = {ref.name for ref in self.sets[name]}
        for pod in self.own(name):
            if pod["metadata"]["labels"][naming.LABEL_GROUP] not in kept:
                self._delete(pod["metadata"]["name"])

    def _delete(self, name: str) -> None:
        pod = self.pods[name]
        if "nodeName" not in pod["spec"]:
            del self.pods[name]
        elif "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = at(self.now + ENDS_S)
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False", "lastTransitionTime": at(self.now)}]

    def _pods_end(self) -> None:
        for name, pod in list(self.pods.items()):
            if pod["metadata"].get("deletionTimestamp", at(self.now)) < at(self.now):
                del self.pods[name]

    def _stateful_set_controller(self) -> None:
        for found in (child for sets in self.sets.values() for child in sets_of(sets.values())):
            name, template = found["metadata"]["name"], found["spec"]["template"]
            for index in range(found["spec"]["replicas"]):
                if f"{name}-{index}" in self.pods:
                    continue
                pod = copy.deepcopy(template) | {"apiVersion": "v1", "kind": "Pod", "status": {"phase": "Pending"}}
                pod["metadata"] |= {"name": f"{name}-{index}", "namespace": "line-1", "creationTimestamp": at(self.now)}
                pod["metadata"]["labels"] |= {groups.INDEX_LABEL: str(index)}
                self.pods[f"{name}-{index}"] = pod

    def _scheduler(self) -> None:
        waiting = [pod for pod in self.pods.values() if "nodeName" not in pod["spec"]]
        order = sorted(waiting, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"][-1]))
        free = 0 if self.stolen else self.nodes - (len(self.pods) - len(waiting))
        for pod in order:
            since = pod["status"].get("conditions", [{}])[0].get("lastTransitionTime", at(self.now))
            told = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": INSUFFICIENT,
                "lastTransitionTime": since,
            }
            pod["status"]["conditions"] = [told]
            if free > 0:
                free -= 1
                pod["spec"]["nodeName"] = "some"
                self._starts(pod)

    def _starts(self, pod: Json) -> None:
        pod["status"] = {
            "phase": "Running",
            "podIP": f"10.1.{sum(pod['metadata']['name'].encode()) % 250}.1",
            "startTime": at(self.now),
            "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": at(self.now)}],
            "containerStatuses": [{"name": "worker", "state": {"running": {"startedAt": at(self.now)}}}],
        }

    def _workers(self) -> None:
        for unit in group_pods.units(self.pods.values()).values():
            leaves = any("deletionTimestamp" in pod["metadata"] for pod in unit)
            placed = len(unit) == 2 and all("nodeName" in pod["spec"] for pod in unit)
            if not group_pods.is_whole(unit):
                self._start_anew(unit)
            if leaves or not placed or group_pods.is_whole(unit):
                continue
            if max(pod["status"]["startTime"] for pod in unit) <= at(self.now - LOADS_S):
                for pod in unit:
                    ready = {"type": "Ready", "status": "True", "lastTransitionTime": at(self.now)}
                    pod["status"]["conditions"] = [ready]
                    pod["status"]["containerStatuses"][0] |= {"started": True, "ready": True}

    def _start_anew(self, unit: list[Json]) -> None:
        """Workers that have lost a peer start again at once, and those that nobody joins after a while."""
        for pod in unit:
            for container in pod["status"].get("containerStatuses", []):
                since = container["state"]["running"]["startedAt"]
                if container.pop("ready", False) or since <= at(self.now - JOINS_S):
                    container.pop("started", None)
                    container["state"] = {"running": {"startedAt": at(self.now)}}
                    told = {"type": "Ready", "status": "False", "lastTransitionTime": at(self.now)}
                    pod["status"]["conditions"] = [told]


@pytest.mark.parametrize(("wanted", "nodes"), [(2, 3), (3, 4), (3, 5), (4, 4), (4, 7), (5, 4)])
def test_as_many_groups_serve_as_there_are_nodes_for(make: Any, wanted: int, nodes: int) -> None:
    site = Site(make, nodes, reach=wanted)
    site.run(900)
    assert site.serving("reach") == nodes // 2
    assert site.made <= 3 * wanted, "none is made again and again"


@pytest.mark.parametrize(("wanted", "nodes"), [(2, 4), (2, 5), (3, 4), (3, 5), (4, 4), (4, 7), (5, 6)])
def test_a_rollout_ends_where_nodes_are_there_for_fewer_groups_than_are_wanted(
    make: Any, wanted: int, nodes: int
) -> None:
    site = Site(make, nodes, reach=wanted)
    site.run(900)
    served = site.serving("reach")
    assert served == nodes // 2
    site.roll("reach", wanted)
    made = site.made
    for _ in range(400):
        site.step()
        assert site.serving("reach") >= served - 1
    assert site.serving("reach", current=True) == served, site.said("reach")
    assert site.made - made <= 3 * wanted


def test_a_rollout_that_asks_for_more_groups_than_there_are_nodes_for_ends(make: Any) -> None:
    site = Site(make, 4, reach=2)
    site.run(600)
    site.roll("reach", 4)
    for _ in range(400):
        site.step()
        assert site.serving("reach") >= 1
    assert site.serving("reach", current=True) == 2, site.said("reach")


@pytest.mark.parametrize("nodes", [4, 5, 6])
def test_one_group_at_most_leaves_where_others_take_its_nodes(make: Any, nodes: int) -> None:
    site = Site(make, nodes, reach=3)
    site.run(900)
    served = site.serving("reach")
    site.stolen = True
    site.roll("reach", 3)
    for _ in range(400):
        site.step()
        assert site.serving("reach") >= served - 1
    assert "free some" in site.said("reach")


def test_the_last_group_stays_where_there_are_no_nodes_for_a_second(make: Any) -> None:
    site = Site(make, 3, reach=2)
    site.run(900)
    site.roll("reach", 2)
    for _ in range(400):
        site.step()
        assert site.serving("reach") == 1
    assert "no room for a second worker beside the one that serves" in site.said("reach")


def test_groups_of_two_policies_that_hold_half_of_their_nodes_each_do_not_wait_for_ever(make: Any) -> None:
    site = Site(make, 2, reach=1, other=1)
    site.run(stuck.HALF_S)
    assert (site.serving("reach"), site.serving("other")) == (0, 0)
    site.run(1200)
    assert sorted([site.serving("reach"), site.serving("other")]) == [0, 1]


def test_a_group_that_is_half_placed_is_let_go_ever_more_seldom(make: Any) -> None:
    site = Site(make, 1, reach=1)
    started = set()
    for _ in range(1000):
        site.step()
        started |= {pod["status"]["startTime"] for pod in site.pods.values() if "startTime" in pod["status"]}
    first, second, *more = sorted(started)
    span = datetime.fromisoformat(second) - datetime.fromisoformat(first)
    assert stuck.HALF_S <= span.total_seconds() <= 1.5 * stuck.HALF_S + 2 * ENDS_S
    assert 2 <= len(more) <= 4, "of ten thousand seconds"


def nobody_is_let_go(site: Site, seconds: float) -> None:
    for _ in range(int(seconds / STEP_S)):
        site.step()
        assert not any("deletionTimestamp" in pod["metadata"] for pod in site.pods.values())


@pytest.mark.parametrize("startup_s", [120, 300, None])
@pytest.mark.parametrize("age_s", [0, 3600, 86400])
def test_groups_that_lose_half_of_their_nodes_do_not_wait_for_ever(
    make: Any, age_s: float, startup_s: int | None
) -> None:
    """However long they have served, and however often their workers start anew meanwhile."""
    site = Site(make, 4, {"startupSeconds": startup_s} if startup_s else None, reach=1, other=1)
    site.run(600)
    assert (site.serving("reach"), site.serving("other")) == (1, 1)
    site.now += age_s
    for name in ("reach", "other"):
        site.lose(site.own(name)[1])
    nobody_is_let_go(site, stuck.HALF_S - STEP_S)
    site.run(stuck.HALF_S / 2 + 300)
    assert sorted([site.serving("reach"), site.serving("other")]) == [0, 1]


def test_a_group_that_has_loaded_for_long_keeps_its_time_where_it_is_half_placed_only_now(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "LOADS_S", 1200)
    monkeypatch.setitem(globals(), "JOINS_S", 3600)
    site = Site(make, 2, reach=1)
    nobody_is_let_go(site, 1000)  # all have their nodes
    site.lose(site.own("reach")[1])
    nobody_is_let_go(site, stuck.HALF_S - STEP_S)
    assert sorted(pod["spec"].get("nodeName", "") for pod in site.own("reach")) == ["", "some"]


def test_a_group_in_halves_is_known_by_any_reason_for_which_a_pod_finds_no_node(make: Any) -> None:
    site = Site(make, 2, reach=1)
    site.run(600)
    site.lose(site.own("reach")[1])
    site.step()
    now = at(site.now + 2 * stuck.HALF_S)
    (placed,) = [pod for pod in site.own("reach") if "nodeName" in pod["spec"]]
    (short,) = [pod for pod in site.own("reach") if "nodeName" not in pod["spec"]]

    def removed() -> set[str]:
        found = stuck.look([placed, short], site.policies["reach"].spec.pools, {}, {}, now, ())
        return {removal.pod for removal in found.removals}

    both = {placed["metadata"]["name"], short["metadata"]["name"]}
    short["status"]["conditions"][0]["message"] = "0/9 nodes are available: 9 node(s) had untolerated taint."
    assert removed() == both
    placed["status"]["containerStatuses"] = [{"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    assert removed() == both, "its node holds a place, whatever its container does"
    short["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    assert removed() == set(), "a queue admits it as a whole"
    del short["spec"]["schedulingGates"]
    placed["metadata"]["deletionTimestamp"] = now
    assert removed() == set(), "nothing is held any longer"


def test_how_often_a_group_was_let_go_is_kept_until_it_serves(make: Any) -> None:
    site = Site(make, 1, reach=1)
    site.run(2000)
    ((kept,),) = [pool["halfPlaced"] for pool in site.status["reach"]["pools"]]
    assert kept["count"] == 2
    assert stuck.half_s(kept["group"], 1) == 2 * stuck.half_s(kept["group"], 0)
    assert stuck.half_s(kept["group"], 50) <= stuck.LONGEST_S
    site.nodes = 2
    site.run(600)
    assert site.serving("reach") == 1
    assert all("halfPlaced" not in pool for pool in site.status["reach"]["pools"])


def served_of(site: Site) -> set[str | None]:
    return {
        found["metadata"]["annotations"].get(naming.ANNOTATION_SERVED) for found in sets_of(site.sets["reach"].values())
    }


def test_further_edits_cost_no_further_group_where_none_finds_nodes(make: Any) -> None:
    site = Site(make, 8, reach=4)
    site.run(900)
    site.stolen = True
    for _ in range(3):
        site.roll("reach", 4)
        site.run(1200)
        assert site.serving("reach") == 3


def test_what_served_is_told_for_as_long_as_a_rollout_lasts(make: Any) -> None:
    site = Site(make, 8, reach=4)
    site.run(900)
    assert served_of(site) == {None}
    site.roll("reach", 4)
    site.run(60)
    assert "4" in served_of(site)
    site.run(2500)
    assert site.serving("reach", current=True) == 4
    assert served_of(site) == {None}
    for unit in list(group_pods.units(site.own("reach")).values())[:2]:
        for pod in unit:
            site.lose(pod)
    site.run(900)
    site.roll("reach", 4)
    while site.serving("reach", current=True) != 1:
        site.step()
    site.images["reach"] = 2
    site.scale("reach", 4)  # taken back half-way
    site.run(3600)
    assert site.serving("reach", current=True) == 2, "of two groups that there are nodes for"


def test_a_rollout_that_an_earlier_operator_began_costs_no_further_group(make: Any) -> None:
    site = Site(make, 6, reach=3)
    site.run(900)
    site.stolen = True
    site.roll("reach", 3)
    site.run(1200)
    assert site.serving("reach") == 2
    for found in sets_of(site.sets["reach"].values()):
        found["metadata"]["annotations"].pop(naming.ANNOTATION_SERVED, None)
    site.run(1200)
    assert site.serving("reach") == 2


def test_a_number_that_nobody_can_have_counted_is_not_believed(make: Any) -> None:
    site = Site(make, 4, reach=3)
    site.run(900)
    site.roll("reach", 3)
    site.run(20)
    for found in sets_of(site.sets["reach"].values()):
        if naming.ANNOTATION_SERVED in found["metadata"]["annotations"]:
            found["metadata"]["annotations"][naming.ANNOTATION_SERVED] = "9"
    site.run(30)
    assert served_of(site) <= {None, "2", "3"}


def test_a_rollout_that_waits_for_a_node_that_was_lost_says_so_and_goes_on_with_fewer_replicas(make: Any) -> None:
    site = Site(make, 6, reach=3)
    site.run(900)
    site.roll("reach", 3)
    site.run(60)
    old = [unit for unit in group_pods.units(site.own("reach")).values() if group_pods.is_whole(unit)]
    site.lose(old[0][0])
    site.run(3600)
    assert (site.serving("reach", current=True), site.serving("reach")) == (1, 2)
    said = "the rollout waits, as 2 workers serve and 3 did when it began: with `replicas` of 2 it would go on"
    assert said in site.said("reach")
    site.scale("reach", 2)
    for _ in range(180):
        site.step()
        assert site.serving("reach") >= 1
    assert site.serving("reach", current=True) == 2, site.said("reach")


def test_a_first_pod_that_is_shown_as_on_no_node_names_the_one_that_is(make: Any) -> None:
    site = Site(make, 1, reach=1)
    site.run(60)
    (leader,) = group_pods.leaders(site.own("reach"))
    (short,) = [pod for pod in site.own("reach") if "nodeName" not in pod["spec"]]
    (told,) = [found for found in leader["status"]["conditions"] if found["type"] == "PodScheduled"]
    assert told["message"] == f"{short['metadata']['name']}: {INSUFFICIENT}"
    assert short["status"]["conditions"][0]["message"] == INSUFFICIENT
