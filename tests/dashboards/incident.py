"""The scripted incident: one factory, four faults at once, each mended, all of it scraped by a real Prometheus.

Rules are the operator's own; only their windows are shortened (`SCALE`), so that an hour lasts 36 seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from taktline_operator import platform_rules, slo_rules, spec
from taktline_operator.slo_windows import Clock
from taktline_protocol import slo

from .factory import (
    MODEL,
    MODEL_POLICY,
    Factory,
    Fleet,
    Robots,
    StreamingRobot,
    model_observation,
    scripted_observation,
)
from .operator_run import BUDGET_MS, OperatorRun
from .outside_exporter import OutsideExporter
from .prometheus_run import PrometheusRun

SCALE = 1 / 100
STEADY_S = 5.0
HEALTHY, SLOW, DEAD, FLOOD, CHANGE = "healthy", "slow", "dead", "flood", "change"
SCRIPTED = (HEALTHY, SLOW, DEAD, FLOOD)
# Long beside what a busy machine adds to any of them.
BUDGETS_MS = {HEALTHY: 8000.0, SLOW: 1500.0, DEAD: 4000.0, FLOOD: 2500.0, MODEL_POLICY: 20_000.0}
ROBOTS_BUDGET_MS = BUDGETS_MS | {CHANGE: BUDGET_MS}

WORKERS = {
    HEALTHY: {"t_ms": 200.0},
    SLOW: {"t_ms": 400.0},
    DEAD: {"t_ms": 200.0},
    FLOOD: {"t_ms": 500.0, "max_batch": 1},
}
SLOWED = 4  # later than the deadline, but no hang: a batch that takes five times as long as predicted counts as failed

EXPECTED = {
    # What must fire while the fault is there: (alert, labels).
    SLOW: [(slo.BURN_FAST, {}), (slo.WORKER_SLOWED, {"pool": "a"})],
    DEAD: [(slo.BURN_FAST, {}), (slo.POOL_DOWN, {"pool": "a", "severity": "page"})],
    FLOOD: [(slo.BURN_FAST, {}), (slo.REFUSING, {"code": "deadline_unreachable"})],
    CHANGE: [(slo.ROLLED_BACK, {"reason": "ParityFailed"})],
}
# The slow tickets look back for hours; all other alerts must clear soon after the fault is mended.
SLOW_TO_CLEAR = {slo.BURN_SLOW}


@dataclass
class Record:
    """What happened."""

    began: float = 0.0
    ended: float = 0.0
    fired: dict[str, set[str]] = field(default_factory=dict)  # by policy
    codes: dict[str, set[int]] = field(default_factory=dict)
    taken_back: dict = field(default_factory=dict)  # status.rollout after the bad rollout
    gateway_down_fired: bool = False
    rarely_scraped: list[str] = field(default_factory=list)


def deployment(policy: str) -> spec.PolicyDeployment:
    """The PolicyDeployment that a policy of the run stands for."""
    return spec.parse(
        {
            "apiVersion": "taktline.dev/v1alpha1",
            "kind": "PolicyDeployment",
            "metadata": {"name": policy, "namespace": "factory"},
            "spec": {
                "model": {"family": "pi05", "source": {"pvc": {"claimName": "models"}}},
                "pools": [{"name": "a", "accelerator": "cpu", "minReplicas": 1}],
                "slo": {"controlBudgetMs": BUDGETS_MS[policy], "onTimeObjective": 0.99},
            },
        }
    )


class Incident:
    """The run. `tell` it once; `prometheus` can be asked until `stop`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.record = Record()
        self.streaming: StreamingRobot | None = None
        self.factory = Factory(folder)
        self.outside = OutsideExporter()
        self.operator = OperatorRun(CHANGE, self.factory, folder / "operator")
        clock = Clock(SCALE)
        groups = [group for name in BUDGETS_MS for group in slo_rules.policy_groups(deployment(name), clock=clock)]
        jobs = {
            "gateway": [self.factory.gateway],
            "operator": [self.operator.address],
            "outside": [self.outside.address],
            "workers": [self.factory.worker_metrics],
        }
        self._start_processes()
        groups += platform_rules.platform_groups(clock=clock)
        self.prometheus = PrometheusRun(programs, folder / "prometheus", jobs, groups)
        self.robots = Robots(f"http://{self.factory.gateway}")

    def _start_processes(self) -> None:
        factory = self.factory
        assert (MODEL / "model.safetensors").exists()
        factory.route(MODEL_POLICY, {"address": factory.model_worker(), "pool": "a", "revision": "demo"})
        for policy in SCRIPTED:
            address = factory.worker(policy, policy, **WORKERS[policy])
            factory.route(policy, {"address": address, "pool": "a", "revision": "r1"}, max_batch=8)
        factory.start_gateway()

    def tell(self) -> Record:
        """Healthy, four faults, mended, and at last no gateway."""
        prometheus, factory = self.prometheus, self.factory
        policies = [*SCRIPTED, MODEL_POLICY]
        prometheus.until(lambda: factory.ready(policies), "all workers being ready", 180)
        prometheus.until(self.operator.ready, f"{CHANGE} being served", 180)
        self.record.began = time.time()
        self._send_robots(flood=False)
        self.streaming = StreamingRobot(self.robots.url, HEALTHY, 0.4, BUDGETS_MS[HEALTHY])
        prometheus.until(lambda: not prometheus.targets_down(), "every target being scraped")
        prometheus.until(self._all_served, "every policy having on-time chunks")
        time.sleep(STEADY_S)
        quiet = (slo.BURN_FAST, slo.POOL_DOWN, slo.REFUSING, slo.ROLLED_BACK, slo.GATEWAY_DOWN)
        prometheus.until(lambda: not any(prometheus.firing(name) for name in quiet), "a quiet start")

        factory.speed(SLOW, SLOWED)
        factory.kill(DEAD)
        self._send_robots(flood=True)
        self.operator.roll_out_badly()
        for policy, alerts in EXPECTED.items():
            for name, labels in alerts:
                prometheus.until(lambda n=name, m=labels, p=policy: self._fires(n, p, m), f"{name} of {policy} firing")
        told = ("Warning", "ParityFailed")
        prometheus.until(lambda: told in self.operator.events(), f"an event of {CHANGE} being told")
        self.record.taken_back = self.operator.status()["rollout"]

        factory.speed(SLOW, 1)
        factory.worker(DEAD, DEAD, **WORKERS[DEAD])
        self._send_robots(flood=False)
        self.operator.revert()
        for policy in EXPECTED:
            prometheus.until(lambda p=policy: not self._open(p), f"the alerts of {policy} clearing", 180)
        prometheus.until(self.operator.ready, f"{CHANGE} being served as before", 180)
        missing = prometheus.query(f"avg_over_time(up[{int(time.time() - self.record.began)}s]) < 0.5")
        self.record.rarely_scraped = [series["metric"]["job"] for series in missing]
        self.record.ended = time.time()
        self.record.fired = {policy: prometheus.fired(policy=policy) for policy in (*policies, CHANGE)}
        self.record.codes = {name: set(fleet.seen) for name, fleet in self.robots.fleets.items()}

        self.robots.stop()
        self.streaming.stop()
        factory.kill("gateway")
        self.record.gateway_down_fired = bool(
            prometheus.until(lambda: prometheus.firing(slo.GATEWAY_DOWN), f"{slo.GATEWAY_DOWN} firing")
        )
        return self.record

    def _send_robots(self, *, flood: bool) -> None:
        ordinary = scripted_observation()
        known = self.robots.fleets

        def fleet(policy: str, robots: int, period_s: float, observation=ordinary) -> None:
            found = Fleet(policy, robots, period_s, ROBOTS_BUDGET_MS[policy], observation)
            found.seen = known[policy].seen if policy in known else []
            self.robots.set(found)

        fleet(HEALTHY, 3, 0.4)
        fleet(SLOW, 3, 0.8)
        fleet(DEAD, 4, 0.4)
        fleet(CHANGE, 4, 0.3)
        fleet(FLOOD, 24, 0.5) if flood else fleet(FLOOD, 2, 2.0)
        model = known[MODEL_POLICY].observation if MODEL_POLICY in known else None
        fleet(MODEL_POLICY, 2, 1.5, model or model_observation(self.factory.policy(MODEL_POLICY)))

    def _all_served(self) -> bool:
        found = {series["metric"]["policy"] for series in self.prometheus.query(f"{slo.EVENTS_RATE} > 0")}
        return found >= set(BUDGETS_MS)

    def _fires(self, name: str, policy: str, labels: dict[str, str]) -> bool:
        firing = self.prometheus.firing(name, policy=policy)
        return any(all(found.get(key) == value for key, value in labels.items()) for found in firing)

    def _open(self, policy: str) -> set[str]:
        found = self.prometheus.query(f'ALERTS{{alertstate="firing",policy="{policy}"}}')
        return {series["metric"]["alertname"] for series in found} - SLOW_TO_CLEAR

    def stop(self) -> None:
        """Ends everything."""
        self.robots.stop()
        if self.streaming is not None:
            self.streaming.stop()
        self.operator.stop()
        self.prometheus.stop()
        self.outside.stop()
        self.factory.stop()
