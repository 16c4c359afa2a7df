"""Prometheus metrics of the gateway; labels are policies, pools, revisions and codes, never robots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from taktline_protocol import metrics
from taktline_protocol.messages import Timings

TERM_BUCKETS_MS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
MARGIN_BUCKETS_MS = (-5000, -1000, -500, -200, -100, -50, -20, -10, -5, 0, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
UNKNOWN_POLICY = "unknown"
"""The policy label of requests for a policy that is not served: what a client invents is no label."""

# The time a series was made doubles the exposition and answers no question here.
disable_created_metrics()  # type: ignore[no-untyped-call]

Level = tuple[str, str, float]
"""(policy, pool, value) of one gauge."""


class Telemetry:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        policy, pool, revision = metrics.LABEL_POLICY, metrics.LABEL_POOL, metrics.LABEL_REVISION
        self._requests = Counter(
            metrics.REQUESTS,
            "Requests by outcome; code ok or an error code.",
            (policy, metrics.LABEL_CODE),
            registry=self.registry,
        )
        self._terms = Histogram(
            metrics.LATENCY_TERM,
            "The five terms of the critical path of answered requests, in ms.",
            (policy, pool, revision, metrics.LABEL_TERM),
            buckets=TERM_BUCKETS_MS,
            registry=self.registry,
        )
        self._margin = Histogram(
            metrics.MARGIN,
            "Control margin of answered requests, in ms; negative is a deadline miss.",
            (policy, pool, revision),
            buckets=MARGIN_BUCKETS_MS,
            registry=self.registry,
        )
        self._misses = Counter(
            metrics.DEADLINE_MISSES,
            "Requests that got no chunk in time, each with one cause.",
            (policy, metrics.LABEL_CAUSE),
            registry=self.registry,
        )
        self._batch = Histogram(
            metrics.BATCH_SIZE,
            "Observations in a batch.",
            (policy, pool),
            buckets=BATCH_BUCKETS,
            registry=self.registry,
        )
        self._superseded = Counter(
            metrics.SUPERSEDED,
            "Queued observations replaced by a newer one of their robot.",
            (policy,),
            registry=self.registry,
        )

    def policy_served(self, policy: str) -> None:
        """Starts the policy's counters at 0, so that a query has an answer, and a rate its first event."""
        for cause in metrics.MISS_CAUSES:
            self._misses.labels(policy, cause)
        self._superseded.labels(policy)

    def watch_levels(self, depths: Callable[[], Iterable[Level]], workers: Callable[[], Iterable[Level]]) -> None:
        """Reads queue depths and usable workers at each scrape."""
        self.registry.register(_Levels(depths, workers))

    def answered(
        self, policy: str, pool: str, revision: str, timings: Timings, margin_ms: float, cause: str | None
    ) -> None:
        """Counts one chunk that was sent; `cause` is set where it is late."""
        self._requests.labels(policy, "ok").inc()
        values = (
            timings.observe_ms,
            timings.transfer_ms,
            timings.queue_ms,
            timings.inference_ms,
            timings.actuate_ms,
        )
        for term, value in zip(metrics.TERMS, values, strict=True):
            self._terms.labels(policy, pool, revision, term).observe(value)
        self._margin.labels(policy, pool, revision).observe(margin_ms)
        if cause is not None:
            self._misses.labels(policy, cause).inc()

    def refused(self, policy: str, code: str, *, missed: bool) -> None:
        """Counts one typed error; `missed` where the robot had a deadline that nothing else will meet."""
        self._requests.labels(policy, code).inc()
        if missed:
            self._misses.labels(policy, "refused").inc()

    def superseded(self, policy: str) -> None:
        """Counts one queued observation that a newer one replaced."""
        self._superseded.labels(policy).inc()

    def batch(self, policy: str, pool: str, size: int) -> None:
        """Counts one batch sent."""
        self._batch.labels(policy, pool).observe(size)

    def exposition(self) -> bytes:
        """The Prometheus text of this instant."""
        return generate_latest(self.registry)


def miss_cause(budget_ms: float, timings: Timings) -> str | None:
    """The one cause of a late answer, None where it was in time.

    The first of inference, queue, transfer with which the budget was gone: a request that could not have been met
    with an empty queue is inference's, one that only waiting made late is the queue's, the rest is transfer's.
    """
    spent = timings.actuate_ms + timings.inference_ms
    if spent > budget_ms:
        return "inference"
    spent += timings.queue_ms
    if spent > budget_ms:
        return "queue"
    return "transfer" if spent + timings.transfer_ms > budget_ms else None


class _Levels(Collector):
    def __init__(self, depths: Callable[[], Iterable[Level]], workers: Callable[[], Iterable[Level]]) -> None:
        self._depths = depths
        self._workers = workers

    def collect(self) -> Iterable[GaugeMetricFamily]:
        labels = (metrics.LABEL_POLICY, metrics.LABEL_POOL)
        depth = GaugeMetricFamily(metrics.QUEUE_DEPTH, "Observations waiting for a batch.", labels=labels[:1])
        for policy, _, value in self._depths():
            depth.add_metric((policy,), value)
        workers = GaugeMetricFamily(metrics.WORKERS, "Workers that may get batches.", labels=labels)
        for policy, pool, value in self._workers():
            workers.add_metric((policy, pool), value)
        return (depth, workers)
