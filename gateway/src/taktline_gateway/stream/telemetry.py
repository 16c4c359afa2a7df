"""Counts of the streams, on the gateway's own metrics page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from taktline_protocol import metrics
from taktline_protocol.metrics import UNKNOWN_POLICY


class StreamTelemetry:
    """Counters of one gateway; labels are policies and fixed words, never robots."""

    def __init__(
        self,
        registry: CollectorRegistry,
        served: Callable[[], Iterable[str]],
        connected: Callable[[], Mapping[str, int]],
        store_up: Callable[[], bool | None],
    ) -> None:
        """`served` names the policies of the routing table; `store_up` is None where there is no shared store."""
        self._served = served
        self._observations = _counter(metrics.STREAM_OBSERVATIONS, registry)
        self._bytes = _counter(metrics.STREAM_BYTES, registry)
        self._sessions = _counter(metrics.STREAM_SESSIONS, registry)
        self._closed = _counter(metrics.STREAM_CLOSED, registry)
        self._known: dict[tuple[Counter, str, str], Counter] = {}
        registry.register(_Levels(served, connected, store_up))

    def observation(self, policy: str, *, keyframe: bool) -> None:
        """Counts one observation whose frames were resolved."""
        self._series(self._observations, policy, "keyframe" if keyframe else "delta").inc()

    def received(self, policy: str, count: int) -> None:
        """Counts the bytes of one frame that came."""
        self._series(self._bytes, policy, "received").inc(count)

    def sent(self, policy: str, count: int) -> None:
        """Counts the bytes of one frame that was sent."""
        self._series(self._bytes, policy, "sent").inc(count)

    def session(self, policy: str, result: str) -> None:
        """Counts one hello: new, resumed, moved or lost."""
        self._sessions.labels(self._label(policy), result).inc()

    def closed(self, policy: str, code: str) -> None:
        """Counts the end of one stream."""
        self._closed.labels(self._label(policy), code).inc()

    def _series(self, counter: Counter, policy: str, word: str) -> Counter:
        """One series, looked up once: every observation touches three."""
        key = (counter, self._label(policy), word)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = counter.labels(*key[1:])
        return found

    def _label(self, policy: str) -> str:
        return policy if policy in self._served() else UNKNOWN_POLICY


def _counter(name: str, registry: CollectorRegistry) -> Counter:
    metric = metrics.BY_NAME[name]
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


class _Levels(Collector):
    def __init__(
        self,
        served: Callable[[], Iterable[str]],
        connected: Callable[[], Mapping[str, int]],
        store_up: Callable[[], bool | None],
    ) -> None:
        self._served = served
        self._connected = connected
        self._store_up = store_up

    def collect(self) -> Iterable[GaugeMetricFamily]:
        metric = metrics.BY_NAME[metrics.STREAMS]
        streams = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        counts = self._connected()
        for policy in self._served():
            streams.add_metric((policy,), counts.get(policy, 0))
        found = [streams]
        up = self._store_up()
        if up is not None:
            store = metrics.BY_NAME[metrics.SESSION_STORE_UP]
            found.append(GaugeMetricFamily(store.name, store.help, up))
        return found
