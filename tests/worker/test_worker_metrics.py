"""The worker's metrics: the catalogue's names and labels, phases and busy time, what the engine says of itself."""

from __future__ import annotations

import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from taktline_protocol import ErrorCode, TaktlineError, metrics
from taktline_worker.adapter import CapturedGraph
from taktline_worker.engine import BatchResult, BucketTiming
from taktline_worker.instruments import Instruments

TIMINGS = (BucketTiming(1, 10.0, 12.0, 20), BucketTiming(4, 20.0, 25.0, 20))


class GraphAdapter:
    """What the instruments read of an adapter whose engine replays graphs and keeps a cache."""

    description = SimpleNamespace(family="pi05", precision="bf16", device="cuda:0")

    def graphs(self):
        return [CapturedGraph(1, 0.5, 100), CapturedGraph(1, 0.25, 50), CapturedGraph(4, 1.0, 200)]

    def caches(self):
        return {"prefix": (3, 1)}


class EagerAdapter:
    description = SimpleNamespace(family="pi0", precision="fp32", device="cpu")


def scrape(instruments: Instruments) -> dict:
    port = instruments.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def value(families: dict, name: str, **labels: str) -> float:
    wanted = {"policy": "reach", **labels}.items()
    samples = [s for f in families.values() for s in f.samples if s.name == name and wanted <= s.labels.items()]
    assert len(samples) == 1, (name, labels, samples)
    return samples[0].value


@pytest.fixture
def instruments() -> Instruments:
    return Instruments("reach")


def test_every_metric_has_the_name_kind_and_labels_of_the_catalogue(instruments):
    instruments.started(GraphAdapter(), "r1", TIMINGS, {"load": 3.0, "calibrate": 2.0}, lambda: (10, 20))
    instruments.batch(BatchResult((np.zeros((2, 2), np.float32),), 1, 1.0, 8.0, 0.5), 10.0)
    families = scrape(instruments)
    # Those of several replicas are counted where replicas are started.
    own = [metric for metric in metrics.WORKER_METRICS if not metric.name.startswith("taktline_worker_replica")]
    for metric in own:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        found = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert found == set(metric.labels), metric.name
    ours = {name for name in families if name.startswith("taktline_")}
    assert ours == {metric.name.removesuffix("_total") for metric in own}


def test_graphs_caches_and_memory_are_read_at_each_scrape(instruments):
    memory = [1, 2]
    instruments.started(GraphAdapter(), "r1", TIMINGS, {"load": 3.0, "calibrate": 2.0}, lambda: tuple(memory))
    memory[:] = [30, 40]
    families = scrape(instruments)
    assert value(families, "taktline_worker_graphs") == 3
    assert value(families, "taktline_worker_graph_memory_bytes") == 350
    assert value(families, "taktline_worker_graph_capture_seconds", batch="1") == 0.75
    assert value(families, "taktline_worker_cache_lookups_total", cache="prefix", result="hit") == 3
    assert value(families, "taktline_worker_cache_lookups_total", cache="prefix", result="miss") == 1
    assert value(families, "taktline_worker_gpu_memory_bytes", kind="reserved") == 40
    assert value(families, "taktline_worker_calibration_ms", batch="4", quantile="0.99") == 25.0
    assert value(families, "taktline_worker_start_seconds", stage="load") == 3.0
    assert value(families, "taktline_worker_info", revision="r1", device="cuda:0", precision="bf16") == 1


def test_an_eager_engine_on_a_cpu_has_no_graphs_and_no_gpu_memory(instruments):
    instruments.started(EagerAdapter(), "r1", TIMINGS, {"load": 3.0, "calibrate": 2.0}, lambda: None)
    families = scrape(instruments)
    assert value(families, "taktline_worker_graphs") == 0
    assert not families["taktline_worker_gpu_memory_bytes"].samples
    assert not families["taktline_worker_cache_lookups"].samples


def test_phases_and_busy_time_count_what_the_engine_ran_and_nothing_else(instruments):
    bad = TaktlineError(ErrorCode.IMAGE_CORRUPT, "no JPEG", "send one")
    chunk = np.zeros((2, 2), np.float32)
    instruments.batch(BatchResult((chunk, bad), 2, 1.0, 8.0, 0.5), 10.0)
    instruments.batch(BatchResult((bad,), 0, 1.0, 0.0, 0.0), 1.0)
    instruments.dropped()
    families = scrape(instruments)
    assert value(families, "taktline_worker_items_total", code="ok") == 1
    assert value(families, "taktline_worker_items_total", code="image_corrupt") == 2
    assert value(families, "taktline_worker_engine_busy_seconds_total") == pytest.approx(0.008)
    assert value(families, "taktline_worker_dropped_batches_total") == 1
    for phase, spent in zip(metrics.WORKER_PHASES, (1.0, 8.0, 0.5, 10.0), strict=True):
        assert value(families, "taktline_worker_phase_ms_sum", phase=phase) == spent
        assert value(families, "taktline_worker_phase_ms_count", phase=phase) == 1
