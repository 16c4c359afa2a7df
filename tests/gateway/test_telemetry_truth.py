"""Deadline truth: robots, log and metrics agree on a short run with faults, and the comparison can tell a lie."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
import taktline
from taktline_protocol import Timings

from benchmarks.gateway.deadline_truth import measure
from benchmarks.gateway.truth_books import Metrics, cause_of, compare, unsent
from benchmarks.gateway.truth_robots import Seen
from tests.gateway.test_telemetry import timings

EXPOSITION = """
taktline_requests_total{policy="p",code="ok"} 2
taktline_requests_total{policy="p",code="overloaded"} 1
taktline_deadline_misses_total{policy="p",pool="h",revision="r",cause="queue"} 1
taktline_deadline_misses_total{policy="p",pool="",revision="",cause="refused"} 1
taktline_refused_total{policy="p",code="overloaded"} 1
taktline_goodput_total{policy="p",pool="h",revision="r"} 1
taktline_control_margin_ms_bucket{policy="p",pool="h",revision="r",le="0.0"} 1
""" + "".join(
    f'taktline_latency_term_ms_{part}{{policy="p",pool="h",revision="r",term="{term}"}} {value}\n'
    for term, total in (("observe", 4), ("transfer", 2), ("queue", 32), ("inference", 20), ("actuate", 0))
    for part, value in (("count", 2), ("sum", total))
)


@pytest.mark.slow
def test_a_run_with_every_fault_is_accounted_for_to_the_request(tmp_path):
    findings, figures = measure(count=500, robots=16, think_s=0.01, seed=1, folder=tmp_path)
    assert [(finding.claim, finding.wrong) for finding in findings if not finding.holds] == []
    assert figures["requests"] >= 500
    assert {"ok", "deadline_unreachable", "superseded", "state_invalid"} <= set(figures["outcomes"])
    assert {"inference", "refused"} <= set(figures["misses"])


class Chunk:
    """What the comparison reads of a chunk."""

    def __init__(self, spent: Timings) -> None:
        self.timings = spent


def story():
    """Two answers, the second late by its queue, and a refusal: (seen, lines, exposition)."""
    good = timings(observe=2.0, transfer=1.0, queue=2.0, inference=10.0)
    late = timings(observe=2.0, transfer=1.0, queue=30.0, inference=10.0)
    seen = [
        Seen("t1", "ok", 10.0, 10.014, 100.0, Chunk(good), 16.0),
        Seen("t2", "ok", 20.0, 20.042, 25.0, Chunk(late), 44.0),
        Seen("t3", "overloaded", 30.0, 30.001, 50.0),
    ]
    lines = [
        line("t1", good, 87.0, received=10.0005, answered=10.0135),
        line("t2", late, -16.0, received=20.0005, answered=20.0415, cause="queue"),
        {"message": "request_refused", "request_id": "t3", "code": "overloaded", "cause": "refused"},
    ]
    return seen, lines, EXPOSITION


def line(request_id: str, spent: Timings, margin_ms: float, received: float, answered: float, **more) -> dict:
    terms = {
        f"{term}_ms": getattr(spent, f"{term}_ms") for term in ("observe", "transfer", "queue", "inference", "actuate")
    }
    about = {"message": "answered", "request_id": request_id, "code": "ok", "margin_ms": margin_ms}
    return {**about, **terms, "received_at_s": received, "answered_at_s": answered, **more}


def wrong(seen, lines, exposition) -> list[str]:
    return [finding.claim for finding in compare(seen, lines, Metrics(exposition)) if not finding.holds]


def test_a_true_story_holds():
    assert wrong(*story()) == []


def test_what_the_sdk_answers_by_itself_is_no_request_of_the_gateway():
    seen, lines, exposition = story()
    seen.append(Seen("sdk-1#1", "gateway_unreachable", 1.0, 1.1, 15.0))
    assert unsent(seen, lines) == {"sdk-1#1"}
    assert wrong(seen, lines, exposition) == []
    seen.append(Seen("sdk-1#2", "worker_failed", 1.0, 1.1, 15.0))
    assert "each request of a robot is in the log exactly once" in wrong(seen, lines, exposition)


@pytest.mark.parametrize(
    ("more", "holds"),
    [({}, True), ({"transfer_ms": 0.9}, False), ({"transfer_ms": 4.5}, False), ({"queue_ms": 1.9}, False)],
)
def test_a_chunk_of_the_sdk_has_the_network_in_its_terms_and_nothing_else(more, holds):
    seen, lines, exposition = story()
    lines[0]["received_at_s"], lines[0]["answered_at_s"] = 10.0015, 10.0145
    spent = msgspec.structs.replace(seen[0].chunk.timings, **{"transfer_ms": 2.6, **more})
    made = taktline.Chunk(np.zeros((1, 1), np.float32), 0.1, 9.998, 10.1, spent, 87.0, 1, "p", "r", "w", 1, "t1")
    seen[0] = Seen("t1", "ok", 10.0, 10.015, 100.0, made, 17.0)
    claims = wrong(seen, lines, exposition)
    assert any(claim.startswith("the SDK adds") for claim in claims) is not holds
    assert not holds or claims == []


LIES = {
    "a request that the log does not have": (lambda seen, lines: lines.pop(0), "each request of a robot is in the log"),
    "a request told twice": (lambda seen, lines: lines.append(lines[0]), "each request of a robot is in the log"),
    "a request of no robot": (lambda seen, lines: seen.pop(0), "the log has no request that no robot sent"),
    "another outcome": (lambda seen, lines: lines[2].update(code="draining"), "robot and log agree on each outcome"),
    "another cause": (lambda seen, lines: lines[1].update(cause="transfer"), "robot and log agree on each miss"),
    "a miss without a cause": (lambda seen, lines: lines[1].pop("cause"), "a line has a cause if and only if"),
    "a cause without a miss": (lambda seen, lines: lines[0].update(cause="queue"), "a line has a cause if and only if"),
    "a term that is too small": (lambda seen, lines: lines[0].update(queue_ms=0.5), "the five terms are the path"),
    "a path that is longer": (
        lambda seen, lines: seen.__setitem__(0, _longer(seen[0])),
        "the five terms and the network",
    ),
    "a margin that is too good": (
        lambda seen, lines: (lines[1].update(margin_ms=16.0), lines[1].pop("cause")),
        "where robot and gateway differ on a miss",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_in_the_log_is_found(lie):
    seen, lines, exposition = copy.deepcopy(story())
    tell, claim = LIES[lie]
    tell(seen, lines)
    assert any(found.startswith(claim) for found in wrong(seen, lines, exposition))


@pytest.mark.parametrize(
    ("sample", "claim"),
    [
        ('code="overloaded"} 1\ntaktline_deadline', "requests by code"),
        ('cause="queue"} 1', "misses by cause"),
        ("taktline_goodput_total", "chunks in time"),
        ('le="0.0"} 1', "negative margins"),
    ],
)
def test_a_lie_in_the_metrics_is_found(sample, claim):
    seen, lines, exposition = story()
    assert sample in exposition
    at = exposition.index("1", exposition.index(sample) + len(sample) - 1)
    if sample.endswith("deadline"):
        at = exposition.index(sample) + sample.index("1")
    if sample.endswith("total"):
        at = exposition.index("} 1", exposition.index(sample)) + 2
    changed = exposition[:at] + "7" + exposition[at + 1 :]
    assert any(found.startswith(claim) for found in wrong(seen, lines, changed))


@pytest.mark.parametrize(
    ("budget_ms", "cause"), [(100.0, None), (13.0, None), (12.9, "transfer"), (11.0, "queue"), (9.0, "inference")]
)
def test_the_cause_written_anew(budget_ms, cause):
    assert cause_of(budget_ms, timings(transfer=1.0, queue=2.0, inference=10.0)) == cause


def _longer(one: Seen) -> Seen:
    return Seen(one.request_id, one.outcome, one.sent_at, one.received_at, one.budget_ms, one.chunk, 20.0)
