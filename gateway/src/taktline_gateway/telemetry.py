"""Prometheus metrics of the gateway; names and meanings are in `taktline_protocol.metrics`, robots are never labels."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from taktline_protocol import metrics
from taktline_protocol.messages import Degraded, Timings
from taktline_protocol.metrics import UNKNOWN_POLICY

from taktline_gateway.series import Exemplar, LoopCounter, LoopHistogram

TERM_BUCKETS_MS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)
MARGIN_BUCKETS_MS = (-5000, -1000, -500, -200, -100, -50, -20, -10, -5, 0, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)
BATCH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10)
CYCLE_BUCKETS_MS = (5, 10, 20, 33, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 2000, 5000)
_BUCKETS = {
    metrics.LATENCY_TERM: TERM_BUCKETS_MS,
    metrics.CRITICAL_PATH: TERM_BUCKETS_MS,
    metrics.MARGIN: MARGIN_BUCKETS_MS,
    metrics.ENVIRONMENT_TIME: CYCLE_BUCKETS_MS,
    metrics.CONTROL_PERIOD: CYCLE_BUCKETS_MS,
    metrics.BATCH_SIZE: BATCH_BUCKETS,
    metrics.T_SYNC: TERM_BUCKETS_MS,
    metrics.T_SYNC_RATIO: RATIO_BUCKETS,
}
MAX_SERVED = 32
"""(pool, revision) pairs of one policy that keep their series; a policy that rolls out for months keeps no more."""
MAX_GONE = 64
"""Policies that left the routing table and keep their series, so that their last counts are still scraped."""

# The time a series was made doubles the exposition and answers no question here.
disable_created_metrics()  # type: ignore[no-untyped-call]

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True, slots=True)
class PredictedTime:
    """T_sync of one bucket as a queue predicts it, in ms."""

    pool: str
    revision: str
    batch: int
    median_ms: float
    tail_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLevel:
    """One worker at this instant; `state` is one of `metrics.WORKER_STATES`."""

    address: str
    pool: str
    revision: str
    state: str


@dataclasses.dataclass(frozen=True, slots=True)
class Levels:
    """One policy at this instant.

    Attributes:
        states: number of workers by (pool, state); states are `metrics.WORKER_STATES`.
        usable: workers that may get batches, by pool.
        batch_ports: the same by (pool, state of their batch port); states are `metrics.BATCH_PORT_STATES`.
    """

    policy: str
    depth: int
    in_flight: int
    usable: Mapping[str, int]
    states: Mapping[tuple[str, str], int]
    predicted: tuple[PredictedTime, ...] = ()
    workers: tuple[WorkerLevel, ...] = ()
    batch_ports: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)

    def with_candidate(self, candidate: Levels) -> Levels:
        """This policy with the workers and the queue of the revision that is being tried."""
        return dataclasses.replace(
            self,
            depth=self.depth + candidate.depth,
            in_flight=self.in_flight + candidate.in_flight,
            usable=_sums(self.usable, candidate.usable),
            states=_sums(self.states, candidate.states),
            predicted=self.predicted + candidate.predicted,
            workers=self.workers + candidate.workers,
            batch_ports=_sums(self.batch_ports, candidate.batch_ports),
        )


class Telemetry:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._requests = self._counter(metrics.REQUESTS)
        self._goodput = self._counter(metrics.GOODPUT)
        self._misses = self._counter(metrics.DEADLINE_MISSES)
        self._refused = self._counter(metrics.REFUSED)
        self._superseded = self._counter(metrics.SUPERSEDED)
        self._hedges = self._counter(metrics.HEDGES)
        self._degraded = self._counter(metrics.DEGRADED)
        self._terms = self._histogram(metrics.LATENCY_TERM)
        self._critical = self._histogram(metrics.CRITICAL_PATH)
        self._margin = self._histogram(metrics.MARGIN)
        self._environment = self._histogram(metrics.ENVIRONMENT_TIME)
        self._control = self._histogram(metrics.CONTROL_PERIOD)
        self._batch = self._histogram(metrics.BATCH_SIZE)
        self._rows = self._counter(metrics.BATCH_ROWS)
        self._t_sync = self._histogram(metrics.T_SYNC)
        self._ratio = self._histogram(metrics.T_SYNC_RATIO)
        build = metrics.BY_NAME[metrics.BUILD]
        Gauge(build.name, build.help, build.labels, registry=self.registry).labels(version("taktline-gateway")).set(1)
        self._by_policy = (
            self._requests,
            self._refused,
            self._superseded,
            self._hedges,
            self._degraded,
            self._environment,
            self._control,
        )
        self._by_served = (
            self._goodput,
            self._misses,
            self._terms,
            self._critical,
            self._margin,
            self._batch,
            self._rows,
            self._t_sync,
            self._ratio,
        )
        self._policies: dict[str, OrderedDict[tuple[str, str], _Served]] = {}
        self._cycles: dict[str, tuple[Histogram, Histogram]] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    # ----- policies

    def policy_served(self, policy: str) -> None:
        """Starts the policy's counters at 0, so that a query has an answer, and a rate its first event."""
        self._gone.pop(policy, None)
        if policy not in self._policies:
            self._policies[policy] = OrderedDict()
            self._misses.labels(policy, "", "", "refused")
            self._superseded.labels(policy)
            for result in metrics.HEDGE_RESULTS:
                self._hedges.labels(policy, result)
            for kind in metrics.DEGRADED_KINDS:
                self._degraded.labels(policy, kind)
            self._requests.labels(policy, "ok")

    def policy_gone(self, policy: str) -> None:
        """The policy left the routing table; its series stay until `MAX_GONE` others have left after it."""
        self._gone[policy] = None
        while len(self._gone) > MAX_GONE:
            oldest, _ = self._gone.popitem(last=False)
            self._policies.pop(oldest, None)
            self._cycles.pop(oldest, None)
            for metric in (*self._by_policy, *self._by_served):
                metric.remove_by_labels({metrics.LABEL_POLICY: oldest})

    def watch_levels(self, levels: Callable[[], Iterable[Levels]]) -> None:
        """Reads queue depths, workers and predicted times at each scrape."""
        self.registry.register(_Levels(levels))

    # ----- requests

    def answered(
        self,
        policy: str,
        pool: str,
        revision: str,
        timings: Timings,
        margin_ms: float,
        cause: str | None,
        exemplar: Exemplar | None = None,
    ) -> None:
        """Counts one chunk that was sent; `cause` is set where it is late."""
        served = self._of(policy, pool, revision)
        served.ok.inc()
        served.observe.observe(timings.observe_ms)
        served.transfer.observe(timings.transfer_ms, exemplar)
        served.queue.observe(timings.queue_ms, exemplar)
        served.inference.observe(timings.inference_ms, exemplar)
        served.actuate.observe(timings.actuate_ms)
        served.critical.observe(timings.critical_ms, exemplar)
        served.margin.observe(margin_ms, exemplar)
        if cause is None:
            served.goodput.inc()
        else:
            served.misses[cause].inc(1, exemplar)

    def refused(self, policy: str, code: str, *, missed: bool, exemplar: Exemplar | None = None) -> None:
        """Counts one typed error; `missed` where the robot had a deadline that nothing else will meet."""
        policy = policy if policy in self._policies else UNKNOWN_POLICY
        self._requests.labels(policy, code).inc()
        if missed:
            self._refused.labels(policy, code).inc(1, exemplar)
            self._misses.labels(policy, "", "", "refused").inc(1, exemplar)

    def superseded(self, policy: str) -> None:
        """Counts one queued observation that a newer one replaced."""
        self._superseded.labels(policy).inc()

    def hedged(self, policy: str, count: int) -> None:
        """Counts observations of a silent worker that were queued again for another one."""
        self._hedges.labels(policy, "attempted").inc(count)

    def hedge_won(self, policy: str) -> None:
        """Counts one of them that the other worker answered first."""
        self._hedges.labels(policy, "won").inc()

    def degraded(self, policy: str, how: Degraded) -> None:
        """Counts one chunk that was made cheaper, once for each way in which it was."""
        for kind in metrics.DEGRADED_KINDS:
            if getattr(how, kind) is not None:
                self._degraded.labels(policy, kind).inc()

    def control_cycle(self, policy: str, environment_ms: float, control_ms: float) -> None:
        """Counts one cycle of one robot: L_env and L_control."""
        series = self._cycles.get(policy)
        if series is None:
            series = self._cycles[policy] = (self._environment.labels(policy), self._control.labels(policy))
        series[0].observe(environment_ms)
        series[1].observe(control_ms)

    # ----- batches

    def batch(self, policy: str, pool: str, revision: str, size: int) -> None:
        """Counts one batch sent."""
        self._of(policy, pool, revision).batch.observe(size)

    def batch_finished(
        self, policy: str, pool: str, revision: str, rows: int, bucket: int, seconds: float, predicted_s: float
    ) -> None:
        """Counts one batch that came back.

        Args:
            rows: observations that the engine ran.
            bucket: rows with padding; 0 where the worker ran nothing.
            seconds: from send to answer, without the wait for the batch before it.
            predicted_s: the same, as the queue predicted its median when it sent the batch.
        """
        served = self._of(policy, pool, revision)
        if bucket:
            served.observations.inc(min(rows, bucket))
            served.padding.inc(max(0, bucket - rows))
            self._t_sync.labels(policy, pool, revision, str(bucket)).observe(1e3 * seconds)
        if predicted_s > 0:
            served.ratio.observe(seconds / predicted_s)

    # ----- exposition

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics of this instant and their media type: OpenMetrics, with exemplars, where `accept` asks for it."""
        encode, media = choose_encoder(accept)
        return encode(self.registry), media

    def _of(self, policy: str, pool: str, revision: str) -> _Served:
        pairs = self._policies.get(policy)
        if pairs is None:
            # Only what the routing table names can have been served, so this policy has just left it.
            self.policy_served(policy)
            self.policy_gone(policy)
            pairs = self._policies[policy]
        served = pairs.get((pool, revision))
        if served is None:
            served = pairs[pool, revision] = self._start(policy, pool, revision)
            while len(pairs) > MAX_SERVED:
                (old_pool, old_revision), _ = pairs.popitem(last=False)
                labels = {
                    metrics.LABEL_POLICY: policy,
                    metrics.LABEL_POOL: old_pool,
                    metrics.LABEL_REVISION: old_revision,
                }
                for metric in self._by_served:
                    metric.remove_by_labels(labels)
        return served

    def _start(self, policy: str, pool: str, revision: str) -> _Served:
        labels = (policy, pool, revision)
        terms = [self._terms.labels(*labels, term) for term in metrics.TERMS]
        return _Served(
            ok=self._requests.labels(policy, "ok"),
            observe=terms[0],
            transfer=terms[1],
            queue=terms[2],
            inference=terms[3],
            actuate=terms[4],
            critical=self._critical.labels(*labels),
            margin=self._margin.labels(*labels),
            goodput=self._goodput.labels(*labels),
            misses={cause: self._misses.labels(*labels, cause) for cause in metrics.MISS_CAUSES if cause != "refused"},
            batch=self._batch.labels(*labels),
            observations=self._rows.labels(*labels, "observation"),
            padding=self._rows.labels(*labels, "padding"),
            ratio=self._ratio.labels(*labels),
        )

    def _counter(self, name: str) -> Counter:
        metric = metrics.BY_NAME[name]
        return LoopCounter(name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = metrics.BY_NAME[name]
        return LoopHistogram(name, metric.help, metric.labels, buckets=_BUCKETS[name], registry=self.registry)


@dataclasses.dataclass(frozen=True, slots=True)
class _Served:
    """The series of one policy, pool and revision, looked up once: a request touches ten of them."""

    ok: Counter
    observe: Histogram
    transfer: Histogram
    queue: Histogram
    inference: Histogram
    actuate: Histogram
    critical: Histogram
    margin: Histogram
    goodput: Counter
    misses: dict[str, Counter]
    batch: Histogram
    observations: Counter
    padding: Counter
    ratio: Histogram


def margin_of(budget_ms: float, timings: Timings) -> float:
    """M_ctrl = B_ctrl - L_critical, in ms; the budget was stated after L_observe, which is part of both."""
    return budget_ms - (timings.actuate_ms + timings.inference_ms + timings.queue_ms + timings.transfer_ms)


def miss_cause(budget_ms: float, timings: Timings) -> str | None:
    """The one cause of a late answer, None where it was in time.

    The first of inference, queue, transfer with which the budget was gone: a request that could not have been met
    with an empty queue is inference's, one that only waiting made late is the queue's, the rest is transfer's.
    """
    if margin_of(budget_ms, timings) >= 0:
        return None
    spent = timings.actuate_ms + timings.inference_ms
    if spent > budget_ms:
        return "inference"
    return "queue" if spent + timings.queue_ms > budget_ms else "transfer"


def _sums(one: Mapping[_Key, int], other: Mapping[_Key, int]) -> dict[_Key, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}


class _Levels(Collector):
    """Gauges that are read at each scrape."""

    def __init__(self, levels: Callable[[], Iterable[Levels]]) -> None:
        self._levels = levels

    def collect(self) -> Iterable[GaugeMetricFamily]:
        depth, in_flight, workers, states, ports, predicted = (
            GaugeMetricFamily(name, metrics.BY_NAME[name].help, labels=metrics.BY_NAME[name].labels)
            for name in (
                metrics.QUEUE_DEPTH,
                metrics.IN_FLIGHT,
                metrics.WORKERS,
                metrics.WORKERS_BY_STATE,
                metrics.WORKERS_BY_BATCH_PORT,
                metrics.T_SYNC_PREDICTED,
            )
        )
        for level in self._levels():
            depth.add_metric((level.policy,), level.depth)
            in_flight.add_metric((level.policy,), level.in_flight)
            for pool, count in level.usable.items():
                workers.add_metric((level.policy, pool), count)
                for state in metrics.WORKER_STATES:
                    states.add_metric((level.policy, pool, state), level.states.get((pool, state), 0))
                for state in metrics.BATCH_PORT_STATES:
                    ports.add_metric((level.policy, pool, state), level.batch_ports.get((pool, state), 0))
            slowest: dict[tuple[str, str, int], tuple[float, float]] = {}
            for time in level.predicted:
                key = (time.pool, time.revision, time.batch)
                slowest[key] = max(slowest.get(key, (0.0, 0.0)), (time.median_ms, time.tail_ms))
            for (pool, revision, batch), times in slowest.items():
                for quantile, value in zip(metrics.QUANTILES, times, strict=True):
                    predicted.add_metric((level.policy, pool, revision, str(batch), quantile), value)
        return (depth, in_flight, workers, states, ports, predicted)
