"""The worker's Prometheus metrics, in a registry of their own; names and meanings: `taktline_protocol.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from taktline_protocol import TaktlineError, metrics

from taktline_worker.adapter import Adapter, HasCaches, HasGraphs
from taktline_worker.engine import BatchResult, BucketTiming

_MS_BUCKETS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)

# The time a series was made doubles the exposition and answers no question here.
disable_created_metrics()  # type: ignore[no-untyped-call]

GpuMemory = Callable[[], tuple[int, int] | None]
"""Bytes allocated and reserved on this process's GPU; None where it has none."""


class Instruments:
    """Counters and histograms of one policy's worker."""

    def __init__(self, policy: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._items = self._counter(metrics.WORKER_ITEMS)
        self._dropped = self._counter(metrics.WORKER_DROPPED)
        self._busy = self._counter(metrics.WORKER_BUSY)
        phase = metrics.BY_NAME[metrics.WORKER_PHASE]
        self._phase = Histogram(phase.name, phase.help, phase.labels, buckets=_MS_BUCKETS, registry=self._registry)
        self._info = self._gauge(metrics.WORKER_INFO)
        self._calibration = self._gauge(metrics.WORKER_CALIBRATION)
        self._start = self._gauge(metrics.WORKER_START)
        self._policy = policy
        self._items.labels(policy, "ok")
        self._dropped.labels(policy)
        self._busy.labels(policy)

    def started(
        self,
        adapter: Adapter,
        revision: str,
        timings: Sequence[BucketTiming],
        stages_s: dict[str, float],
        gpu_memory: GpuMemory,
    ) -> None:
        """Notes what was loaded, what it measured of itself, and what is read of it at each scrape.

        Args:
            stages_s: seconds by `metrics.WORKER_STAGES`.
        """
        about = adapter.description
        self._info.labels(self._policy, revision, about.family, about.precision, about.device).set(1)
        for timing in timings:
            for quantile, value in zip(metrics.QUANTILES, (timing.median_ms, timing.p99_ms), strict=True):
                self._calibration.labels(self._policy, str(timing.batch), quantile).set(value)
        for stage in metrics.WORKER_STAGES:
            self._start.labels(self._policy, stage).set(stages_s[stage])
        self._registry.register(_Loaded(self._policy, adapter, gpu_memory))

    def batch(self, result: BatchResult, total_ms: float) -> None:
        """Counts one answered batch."""
        for outcome in result.outcomes:
            code = outcome.code.value if isinstance(outcome, TaktlineError) else "ok"
            self._items.labels(self._policy, code).inc()
        if result.bucket:
            self._busy.labels(self._policy).inc(result.engine_ms / 1e3)
            values = (result.preprocess_ms, result.engine_ms, result.postprocess_ms, total_ms)
            for phase, value in zip(metrics.WORKER_PHASES, values, strict=True):
                self._phase.labels(self._policy, phase).observe(value)

    def dropped(self) -> None:
        """Counts one batch that was not run."""
        self._dropped.labels(self._policy).inc()

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics on a thread of its own; returns the port. Raises OSError where it is taken."""
        server, _ = start_http_server(port, addr=host, registry=self._registry)
        return int(server.server_port)

    def _counter(self, name: str) -> Counter:
        metric = metrics.BY_NAME[name]
        return Counter(name, metric.help, metric.labels, registry=self._registry)

    def _gauge(self, name: str) -> Gauge:
        metric = metrics.BY_NAME[name]
        return Gauge(name, metric.help, metric.labels, registry=self._registry)


class _Loaded(Collector):
    """What is read of the engine at each scrape: its graphs, its caches, its GPU memory."""

    def __init__(self, policy: str, adapter: Adapter, gpu_memory: GpuMemory) -> None:
        self._policy = policy
        self._adapter = adapter
        self._gpu_memory = gpu_memory

    def collect(self) -> Iterable[Family]:
        graphs = self._adapter.graphs() if isinstance(self._adapter, HasGraphs) else ()
        count, memory = _gauge(metrics.WORKER_GRAPHS), _gauge(metrics.WORKER_GRAPH_MEMORY)
        count.add_metric((self._policy,), len(graphs))
        memory.add_metric((self._policy,), sum(graph.memory_bytes for graph in graphs))
        seconds: dict[int, float] = {}
        for graph in graphs:
            seconds[graph.batch] = seconds.get(graph.batch, 0.0) + graph.capture_s
        capture = _gauge(metrics.WORKER_GRAPH_CAPTURE)
        for batch, value in seconds.items():
            capture.add_metric((self._policy, str(batch)), value)
        cache = metrics.BY_NAME[metrics.WORKER_CACHE]
        lookups = CounterMetricFamily(cache.name.removesuffix("_total"), cache.help, labels=cache.labels)
        caches = self._adapter.caches() if isinstance(self._adapter, HasCaches) else {}
        for name, (hits, misses) in caches.items():
            lookups.add_metric((self._policy, name, "hit"), hits)
            lookups.add_metric((self._policy, name, "miss"), misses)
        gpu = _gauge(metrics.WORKER_GPU_MEMORY)
        used = self._gpu_memory()
        if used is not None:
            gpu.add_metric((self._policy, "allocated"), used[0])
            gpu.add_metric((self._policy, "reserved"), used[1])
        return (count, memory, capture, lookups, gpu)


def _gauge(name: str) -> GaugeMetricFamily:
    metric = metrics.BY_NAME[name]
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
