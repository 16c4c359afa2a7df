"""The worker's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from taktline_protocol import TaktlineError, metrics

from taktline_worker.engine import BatchResult

_MS_BUCKETS = (1, 2, 5, 10, 20, 35, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, 5000)


class Instruments:
    """Counters and histograms of one policy's worker."""

    def __init__(self, policy: str) -> None:
        self._registry = CollectorRegistry()
        labels = [metrics.LABEL_POLICY]
        self._items = Counter(
            metrics.WORKER_ITEMS, "Observations by outcome.", [*labels, metrics.LABEL_CODE], registry=self._registry
        )
        self._dropped = Counter(
            metrics.WORKER_DROPPED, "Batches dropped before they began.", labels, registry=self._registry
        )
        self._phase = Histogram(
            metrics.WORKER_PHASE,
            "Time of one batch by phase.",
            [*labels, metrics.LABEL_PHASE],
            buckets=_MS_BUCKETS,
            registry=self._registry,
        )
        self._policy = policy

    def batch(self, result: BatchResult, total_ms: float) -> None:
        """Counts one answered batch."""
        for outcome in result.outcomes:
            code = outcome.code.value if isinstance(outcome, TaktlineError) else "ok"
            self._items.labels(self._policy, code).inc()
        if result.bucket:
            for phase, value in (
                ("preprocess", result.preprocess_ms),
                ("engine", result.engine_ms),
                ("postprocess", result.postprocess_ms),
                ("total", total_ms),
            ):
                self._phase.labels(self._policy, phase).observe(value)

    def dropped(self) -> None:
        """Counts one batch that was not run."""
        self._dropped.labels(self._policy).inc()

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics on a thread of its own; returns the port. Raises OSError where it is taken."""
        server, _ = start_http_server(port, addr=host, registry=self._registry)
        return int(server.server_port)
