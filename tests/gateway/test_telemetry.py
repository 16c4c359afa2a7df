"""Metrics in memory: their names and labels are the catalogue's, their number is bounded, each miss has one cause."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse_text
from taktline_gateway.telemetry import Levels, PredictedTime, Telemetry, margin_of, miss_cause
from taktline_protocol import Timings, metrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
LEVELS = Levels(
    policy="reach",
    depth=3,
    in_flight=2,
    usable={"h100": 2, "a40": 0},
    states={("h100", "busy"): 1, ("h100", "idle"): 1, ("a40", "down"): 1},
    predicted=(PredictedTime("h100", "r1", 1, 10.0, 12.0), PredictedTime("h100", "r1", 1, 11.0, 11.5)),
)


def timings(observe=0.0, transfer=1.0, queue=2.0, inference=10.0, actuate=0.0) -> Timings:
    return Timings(observe_ms=observe, transfer_ms=transfer, queue_ms=queue, inference_ms=inference, actuate_ms=actuate)


def samples(telemetry: Telemetry) -> dict[tuple[str, frozenset], float]:
    text = telemetry.exposition()[0].decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def total(telemetry: Telemetry, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (sample, found), value in samples(telemetry).items() if sample == name and wanted <= found)


@pytest.fixture
def telemetry() -> Telemetry:
    made = Telemetry()
    made.policy_served("reach")
    made.watch_levels(lambda: [LEVELS])
    return made


def test_every_metric_has_the_name_kind_and_labels_of_the_catalogue(telemetry):
    telemetry.answered("reach", "h100", "r1", timings(), 5.0, None)
    telemetry.answered("reach", "h100", "r1", timings(), -5.0, "queue")
    telemetry.refused("reach", "overloaded", missed=True)
    telemetry.superseded("reach")
    telemetry.control_cycle("reach", 400.0, 420.0)
    telemetry.batch("reach", "h100", "r1", 3)
    telemetry.batch_finished("reach", "h100", "r1", 3, 4, 0.011, 0.010)
    families = {family.name: family for family in parse_text(telemetry.exposition()[0].decode())}
    for metric in metrics.GATEWAY_METRICS:
        family = families[metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        found = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert found == set(metric.labels), metric.name
    ours = {name for name in families if name.startswith("taktline_")}
    assert ours == {m.name.removesuffix("_total") for m in metrics.GATEWAY_METRICS}, "nothing outside the catalogue"


def test_a_policy_starts_at_zero(telemetry):
    assert total(telemetry, "taktline_requests_total", policy="reach") == 0
    assert (
        "taktline_deadline_misses_total",
        _labels(policy="reach", pool="", revision="", cause="refused"),
    ) in samples(telemetry)


def test_padding_and_predicted_times(telemetry):
    telemetry.batch_finished("reach", "h100", "r1", 3, 4, 0.012, 0.010)
    telemetry.batch_finished("reach", "h100", "r1", 0, 0, 0.001, 0.010)
    assert total(telemetry, "taktline_batch_rows_total", rows="observation") == 3
    assert total(telemetry, "taktline_batch_rows_total", rows="padding") == 1
    assert total(telemetry, "taktline_t_sync_ms_sum", batch="4") == pytest.approx(12.0)
    assert total(telemetry, "taktline_t_sync_measured_ratio_count") == 2
    slowest = {"policy": "reach", "pool": "h100", "revision": "r1", "batch": "1"}
    assert total(telemetry, "taktline_t_sync_predicted_ms", quantile="0.5", **slowest) == 11.0
    assert total(telemetry, "taktline_workers", pool="a40") == 0
    assert total(telemetry, "taktline_workers_by_state", pool="a40", state="down") == 1
    assert total(telemetry, "taktline_workers_by_state", pool="h100", state="busy") == 1


def test_the_workers_of_a_candidate_are_counted_with_the_policys(telemetry):
    candidate = Levels("reach", 1, 1, {"h100": 1, "h200": 1}, {("h100", "idle"): 1, ("h200", "busy"): 1})
    both = LEVELS.with_candidate(candidate)
    assert (both.depth, both.in_flight) == (4, 3)
    assert both.usable == {"h100": 3, "a40": 0, "h200": 1}
    assert both.states == {("h100", "busy"): 1, ("h100", "idle"): 2, ("a40", "down"): 1, ("h200", "busy"): 1}


def test_what_a_client_invents_makes_no_series(telemetry):
    before = len(samples(telemetry))
    for number in range(1000):
        telemetry.refused(f"invented-{number}", "unknown_policy", missed=False)
    assert len(samples(telemetry)) == before + 1
    assert total(telemetry, "taktline_requests_total", policy=metrics.UNKNOWN_POLICY) == 1000


def test_months_of_rollouts_keep_the_number_of_series_bounded(telemetry):
    def serve(revision: int) -> None:
        telemetry.answered("reach", "h100", f"r{revision}", timings(), 1.0, None)
        telemetry.batch("reach", "h100", f"r{revision}", 2)
        telemetry.batch_finished("reach", "h100", f"r{revision}", 2, 2, 0.01, 0.01)

    for revision in range(40):
        serve(revision)
    before = len(samples(telemetry))
    for revision in range(40, 100):
        serve(revision)
    assert len(samples(telemetry)) == before, "old revisions go as new ones come"
    assert total(telemetry, "taktline_goodput_total", revision="r99") == 1
    assert total(telemetry, "taktline_requests_total", code="ok") == 100, "what has no revision label forgets nothing"


def test_policies_that_come_and_go_keep_the_number_of_series_bounded(telemetry):
    def cycle(number: int) -> None:
        telemetry.policy_served(f"p{number}")
        telemetry.answered(f"p{number}", "h100", "r1", timings(), 1.0, None)
        telemetry.policy_gone(f"p{number}")

    for number in range(100):
        cycle(number)
    before = len(samples(telemetry))
    for number in range(100, 150):
        cycle(number)
    assert len(samples(telemetry)) == before
    assert total(telemetry, "taktline_goodput_total", policy="p149") == 1, "its last counts are still scraped"


def test_a_policy_that_comes_back_keeps_its_counts(telemetry):
    telemetry.answered("reach", "h100", "r1", timings(), 1.0, None)
    telemetry.policy_gone("reach")
    telemetry.answered("reach", "h100", "r1", timings(), 1.0, None)  # was in flight
    telemetry.policy_served("reach")
    telemetry.answered("reach", "h100", "r1", timings(), 1.0, None)
    assert total(telemetry, "taktline_goodput_total", policy="reach") == 3


def test_exemplars_lead_to_the_request_where_openmetrics_is_asked_for(telemetry):
    exemplar = {"trace_id": "0af7651916cd43dd8448eb211c80319c"}
    telemetry.answered("reach", "h100", "r1", timings(), -3.0, "inference", exemplar)
    telemetry.refused("reach", "overloaded", missed=True, exemplar={"request_id": "q-1"})
    text, media = telemetry.exposition(OPENMETRICS)
    assert media.startswith("application/openmetrics-text")
    found = dict(re.findall(r"^(\w+).* # \{(.*?)\} ", text.decode(), re.MULTILINE))
    assert found["taktline_control_margin_ms_bucket"] == 'trace_id="0af7651916cd43dd8448eb211c80319c"'
    assert found["taktline_refused_total"] == 'request_id="q-1"'
    plain, media = telemetry.exposition("text/plain")
    assert media.startswith("text/plain")
    assert b"trace_id" not in plain


_term = st.floats(0, 5000, allow_nan=False)


@given(_term, _term, _term, _term, _term, st.floats(-100, 10_000, allow_nan=False))
def test_a_miss_has_exactly_one_cause_and_only_a_miss_has_one(observe, transfer, queue, inference, actuate, budget):
    spent = timings(observe, transfer, queue, inference, actuate)
    cause = miss_cause(budget, spent)
    margin = margin_of(budget, spent)
    assert (cause is None) == (margin >= 0)
    assert margin == pytest.approx(budget + observe - spent.critical_ms, abs=1e-6)
    if cause is not None:
        assert cause in metrics.MISS_CAUSES


def _labels(**labels: str) -> frozenset:
    return frozenset(labels.items())
