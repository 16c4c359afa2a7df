"""Traces of a real gateway process, as a collector gets them over OTLP."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from taktline import Robot
from taktline_protocol.codecs import MediaType, encode

from tests.gateway.conftest import Stack, until
from tests.gateway.otlp_collector import Collector, attributes

PARENT = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def traced(collector, tmp_path_factory):
    """A stack whose gateway traces only what robots trace, so that each test knows its spans."""
    made = Stack(tmp_path_factory.mktemp("traced"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**collector.environment, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}.items():
            patch.setenv(name, value)
        made.write_routes(made.start_worker())
        made.start_gateway()
    made.wait_workers(1)
    yield made
    made.stop()


@pytest.fixture
def trace() -> str:
    """A trace id that no other test has."""
    return os.urandom(16).hex()


@pytest.fixture
def traceparent(trace) -> str:
    """What a robot sends that samples its trace."""
    return f"00-{trace}-{PARENT}-01"


def act(stack, observation, traceparent: str) -> httpx.Response:
    headers = {"content-type": "application/msgpack", "traceparent": traceparent}
    url = f"{stack.url}/v1/policies/scripted/act"
    return stack.http.post(url, content=encode(observation, MediaType.MSGPACK), headers=headers)


def test_a_request_from_the_robot_to_the_worker(traced, collector, trace, traceparent):
    answer = act(traced, traced.observation(robot="arm-1"), traceparent)
    assert answer.status_code == 200
    until(lambda: "taktline-gateway act" in collector.of_trace(trace), "the trace arriving")
    spans = {name.split(" ", 1)[1]: found[0] for name, found in collector.of_trace(trace).items()}
    assert set(spans) == {"act", "admission", "queue", "batch", "reply"}
    root = spans.pop("act")
    assert root.parent_span_id.hex() == PARENT, "a child of the robot's own span"
    assert all(span.parent_span_id == root.span_id for span in spans.values())
    about = attributes(root)
    assert about["taktline.policy"] == "scripted"
    assert about["taktline.robot"] == "arm-1"
    assert about["taktline.code"] == "ok"
    assert about["taktline.request_id"] == answer.headers["x-request-id"]
    # The parts follow one another without a gap or an overlap, and fill the whole.
    order = [spans[name] for name in ("admission", "queue", "batch", "reply")]
    assert order[0].start_time_unix_nano == root.start_time_unix_nano
    assert order[-1].end_time_unix_nano == root.end_time_unix_nano
    for first, second in itertools.pairwise(order):
        assert abs(second.start_time_unix_nano - first.end_time_unix_nano) < 1e6


def test_members_of_a_batch_are_linked_and_each_has_its_own_trace(traced, collector):
    traces = [os.urandom(16).hex() for _ in range(4)]

    def one(number: int) -> int:
        observation = traced.observation(robot=f"arm-{number}")
        return act(traced, observation, f"00-{traces[number - 1]}-{PARENT}-01").json()["batch_size"]

    with ThreadPoolExecutor(8) as pool:
        busy = pool.submit(traced.act, robot="first", instruction="slow 600")
        until(lambda: traced.metric("taktline_in_flight") == 1, "the first batch being on the worker")
        others = [
            pool.submit(act, traced, traced.observation(robot=f"arm-{i + 1}"), f"00-{traces[i]}-{PARENT}-01")
            for i in range(4)
        ]
        busy.result()
        [other.result() for other in others]
    until(lambda: all("taktline-gateway act" in collector.of_trace(t) for t in traces), "all traces arriving")
    batches = [collector.of_trace(trace)["taktline-gateway batch"][0] for trace in traces]
    together = [batch for batch in batches if attributes(batch)["taktline.batch_size"] == 4]
    assert len(together) == 4
    assert {link.trace_id.hex() for link in together[0].links} == set(traces[1:])


def test_a_refused_request_has_its_trace_too(traced, collector, trace, traceparent):
    answer = act(traced, traced.observation(instruction=""), traceparent)
    assert answer.status_code == 422
    until(lambda: "taktline-gateway act" in collector.of_trace(trace), "the trace arriving")
    (span,) = collector.of_trace(trace)["taktline-gateway act"]
    assert attributes(span)["taktline.code"] == "instruction_invalid"
    assert span.status.code == 2
    assert span.status.message.startswith("instruction_invalid: ")


def test_a_failed_batch_shows_in_the_trace(traced, collector, trace, traceparent):
    answer = act(traced, traced.observation(instruction="fail"), traceparent)
    assert answer.status_code == 502
    until(lambda: "taktline-gateway act" in collector.of_trace(trace), "the trace arriving")
    batches = collector.of_trace(trace)["taktline-gateway batch"]
    assert all(batch.status.code == 2 for batch in batches)


@pytest.mark.parametrize(
    ("share", "spans"),
    [({"weight": 100.0}, {"batch"}), ({"mirror": 100.0}, {"batch", "mirrored batch"})],
)
def test_a_request_to_a_candidate_has_its_batch_in_its_trace(traced, collector, share, spans):
    """The ticket that goes into the candidate's batch is another one than the request waits for."""
    serving = next(iter(traced.workers))
    trying = traced.start_worker(revision="r2")
    trial = {"id": "c", "step": "s", "revision": "r2", "targets": [{"address": trying, "revision": "r2"}], **share}
    traced.write_routes(serving, candidate={"tolerance": 0.01, "hold_s": 0, **trial})
    sent = []

    def seen() -> bool:
        trace = os.urandom(16).hex()
        sent.append(trace)
        answer = act(traced, traced.observation(robot=f"tried-{trace}"), f"00-{trace}-{PARENT}-01")
        assert answer.status_code == 200
        for one in sent:
            found = {name.split(" ", 1)[1]: span for name, span in collector.of_trace(one).items()}
            workers = {attributes(span)["taktline.worker"] for name in spans & set(found) for span in found[name]}
            if spans <= set(found) and trying in workers:
                return True
        return False

    try:
        until(seen, "a trace with the candidate's batch")
    finally:
        traced.write_routes(serving)


def test_logs_and_exemplars_name_the_trace(traced, trace, traceparent):
    act(traced, traced.observation(robot="late", budget_ms=600.0, instruction="slow 800"), traceparent)

    def missed() -> list[str]:
        lines = [line for line in traced.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line["trace_id"] for line in map(json.loads, lines) if line["message"] == "deadline_missed"]

    until(lambda: trace in missed(), "the line of the late answer, which is written behind it")
    text = traced.http.get(f"{traced.url}/metrics", headers={"accept": "application/openmetrics-text"}).text
    exemplars = re.findall(r'^(\w+)\{.* # \{trace_id="(\w+)"\}', text, re.MULTILINE)
    assert ("taktline_deadline_misses_total", trace) in exemplars
    assert ("taktline_control_margin_ms_bucket", trace) in exemplars


def test_what_the_robot_does_not_sample_is_not_traced(traced, collector, trace, traceparent):
    act(traced, traced.observation(), traceparent[:-1] + "0")
    act(traced, traced.observation(), "nonsense")
    act(traced, traced.observation(), traceparent)
    until(lambda: "taktline-gateway act" in collector.of_trace(trace), "the trace arriving")
    assert len(collector.of_trace(trace)["taktline-gateway act"]) == 1
    assert not [span for _, span in collector.spans.values() if span.name == "act" and not span.parent_span_id]


def test_an_observation_without_headers_may_carry_the_context_itself(traced, collector, trace, traceparent):
    assert traced.act(traceparent=traceparent)[0] == 200
    until(lambda: "taktline-gateway act" in collector.of_trace(trace), "the trace arriving")


def test_without_the_variables_nothing_is_traced_nor_imported():
    code = (
        "import sys; from taktline_gateway.service import Gateway\n"
        "from taktline_protocol.tracing import tracing_from_environment\n"
        "on = {'OTEL_TRACES_EXPORTER': 'otlp'}\n"
        "assert tracing_from_environment('x', '1', {}) is None\n"
        "assert tracing_from_environment('x', '1', {'OTEL_SDK_DISABLED': 'true', **on}) is None\n"
        "endpoint = {'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://127.0.0.1:4318'}\n"
        "assert tracing_from_environment('x', '1', {**endpoint, 'OTEL_TRACES_EXPORTER': 'none'}) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_exporter_is_refused_at_start(bare_stack, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    bare_stack.write_routes()
    with pytest.raises(AssertionError, match=r"OTEL_TRACES_EXPORTER is 'zipkin'.*set it to otlp"):
        bare_stack.start_gateway()
    assert bare_stack.gateway.wait(20) == 2


def test_a_dead_collector_costs_no_request_and_no_exit(bare_stack, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    bare_stack.write_routes(bare_stack.start_worker())
    bare_stack.start_gateway("--drain-settle-s", "0")
    bare_stack.wait_workers(1)
    assert [bare_stack.act()[0] for _ in range(5)] == [200] * 5
    bare_stack.gateway.terminate()
    assert bare_stack.gateway.wait(20) == 0


@pytest.mark.parametrize("protocol", ["stream", "http"])
def test_the_sdk_carries_the_span_of_the_robots_program(traced, collector, protocol):
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("robot")
    frame = np.zeros((8, 8, 3), np.uint8)
    with (
        Robot(traced.url, "scripted", f"sdk-{protocol}", transport=protocol) as robot,
        tracer.start_as_current_span("control cycle") as span,
    ):
        robot.act({"front": frame, "wrist": frame}, [0.0] * 6, "go", budget_ms=5000.0)
    trace = f"{span.get_span_context().trace_id:032x}"
    until(lambda: "taktline-gateway act" in collector.of_trace(trace), "the trace arriving")
    (served,) = collector.of_trace(trace)["taktline-gateway act"]
    assert served.parent_span_id.hex() == f"{span.get_span_context().span_id:016x}"
