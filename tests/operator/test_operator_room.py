"""Rollouts where room is short: they end, take as few workers away as can be, and none where that would be no help."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from taktline_operator import gangs, kueue, naming, surge
from taktline_operator.status import PoolCount

Json = dict[str, Any]
START = datetime(2026, 3, 1, 8, 0, tzinfo=UTC)
STEP_S, DRAIN_S, FINDS_S, LOADS_S = 5, 60, 10, 120
"""Of the simulation: a step, how long a worker takes to leave, a free place to be found, and a new worker to load."""


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(state: str, template: str, created: float = 0.0, *, queue: str = "robots", gpus: int = 1) -> Json:
    """A worker as the API shows it: it waits in its queue, starts, serves or leaves."""
    metadata: Json = {
        "name": f"{template}-{created}-{state}",
        "creationTimestamp": at(created),
        "labels": {naming.LABEL_POOL: "line", kueue.QUEUE_LABEL: queue},
        "annotations": {naming.ANNOTATION_TEMPLATE: template},
    }
    if state == "leaves":
        metadata["deletionTimestamp"] = at(created)  # the end of its grace period
    spec: Json = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
    status: Json = {"phase": "Running", "podIP": "10.0.0.1", "conditions": []}
    if state == "waits":
        spec["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
        status = {"phase": "Pending"}
    elif state == "serves":
        status["conditions"] = [{"type": "Ready", "status": "True"}]
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


class Worker:
    """One worker of the simulation."""

    def __init__(self, template: str, state: str, since: float) -> None:
        self.template, self.state, self.since, self.created = template, state, since, since


class Rollout:
    """A Deployment, its controller and a queue, from the moment at which another template is asked for."""

    def __init__(self, wanted: int, quota: int) -> None:
        self.wanted, self.quota, self.now = wanted, quota, 0.0
        self.old = [Worker("a", "serves" if n < quota else "waits", -900.0) for n in range(wanted)]
        self.new: list[Worker] = []
        self.update, self.progressed = surge.SURGE, 0.0
        self.fewest = self.serving()
        self.freed = -900.0

    def all(self) -> list[Worker]:
        return [*self.old, *self.new]

    def serving(self) -> int:
        return sum(worker.state == "serves" for worker in self.all())

    def done(self) -> bool:
        return not self.old and self.serving() == min(self.wanted, self.quota)

    def count(self) -> PoolCount:
        pods = [self.pod(worker) for worker in self.all()]
        return PoolCount("line", "h100", self.wanted, "b", pods)

    def pod(self, worker: Worker) -> Json:
        since = worker.since + DRAIN_S if worker.state == "leaves" else worker.created
        return pod(worker.state, worker.template, since)

    def step(self) -> None:
        self.now += STEP_S
        self._kubelet_and_queue()
        count = self.count()
        told = {"type": "Progressing", "lastUpdateTime": at(self.progressed)}
        spec = {"replicas": self.wanted, "strategy": {"rollingUpdate": self.update}}
        live = {"spec": spec, "status": {"conditions": [told]}}
        self.update = surge.strategy(count, live, at(self.now))
        self._deployment_controller()
        self.fewest = min(self.fewest, self.serving())

    def _kubelet_and_queue(self) -> None:
        for worker in self.all():
            if worker.state == "starts" and self.now - worker.since >= LOADS_S:
                worker.state, worker.since, self.progressed = "serves", self.now, self.now
        for workers in (self.old, self.new):
            for worker in [one for one in workers if one.state == "leaves" and self.now - one.since >= DRAIN_S]:
                workers.remove(worker)
                self.freed = self.now
        held = sum(worker.state != "waits" for worker in self.all())
        waiting = [worker for worker in self.new if worker.state == "waits"]
        if waiting and held < self.quota and self.now - self.freed >= FINDS_S:
            waiting[0].state, waiting[0].since, self.freed = "starts", self.now, self.now

    def _deployment_controller(self) -> None:
        """Its rolling update: new ones up to the surge, then old ones that do not serve, then those that do."""
        here = [worker for worker in self.all() if worker.state != "leaves"]
        while len(here) < self.wanted + self.update["maxSurge"] and len(self.new) < self.wanted:
            self.new.append(Worker("b", "waits", self.now))
            here.append(self.new[-1])
            self.progressed = self.now
        least = self.wanted - self.update["maxUnavailable"]
        waiting = sum(worker.state != "serves" for worker in self.new)
        may = len(here) - least - waiting
        for worker in [one for one in self.old if one.state in ("waits", "starts")]:
            if may > 0:
                self.old.remove(worker)
                may, self.progressed = may - 1, self.now
        for worker in [one for one in self.old if one.state == "serves"]:
            if self.serving() > least:
                worker.state, worker.since, self.progressed = "leaves", self.now, self.now


@pytest.mark.parametrize(
    ("wanted", "quota"), [(wanted, quota) for wanted in range(2, 6) for quota in range(2, wanted + 2)]
)
def test_a_rollout_ends_where_the_quota_admits_fewer_than_are_wanted(wanted: int, quota: int) -> None:
    """The Deployment controller takes no worker that serves while fewer than wanted do: only the operator can tell."""
    run = Rollout(wanted, quota)
    served = run.serving()
    for _ in range(2000):
        run.step()
        if run.done():
            break
    assert run.done(), f"{[(w.template, w.state) for w in run.all()]} {run.update}"
    assert run.fewest >= (served if quota > wanted else served - 1), "one at a time, and none where there is room"


def test_the_last_worker_stays_where_the_quota_admits_no_second() -> None:
    run = Rollout(3, 1)
    for _ in range(500):
        run.step()
        assert run.serving() == 1
    assert "no room for a second worker" in surge.note([run.count()], [run.update], at(run.now), ["Deployment"])


class Stolen(Rollout):
    """Older pods of other policies wait in the same queue and take each place that becomes free."""

    def _kubelet_and_queue(self) -> None:
        quota, self.quota = self.quota, 0
        super()._kubelet_and_queue()
        self.quota = quota


class NeverFits(Stolen):
    """Another revision asks for more than any node has, and no queue: the scheduler says so."""

    def pod(self, worker: Worker) -> Json:
        found = super().pod(worker)
        return starved(found, gpus=8) if worker.template == "b" and worker.state == "waits" else found


def starved(found: Json, gpus: int = 1) -> Json:
    found["spec"] = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
    words = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are available."
    since = found["metadata"]["creationTimestamp"]
    told = {"type": "PodScheduled", "status": "False", "message": words, "lastTransitionTime": since}
    found["status"] = {"phase": "Pending", "conditions": [told]}
    return found


@pytest.mark.parametrize("wanted", [2, 3, 4, 8])
def test_one_worker_at_most_leaves_where_its_room_goes_to_others(wanted: int) -> None:
    run = Stolen(wanted, wanted)
    for _ in range(400):
        run.step()
    assert run.serving() == wanted - 1
    said = surge.note([run.count()], [run.update], at(run.now), ["Deployment"])
    beside = "a second worker beside the one that serves" if wanted == 2 else "another worker"
    assert said == f"; pool line has no room for {beside}: free some"


@pytest.mark.parametrize("wanted", [2, 3, 8])
def test_no_worker_leaves_for_one_that_fits_no_node(wanted: int) -> None:
    run = NeverFits(wanted, wanted)
    for _ in range(400):
        run.step()
        assert run.serving() == wanted
    said = surge.note([run.count()], [run.update], at(run.now), ["Deployment"])
    assert "they ask for more than those would leave" in said


def test_only_what_is_short_is_compared() -> None:
    """More memory of nodes that have enough of it is no reason to stay."""
    new = starved(pod("waits", "b"))
    new["spec"]["containers"][0]["resources"]["limits"]["memory"] = "64Gi"
    assert surge.strategy(count_of(new), None, at(3600)) == surge.YIELD


def test_an_old_worker_that_does_not_serve_makes_room_too() -> None:
    pods = [pod("fails", "a", n) for n in range(2)]
    count = PoolCount("line", "h100", 2, "b", [*pods, starved(pod("waits", "b"))])
    assert surge.strategy(count, None, at(3600)) == surge.YIELD


@pytest.mark.parametrize(("hours", "strategy"), [(10, surge.YIELD), (0, surge.SURGE)], ids=["stuck", "leaves"])
def test_a_pod_that_never_ends_holds_no_rollout_up(hours: int, strategy: Json) -> None:
    """Its node is dead: it stays Terminating for good, and no room comes of it."""
    now = 36000
    pods = [pod("serves", "a", n) for n in range(3)]
    pods += [pod("leaves", "a", now - 3600 * hours), starved(pod("waits", "b"))]
    count = PoolCount("line", "h100", 3, "b", pods)
    assert surge.strategy(count, None, at(now)) == strategy


def test_quota_that_comes_in_the_middle_of_a_rollout_is_not_given_away() -> None:
    """Two of four serve; with quota for all, as many as serve by then go on to serve but for one."""
    run = Rollout(4, 2)
    while not any(worker.template == "b" and worker.state == "serves" for worker in run.all()):
        run.step()
    run.quota, best = 4, 0
    for _ in range(500):
        run.step()
        best = max(best, run.serving())
        assert run.serving() >= best - 1
    assert run.done()


class Groups:
    """Groups of a line with a queue, from the moment at which another template is asked for."""

    def __init__(self, wanted: int, quota: int, *, stolen: bool = False, by_nodes: bool = False) -> None:
        self.wanted, self.quota, self.now, self.served = wanted, quota, 0.0, 0
        self.stolen, self.by_nodes = stolen, by_nodes  # whether others take what becomes free; no queue has a say
        self.old = {f"old-{n}": Worker("a", "serves", -900.0) for n in range(min(wanted, quota))}
        self.leaving: list[float] = []
        self.new: dict[int, Worker] = {}
        self.freed = -900.0

    def serving(self) -> int:
        return len(self.old) + sum(worker.state == "serves" for worker in self.new.values())

    def done(self) -> bool:
        return not self.old and not self.leaving and self.serving() == min(self.wanted, self.quota)

    def step(self) -> None:
        self.now += STEP_S
        gone = [since for since in self.leaving if self.now - since >= DRAIN_S]
        self.leaving = [since for since in self.leaving if since not in gone]
        self.freed = self.now if gone else self.freed
        for worker in self.new.values():
            if worker.state == "starts" and self.now - worker.since >= LOADS_S:
                worker.state = "serves"
        waiting = [worker for worker in self.new.values() if worker.state == "waits"]
        held = len(self.old) + len(self.leaving) + len(self.new) - len(waiting)
        if waiting and held < self.quota and self.now - self.freed >= FINDS_S and not self.stolen:
            waiting[0].state, waiting[0].since, self.freed = "starts", self.now, self.now
            waiting = waiting[1:]
        long = [self.now - worker.created for worker in waiting if self.now - worker.created >= surge.HELD_S]
        chosen = gangs.roll(
            self.wanted,
            {number: worker.state == "serves" for number, worker in self.new.items()},
            dict.fromkeys(self.old, True),
            held=bool(long),
            coming=bool(self.leaving) or any(worker.state == "starts" for worker in self.new.values()),
            starved=bool(waiting) and self.by_nodes,
            waited_s=min(long, default=0.0),
            served=self.served,
            placed=[number for number, worker in self.new.items() if worker.state == "starts"],
        )
        self.served = max(self.served, self.serving())
        self.leaving += [self.now for name in self.old if name not in chosen.kept]
        self.old = {name: worker for name, worker in self.old.items() if name in chosen.kept}
        self.new = {number: self.new.get(number) or Worker("b", "waits", self.now) for number in chosen.numbers}


@pytest.mark.parametrize("by_nodes", [False, True], ids=["a queue", "nodes"])
@pytest.mark.parametrize(
    ("wanted", "quota"), [(wanted, quota) for wanted in range(2, 6) for quota in range(2, wanted + 2)]
)
def test_groups_are_rolled_where_there_is_room_for_fewer_than_are_wanted(
    wanted: int, quota: int, by_nodes: bool
) -> None:
    run = Groups(wanted, quota, by_nodes=by_nodes)
    served = fewest = run.serving()
    for _ in range(2000):
        run.step()
        fewest = min(fewest, run.serving())
        if run.done():
            break
    assert run.done(), f"{run.old.keys()} {[(n, w.state) for n, w in run.new.items()]}"
    assert fewest >= (served if quota > wanted else served - 1)


@pytest.mark.parametrize("by_nodes", [False, True], ids=["a queue", "nodes"])
@pytest.mark.parametrize("wanted", [2, 3, 5, 8])
def test_one_group_at_most_leaves_where_its_room_goes_to_others(wanted: int, by_nodes: bool) -> None:
    run = Groups(wanted, wanted, stolen=True, by_nodes=by_nodes)
    for _ in range(800):
        run.step()
    assert run.serving() == wanted - 1


def test_the_last_group_stays_where_the_quota_admits_no_second() -> None:
    run = Groups(3, 1)
    for _ in range(500):
        run.step()
        assert run.serving() == 1


def count_of(new: Json, *, old: int = 2) -> PoolCount:
    return PoolCount("line", "h100", old, "b", [*(pod("serves", "a", n) for n in range(old)), new])


@pytest.mark.parametrize(
    "new",
    [pod("waits", "b", queue="night"), pod("waits", "b", gpus=2)],
    ids=["another queue", "a larger request"],
)
def test_no_worker_leaves_for_one_that_its_room_would_not_let_in(new: Json) -> None:
    count = count_of(new)
    chosen = surge.strategy(count, None, at(3600))
    assert chosen == surge.SURGE
    assert "the old ones stay" in surge.note([count], [chosen], at(3600), ["Deployment"])
    assert surge.strategy(count_of(pod("waits", "b")), None, at(3600)) == surge.YIELD


def test_no_worker_leaves_for_one_whose_queue_admits_nobody() -> None:
    count = count_of(pod("waits", "b"))
    chosen = surge.strategy(count, None, at(3600), admits=False)
    assert chosen == surge.SURGE
    assert surge.note([count], [chosen], at(3600), ["Deployment"], admits=False) == "", "the condition Queued says it"


def test_a_group_that_asks_for_more_pods_asks_for_more() -> None:
    small, large = pod("serves", "a"), pod("waits", "b")
    for one, size in ((small, 2), (large, 4)):
        one["metadata"]["annotations"][naming.ANNOTATION_GROUP_SIZE] = str(size)
    assert surge.pressing([[large]], [[small]], at(3600)) == []
    large["metadata"]["annotations"][naming.ANNOTATION_GROUP_SIZE] = "2"
    assert surge.pressing([[large]], [[small]], at(3600)) == [[large]]


def test_a_ray_pool_is_not_told_that_an_old_worker_leaves() -> None:
    """KubeRay brings up a whole cluster beside the one that serves, which never makes room."""
    count = count_of(pod("waits", "b"))
    said = surge.note([count], [surge.strategy(count, None, at(3600))], at(3600), ["RayService"])
    assert said == "; pool line has no room for another Ray cluster beside the one that serves: free some"


def test_it_is_looked_at_again_when_the_next_may_leave() -> None:
    waits = pod("waits", "b")
    for seconds, rolling in itertools.product((0, 5, 19), (True, False)):
        assert surge.look_again_s([waits], at(seconds), rolling=rolling) == surge.HELD_S - seconds
    assert surge.look_again_s([waits], at(surge.HELD_S), rolling=True) == surge.ROOM_S
    assert surge.look_again_s([waits], at(surge.HELD_S + 3 * surge.ROOM_S + 10), rolling=True) == surge.ROOM_S - 10
    assert surge.look_again_s([waits], at(3600), rolling=False) is None, "nothing depends on it"
    assert surge.look_again_s([pod("serves", "a")], at(3600), rolling=True) is None
