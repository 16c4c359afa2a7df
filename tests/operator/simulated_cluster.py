"""A simulated cluster for scenarios that last hours: Deployments get pods, pods become ready, gateways measure.

Not Kubernetes: it models just what the operator's decisions depend on. Time moves only by `run`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from taktline_operator import naming, routing
from taktline_operator.reconcile import ROUTES, Controller
from taktline_protocol.deployment import Candidate
from taktline_protocol.measurements import Outcomes, PolicyMeasurement, Shadow, Trial

Json = dict[str, Any]


class Killed(BaseException):
    """The operator's process ends here."""


class KillableApi:
    """The API as the operator calls it, which ends the process before, or just after, its n-th call."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self.calls = 0
        self.kill_at: int | None = None
        self.kill_every = 0  # again after so many calls; 0 ends it once
        self.after = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._api, name)

        async def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            fatal = self.calls == self.kill_at
            if fatal and self.kill_every:
                self.kill_at = self.calls + self.kill_every
            if fatal and not self.after:
                raise Killed
            result = await call(*arguments, **named)
            if fatal:
                raise Killed
            return result

        return counted


class Cluster:
    """One policy in one namespace."""

    def __init__(self, make: Any, body: Json) -> None:
        self.make = make
        self.now = datetime.fromisoformat("2026-03-01T08:00:00+00:00")
        body = copy.deepcopy(body)
        self.api = make.Api(body)
        self.door = KillableApi(self.api)
        self.key = (body["metadata"]["namespace"], body["metadata"]["name"])
        self.start_s = 20.0  # until a worker is ready
        self.fails: Callable[[Json], Json | None] = lambda pod: None
        self.trial: Callable[[Candidate, float], Trial] = good_trial
        self.gateways_answer = True
        self.restarts = 0
        self._ready_at: dict[str, datetime] = {}
        self._addresses = 0
        self._trial_began: dict[tuple[str, str], datetime] = {}
        self.routes_seen: list[Any] = []
        self.rescued_robots: list[str] = []
        self.boot()

    # ----- the operator

    def boot(self) -> None:
        """A fresh operator process."""
        self._listed = False
        self.controller = Controller(self.door, self.make.settings, (), self.clock, self)

    def clock(self) -> str:
        return self.now.strftime("%Y-%m-%dT%H:%M:%SZ")

    async def of_policy(self, policy: str) -> tuple[PolicyMeasurement, ...] | None:
        """What the gateways measure."""
        if not self.gateways_answer:
            return None
        route = self.route()
        trial = None
        if route is not None and route.candidate is not None:
            found = route.candidate
            began = self._trial_began.setdefault((found.id, found.step), self.now)
            trial = self.trial(found, (self.now - began).total_seconds())
        return (PolicyMeasurement(policy=policy, trial=trial),)

    async def all(self) -> tuple[Any, ...]:
        """No gateway counts demand here."""
        return ()

    async def reconcile(self, passes: int = 1) -> None:
        """As the queue does after an event; a killed process starts anew."""
        for _ in range(passes):
            try:
                if not self._listed:
                    await self.controller.resync(everything=True)
                    self._listed = True
                await self.controller.handle(self.key)
                await self.controller.handle(ROUTES)
            except Killed:
                self.restarts += 1
                self.boot()

    async def run(self, seconds: float, *, step_s: float = 10.0) -> None:
        """Let time pass."""
        for _ in range(int(seconds / step_s)):
            self.now += timedelta(seconds=step_s)
            self.kubelet()
            await self.reconcile(2)
            route = self.route()
            if route is not None and (not self.routes_seen or self.routes_seen[-1] != route):
                self.routes_seen.append(route)

    # ----- what a person does

    def edit(self, **parts: Any) -> None:
        """Change fields of the spec."""
        live = self.live
        live["spec"] |= parts
        live["metadata"]["generation"] += 1

    def say(self, word: str) -> None:
        """Annotate the PolicyDeployment."""
        self.live["metadata"].setdefault("annotations", {})[naming.ANNOTATION_ROLLOUT] = word

    # ----- what there is

    @property
    def live(self) -> Json:
        found: Json = self.api.objects["PolicyDeployment", *self.key]
        return found

    @property
    def rollout(self) -> Json:
        found: Json = self.live.get("status", {}).get("rollout", {})
        return found

    def condition(self, kind: str) -> tuple[str, str, str]:
        found = next(c for c in self.live["status"]["conditions"] if c["type"] == kind)
        return found["status"], found["reason"], found["message"]

    def route(self) -> Any:
        config = self.api.objects.get(("ConfigMap", self.make.settings.gateway_namespace, naming.ROUTES_NAME))
        return routing.read_table(config).get(self.key[1])

    def deployments(self) -> dict[str, int]:
        return {d["metadata"]["name"]: d["spec"]["replicas"] for d in self.api.of_kind("Deployment")}

    def events(self) -> list[str]:
        return [event["reason"] for event in self.api.of_kind("Event")]

    def pods(self) -> list[Json]:
        found: list[Json] = self.api.of_kind("Pod")
        return found

    # ----- what the cluster does by itself

    def kubelet(self) -> None:
        """Deployments get their pods, whole and at once; owners' deletion takes pods along; old pods become ready."""
        wanted = {}
        for deployment in self.api.of_kind("Deployment"):
            template = deployment["spec"]["template"]
            built = template["metadata"]["annotations"][naming.ANNOTATION_TEMPLATE]
            for number in range(deployment["spec"]["replicas"]):
                wanted[f"{deployment['metadata']['name']}-{built}-{number}"] = template
        for pod in self.pods():
            name = pod["metadata"]["name"]
            if name not in wanted:
                del self.api.objects["Pod", self.key[0], name]
                self._ready_at.pop(name, None)
        for name, template in wanted.items():
            key = ("Pod", self.key[0], name)
            if key not in self.api.objects:
                self._addresses += 1
                self._ready_at[name] = self.now + timedelta(seconds=self.start_s)
                self.api.objects[key] = {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {**copy.deepcopy(template["metadata"]), "name": name, "namespace": self.key[0]},
                    "spec": copy.deepcopy(template["spec"]),
                    "status": {"phase": "Running", "podIP": f"10.0.{self._addresses // 250}.{self._addresses % 250}"},
                }
            pod = self.api.objects[key]
            ready = self.now >= self._ready_at[name]
            broken = self.fails(pod)
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True" if ready and not broken else "False"}]
            pod["status"].pop("containerStatuses", None)
            if broken:
                pod["status"] |= broken


def trial_of(found: Candidate, seconds: float, /, **parts: Any) -> Trial:
    """A gateway's counts, ten observations a second; `parts` replace fields."""
    seen = int(10 * seconds)
    moved = int(seen * found.weight / 100)
    mirrored = int(seen * found.mirror / 100)
    base = Trial(
        id=found.id,
        step=found.step,
        seconds=seconds,
        stable=Outcomes(on_time=seen - moved),
        candidate=Outcomes(on_time=moved),
        shadow=Shadow(outcomes=Outcomes(on_time=mirrored), compared=mirrored, agreed=mirrored, ratio_max=0.3),
    )
    return msgspec.structs.replace(base, **parts)


def good_trial(candidate: Candidate, seconds: float) -> Trial:
    """Equal actions, all in time."""
    return trial_of(candidate, seconds)


def differing_trial(candidate: Candidate, seconds: float) -> Trial:
    """Actions beyond the tolerance in one observation of four."""
    mirrored = int(10 * seconds * candidate.mirror / 100)
    shadow = Shadow(
        outcomes=Outcomes(on_time=mirrored),
        compared=mirrored,
        agreed=mirrored - mirrored // 4,
        ratio_max=7.5,
        distance_max=0.15,
    )
    return trial_of(candidate, seconds, shadow=shadow)


def late_trial(candidate: Candidate, seconds: float) -> Trial:
    """Mirrored observations are answered in time; robots that moved get every tenth chunk late."""
    moved = int(10 * seconds * candidate.weight / 100)
    return trial_of(candidate, seconds, candidate=Outcomes(on_time=moved - moved // 10, late=moved // 10))


def comparable(cluster: Cluster) -> Json:
    """Everything but times and what is numbered by the order of events."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            times = (
                "lastTransitionTime",
                "since",
                "startedAt",
                "podIP",
                "firstTimestamp",
                "lastTimestamp",
                "endpoints",
            )
            return {name: cleaned(part) for name, part in value.items() if name not in times}
        return [cleaned(part) for part in value] if isinstance(value, list) else value

    found = {}
    for (kind, namespace, name), body in cluster.api.objects.items():
        if kind not in ("Event", "Pod") and name != naming.ROUTES_NAME:
            found[f"{kind}/{namespace}/{name}"] = cleaned(body)
    return found
