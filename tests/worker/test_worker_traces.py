"""The worker's spans: phases in the trace of each traced member, nothing for the others."""

from __future__ import annotations

import itertools
import time

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.trace_context import MEMBERS_KEY, TraceContext, format_members
from taktline_protocol.tracing import Tracing
from taktline_worker.engine import BatchResult
from taktline_worker.server import ServeOptions, Worker
from taktline_worker.tracing import BatchTraces, phases

from tests.gateway.otlp_collector import Collector, attributes

CHUNK = np.zeros((2, 2), np.float32)
BAD = TaktlineError(ErrorCode.IMAGE_CORRUPT, "no JPEG", "send one")
RESULT = BatchResult((CHUNK, BAD, CHUNK), 4, 2.0, 15.0, 1.0)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter) -> BatchTraces:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return BatchTraces(Tracing(provider, "taktline-worker"))


def metadata(**members: bool) -> list[tuple[str, str]]:
    contexts = ((int(i[1:]), TraceContext(int(i[1:]) + 1, 7, sampled)) for i, sampled in members.items())
    return [("user-agent", "grpc"), (MEMBERS_KEY, format_members(contexts))]


def test_each_traced_member_gets_the_phases_in_its_own_trace(traces, exporter):
    traces.batch(metadata(m0=True, m1=True, m2=False), time.monotonic() - 0.05, RESULT, "r1")
    spans = exporter.get_finished_spans()
    assert {span.context.trace_id for span in spans} == {1, 2}, "the third is not sampled"
    for trace_id, code in ((1, "ok"), (2, "image_corrupt")):
        mine = {span.name: span for span in spans if span.context.trace_id == trace_id}
        worker = mine.pop("worker")
        assert worker.parent.span_id == 7
        assert worker.attributes["taktline.code"] == code
        assert worker.attributes["taktline.bucket"] == 4
        assert worker.status.is_ok is (code == "ok")
        assert set(mine) == {"preprocess", "wait", "engine", "postprocess"}
        assert all(span.parent.span_id == worker.context.span_id for span in mine.values())
        assert mine["engine"].end_time - mine["engine"].start_time == pytest.approx(15e6, abs=1e4)


def test_phases_follow_one_another_and_what_is_left_is_the_wait_for_the_engine():
    assert [name for name, _, _ in phases(RESULT, 10.0, 10.018)] == ["preprocess", "engine", "postprocess"]
    waited = phases(RESULT, 10.0, 10.1)
    assert [name for name, _, _ in waited] == ["preprocess", "wait", "engine", "postprocess"]
    for (_, _, end), (_, begin, _) in itertools.pairwise(waited):
        assert begin == pytest.approx(end)
    assert phases(BatchResult((BAD,), 0, 1.0, 0.0, 0.0), 10.0, 10.1) == (), "nothing was run"


@pytest.mark.parametrize(
    "told", ["", "nonsense", "0=00-0-0-01", "99=00-" + "1" * 32 + "-" + "2" * 16 + "-01", "-1=00-" + "1" * 32]
)
def test_metadata_that_names_no_member_writes_no_span(traces, exporter, told):
    traces.batch([(MEMBERS_KEY, told)], time.monotonic(), RESULT, "r1")
    traces.batch([], time.monotonic(), RESULT, "r1")
    assert exporter.get_finished_spans() == ()


def test_without_tracing_nothing_is_even_read():
    BatchTraces(None).batch(None, 0.0, RESULT, "r1")
    BatchTraces(None).close()


def test_a_real_worker_exports_its_phases_over_otlp(folders, config_of, tmp_path, monkeypatch):
    collector = Collector()
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    config = config_of(folders.lerobot(tmp_path / "policy", "pi05"), solver_steps=1, buckets=(1,))
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0))
    worker.start()
    state = worker_pb2.Tensor(dtype="float32", shape=[8], data=bytes(32))
    request = worker_pb2.InferRequest(policy="tiny", items=[worker_pb2.InferItem(request_id="q", state=state)])
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        worker_pb2_grpc.WorkerStub(channel).Infer(request, timeout=20, metadata=metadata(m0=True))
    worker.drain()
    (span,) = collector.of_trace(f"{1:032x}")["taktline-worker worker"]
    assert span.parent_span_id.hex() == f"{7:016x}"
    assert attributes(span)["taktline.code"] == "camera_missing"
    collector.close()
