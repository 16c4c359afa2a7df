"""The metrics page of a pod with replicas: every replica's own series, told apart by a label, and how many serve."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from taktline_protocol import metrics

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0
LABEL_REPLICA = "replica"
# This machine's own pages are behind no proxy, whatever HTTP_PROXY says of others.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ReplicaMetrics(Collector):
    """Reads the replicas' pages at each scrape.

    Args:
        policy: label of the pod's own series.
        addresses: replica -> host:port of the page of each one that serves.
        restarts: how often a replica ended and was started again.
    """

    def __init__(self, policy: str, addresses: Callable[[], Mapping[int, str]], restarts: Callable[[], int]) -> None:
        self._policy = policy
        self._addresses = addresses
        self._restarts = restarts

    def serve(self, host: str, port: int) -> int:
        """Answers GET /metrics on a thread of its own; returns the port. Raises OSError where it is taken."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(self)
        server, _ = start_http_server(port, addr=host, registry=registry)
        return int(server.server_port)

    def describe(self) -> Iterable[Family]:
        """Nothing beforehand: which series there are depends on the replicas."""
        return ()

    def collect(self) -> Iterable[Family]:
        """The merged families. A replica that does not answer is left out of this scrape, and the log says so."""
        addresses = self._addresses()
        merged: dict[str, Family] = {}
        for replica, address in sorted(addresses.items()):
            try:
                with _direct.open(f"http://{address}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
                    page = answer.read().decode()
            except (OSError, HTTPException) as error:
                logger.warning("a replica's metrics cannot be read", extra={"replica": replica, "reason": str(error)})
                continue
            for family in text_string_to_metric_families(page):
                if family.name.startswith(("process_", "python_")):
                    continue  # of this process, by its own collector
                target = merged.setdefault(family.name, Family(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = sample.labels | {LABEL_REPLICA: str(replica)}
                    target.add_sample(sample.name, labels, sample.value)
        serving = metrics.BY_NAME[metrics.WORKER_REPLICAS]
        count = GaugeMetricFamily(serving.name, serving.help, labels=serving.labels)
        count.add_metric((self._policy,), len(addresses))
        again = metrics.BY_NAME[metrics.WORKER_REPLICA_RESTARTS]
        restarts = CounterMetricFamily(again.name.removesuffix("_total"), again.help, labels=again.labels)
        restarts.add_metric((self._policy,), self._restarts())
        return (*merged.values(), count, restarts)
