"""Prometheus metrics of the operator; names and meanings are in `taktline_protocol.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from taktline_protocol import metrics

Json = dict[str, Any]

RECONCILE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
REQUEST_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_CONDITION_VALUES = {"True": 1.0, "False": 0.0}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The time a series was made doubles the exposition and answers no question here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Telemetry:
    """All metrics of one operator process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._reconciles = self._counter(metrics.OPERATOR_RECONCILES)
        for result in metrics.RECONCILE_RESULTS:
            self._reconciles.labels(result)
        self._reconcile = self._histogram(metrics.OPERATOR_RECONCILE, RECONCILE_BUCKETS_S)
        self._reviews = self._counter(metrics.OPERATOR_REVIEWS)
        for result in metrics.REVIEW_RESULTS:
            self._reviews.labels(result)
        self._requests = self._counter(metrics.OPERATOR_REQUESTS)
        self._request = self._histogram(metrics.OPERATOR_REQUEST, REQUEST_BUCKETS_S)

    def _counter(self, name: str) -> Counter:
        metric = metrics.BY_NAME[name]
        return Counter(metric.name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        metric = metrics.BY_NAME[name]
        return Histogram(metric.name, metric.help, metric.labels, buckets=buckets, registry=self.registry)

    def reconciled(self, result: str, seconds: float) -> None:
        """Counts one reconciliation; `result` is one of `metrics.RECONCILE_RESULTS`."""
        self._reconciles.labels(result).inc()
        self._reconcile.observe(seconds)

    def reviewed(self, result: str) -> None:
        """Counts one review of the admission webhook; `result` is one of `metrics.REVIEW_RESULTS`."""
        self._reviews.labels(result).inc()

    def requested(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """Counts one request to the API server; status 0 means that no answer came."""
        self._requests.labels(verb, kind, str(status)).inc()
        self._request.labels(verb).observe(seconds)

    def watch(self, levels: Callable[[], Mapping[str, float]], statuses: Callable[[], Iterable[Json]]) -> None:
        """Reads at each scrape the values of gauges by name, and the PolicyDeployments with their status."""
        self.registry.register(_Levels(levels, statuses))

    def exposition(self) -> bytes:
        """The Prometheus text of this instant."""
        return generate_latest(self.registry)


class _Levels(Collector):
    """Gauges made anew at each scrape, so that what is gone leaves no series behind."""

    def __init__(self, levels: Callable[[], Mapping[str, float]], statuses: Callable[[], Iterable[Json]]) -> None:
        self._levels = levels
        self._statuses = statuses

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, value in self._levels().items():
            yield GaugeMetricFamily(name, metrics.BY_NAME[name].help, value=value)
        conditions, replicas, revisions, rollouts, wanted, deliveries = (
            GaugeMetricFamily(name, metrics.BY_NAME[name].help, labels=metrics.BY_NAME[name].labels)
            for name in (
                metrics.POLICY_CONDITION,
                metrics.POLICY_REPLICAS,
                metrics.POLICY_REVISION,
                metrics.POLICY_ROLLOUT,
                metrics.POLICY_DEMAND,
                metrics.POLICY_DELIVERY,
            )
        )
        for live in self._statuses():
            owner = (live["metadata"]["namespace"], live["metadata"]["name"])
            status = live.get("status") or {}
            for condition in status.get("conditions", []):
                value = _CONDITION_VALUES.get(condition["status"], -1.0)
                conditions.add_metric((*owner, condition["type"], condition.get("reason", "")), value)
            for pool in status.get("pools", []):
                for state in metrics.REPLICA_STATES:
                    replicas.add_metric((*owner, pool["name"], state), float(pool.get(state, 0)))
            for track in metrics.REVISION_TRACKS:
                revision = status.get(f"{track}Revision")
                if revision:
                    revisions.add_metric((*owner, revision, track), 1.0)
            rollout = status.get("rollout")
            if rollout:
                labels = (*owner, rollout["phase"], rollout.get("reason", ""))
                rollouts.add_metric(labels, float(rollout.get("weight", 0)))
            if "scaling" in status:
                wanted.add_metric(owner, float(status["scaling"].get("desired", 0)))
            if "percent" in status.get("delivery", {}):
                deliveries.add_metric(owner, float(status["delivery"]["percent"]))
        yield from (conditions, replicas, revisions, rollouts, wanted, deliveries)
