"""The gRPC service in this process: batches, refusals, deadlines, cancellation, one run at a time, draining."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from taktline_protocol import ErrorCode, worker_pb2, worker_pb2_grpc
from taktline_protocol.batch_frames import Call
from taktline_worker.batch_connection import CallContext
from taktline_worker.jpeg_threads import BegunFrame
from taktline_worker.server import SERVICE_NAME, ServeOptions, Worker
from taktline_worker.service import MAX_WAITING_BATCHES

from tests.waiting import until


@pytest.fixture(scope="module")
def worker(folders: Any, config_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    path = folders.lerobot(tmp_path_factory.mktemp("service") / "policy", "pi05")
    config = config_of(path, solver_steps=2, buckets=(1, 2))
    made = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0))
    made.start()
    yield made
    made.drain()


@pytest.fixture
def channel(worker: Worker) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as made:
        yield made


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return worker_pb2_grpc.WorkerStub(channel)


@pytest.fixture
def request_of(observations: Any) -> Callable[..., worker_pb2.InferRequest]:
    def item(index: int, **changes: Any) -> worker_pb2.InferItem:
        observation = observations.make(seed=index)
        values: dict[str, Any] = {
            "request_id": f"q{index}",
            "robot_id": f"robot-{index}",
            "seq": index,
            "images": {
                name: worker_pb2.Image(encoding=image.encoding, data=image.data)
                for name, image in observation.images.items()
            },
            "state": worker_pb2.Tensor(dtype="float32", shape=[8], data=observation.state.astype("<f4").tobytes()),
            "instruction": observation.instruction,
            "seed": index,
        }
        return worker_pb2.InferItem(**(values | changes))

    def request(*changes: dict[str, Any], policy: str = "tiny", revision: str = "") -> worker_pb2.InferRequest:
        items = [item(index, **change) for index, change in enumerate(changes)]
        return worker_pb2.InferRequest(policy=policy, revision=revision, items=items)

    return request


@pytest.fixture
def gate(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Holds every run of the engine until it is opened, and counts the runs."""

    class Gate:
        def __init__(self) -> None:
            self.opened, self.runs, self.most, self._now = threading.Event(), 0, 0, 0
            self.entered = threading.Semaphore(0)

    made, run = Gate(), worker.engine.adapter.run

    def held(rows: Any, bucket: int) -> Any:
        made.runs += 1
        made._now += 1
        made.most = max(made.most, made._now)
        made.entered.release()
        assert made.opened.wait(20)
        try:
            return run(rows, bucket)
        finally:
            made._now -= 1

    monkeypatch.setattr(worker.engine.adapter, "run", held)
    yield made
    made.opened.set()
    # The engine's thread must be free again before the next test counts its runs.
    worker.engine._lane.submit(lambda: None).result(20)


def test_health_names_both_services(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert SERVICE_NAME == "taktline.worker.v1.Worker"
    for service in ("", SERVICE_NAME):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_info_tells_what_a_gateway_needs(stub: Any) -> None:
    info = stub.Info(worker_pb2.InfoRequest(), timeout=20)
    assert (info.policy, info.family, info.revision, info.precision) == ("tiny", "pi05", "r1", "fp32")
    assert list(info.cameras) == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert (info.state_dim, info.action_dim, info.horizon, info.dt_s) == (8, 7, 10, 0.05)
    assert [entry.batch for entry in info.t_sync] == [1, 2]
    for entry in info.t_sync:
        assert 0 < entry.median_ms <= entry.p99_ms


def test_actions_come_back_in_order_and_depend_on_the_seed(stub: Any, request_of: Any) -> None:
    answer = stub.Infer(request_of({}, {}, {}, revision="r1"), timeout=20)
    assert [result.request_id for result in answer.results] == ["q0", "q1", "q2"]
    chunks = [
        np.frombuffer(result.actions.data, "<f4").reshape(tuple(result.actions.shape)) for result in answer.results
    ]
    assert [chunk.shape for chunk in chunks] == [(10, 7)] * 3
    assert not np.allclose(chunks[0], chunks[1])
    alone = stub.Infer(request_of({}), timeout=20).results[0].actions
    assert np.allclose(np.frombuffer(alone.data, "<f4").reshape(10, 7), chunks[0], atol=1e-5)
    assert (answer.bucket, answer.revision) == (2, "r1")
    assert answer.total_ms >= answer.preprocess_ms + answer.engine_ms + answer.postprocess_ms > 0


def test_bad_items_fail_alone(stub: Any, request_of: Any) -> None:
    nan = np.full(8, np.nan, "<f4").tobytes()
    answer = stub.Infer(
        request_of(
            {},
            {"state": worker_pb2.Tensor(dtype="float32", shape=[8], data=nan)},
            {"state": worker_pb2.Tensor(dtype="float32", shape=[8], data=b"123")},
            {"state": worker_pb2.Tensor(dtype="complex64", shape=[8], data=b"")},
            {"instruction": ""},
            {"images": {}},
            {},
        ),
        timeout=20,
    )
    codes = [result.error.code for result in answer.results]
    assert codes == ["", "state_invalid", "state_invalid", "state_invalid", "instruction_invalid", "camera_missing", ""]
    assert all(result.error.next_step for result in answer.results[1:6])
    assert answer.results[6].WhichOneof("outcome") == "actions"


@pytest.mark.parametrize(
    ("policy", "revision", "code"),
    [("other", "", ErrorCode.UNKNOWN_POLICY), ("tiny", "r2", ErrorCode.WORKER_UNAVAILABLE)],
)
def test_a_batch_for_another_policy_or_revision(
    stub: Any, request_of: Any, policy: str, revision: str, code: ErrorCode
) -> None:
    answer = stub.Infer(request_of({}, {}, policy=policy, revision=revision), timeout=20)
    assert [result.error.code for result in answer.results] == [code.value] * 2


def test_an_empty_batch_is_answered(stub: Any, request_of: Any) -> None:
    assert len(stub.Infer(request_of(), timeout=20).results) == 0


def test_only_one_batch_runs_at_a_time(worker: Worker, stub: Any, request_of: Any, gate: Any) -> None:
    calls = [stub.Infer.future(request_of({}), timeout=30) for _ in range(3)]
    assert gate.entered.acquire(timeout=20)
    gate.opened.set()
    assert all(call.result().results[0].WhichOneof("outcome") == "actions" for call in calls)
    assert (gate.runs, gate.most) == (3, 1)


def test_a_batch_whose_deadline_is_over_is_not_run(stub: Any, request_of: Any, gate: Any, worker: Worker) -> None:
    first = stub.Infer.future(request_of({}), timeout=30)
    assert gate.entered.acquire(timeout=20)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Infer(request_of({}), timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    time.sleep(0.5)  # the server counts from when the call came, and hears of its end a moment later
    gate.opened.set()
    first.result()
    stub.Infer(request_of({}), timeout=20)
    assert gate.runs == 2  # the first and the last


def test_a_cancelled_batch_is_not_run(stub: Any, request_of: Any, gate: Any, worker: Worker) -> None:
    first = stub.Infer.future(request_of({}), timeout=30)
    assert gate.entered.acquire(timeout=20)
    second = stub.Infer.future(request_of({}), timeout=30)
    until(lambda: worker.engine._lane._work_queue.qsize() == 1, "a batch that waits")
    second.cancel()
    time.sleep(1.0)  # the cancellation must reach the server before the engine is free
    gate.opened.set()
    first.result()
    stub.Infer(request_of({}), timeout=20)
    assert gate.runs == 2


def test_an_item_whose_budget_ran_out_while_it_waited_is_dropped_alone(
    stub: Any, request_of: Any, gate: Any, worker: Worker
) -> None:
    first = stub.Infer.future(request_of({}), timeout=30)
    assert gate.entered.acquire(timeout=20)
    second = stub.Infer.future(request_of({"budget_ms": 50.0}, {"budget_ms": 60_000.0}), timeout=30)
    until(lambda: worker.engine._lane._work_queue.qsize() == 1, "a batch that waits")
    time.sleep(0.1)
    gate.opened.set()
    first.result()
    late, good = second.result().results
    assert late.error.code == ErrorCode.DEADLINE_EXPIRED.value
    assert good.WhichOneof("outcome") == "actions"


def test_more_waiting_batches_than_places_are_refused_at_once(
    stub: Any, request_of: Any, gate: Any, worker: Worker
) -> None:
    first = stub.Infer.future(request_of({}), timeout=30)
    assert gate.entered.acquire(timeout=20)
    waiting = [stub.Infer.future(request_of({}), timeout=30) for _ in range(MAX_WAITING_BATCHES - 1)]
    until(lambda: worker.engine._lane._work_queue.qsize() == len(waiting), "all batches waiting")
    answer = stub.Infer(request_of({}), timeout=20)
    assert answer.results[0].error.code == ErrorCode.OVERLOADED.value
    # Health still answers while every place is taken.
    health = health_pb2_grpc.HealthStub(grpc.insecure_channel(f"127.0.0.1:{worker.port}"))
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == health_pb2.HealthCheckResponse.SERVING
    gate.opened.set()
    for call in (first, *waiting):
        assert call.result().results[0].WhichOneof("outcome") == "actions"


def test_a_drain_finishes_what_runs_and_takes_nothing_new(
    folders: Any, config_of: Any, tmp_path: Any, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folders.lerobot(tmp_path / "policy", "pi05"), solver_steps=1, buckets=(1,))
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.3))
    worker.start()
    entered, opened, run = threading.Event(), threading.Event(), worker.engine.adapter.run

    def held(rows: Any, bucket: int) -> Any:
        entered.set()
        assert opened.wait(20)
        return run(rows, bucket)

    monkeypatch.setattr(worker.engine.adapter, "run", held)
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        call = stub.Infer.future(request_of({}), timeout=30)
        assert entered.wait(20)
        drain = threading.Thread(target=worker.drain)
        drain.start()

        def not_serving() -> bool:
            try:
                status = health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=20).status
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
            return bool(status == health_pb2.HealthCheckResponse.NOT_SERVING)

        until(not_serving, "NOT_SERVING")

        def refused() -> bool:
            try:
                stub.Info(worker_pb2.InfoRequest(), timeout=20)
            except grpc.RpcError as error:
                return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
            return False

        until(refused, "a refused call")
        assert drain.is_alive()
        opened.set()
        assert call.result().results[0].WhichOneof("outcome") == "actions"
        drain.join(20)
        assert not drain.is_alive()


def images_in(observations: Any, kind: str, **size: int) -> dict[str, worker_pb2.Image]:
    frame = observations.image(kind, **size)
    return {
        name: worker_pb2.Image(encoding=frame.encoding, data=frame.data, shape=frame.shape)
        for name in observations.make().images
    }


def frames_of(request: worker_pb2.InferRequest) -> list[dict[str, Any]]:
    return [{name: (i.encoding, tuple(i.shape), i.data) for name, i in item.images.items()} for item in request.items]


def test_only_a_single_row_that_need_not_wait_is_begun_on_the_loop(
    worker: Worker, request_of: Any, observations: Any
) -> None:
    launching, begun, answers = False, [], []

    class Launching:
        """The worker's engine, as if a GPU had just taken what it was given."""

        def __getattr__(self, name: str) -> Any:
            return getattr(worker.engine, name)

        @property
        def launches_at_once(self) -> bool:
            return launching

        def begin(self, items: Any, *rest: Any, **more: Any) -> Any:
            begun.append(more["since"])
            return worker.engine.begin(items, *rest, **more)

    service = copy.copy(worker._batches._listener._infer.begin.__self__)
    service._engine = Launching()
    call = CallContext(Call(1, 60.0, 0, []))
    raw = {"images": images_in(observations, "raw")}
    one, two = request_of(raw), request_of(raw, raw)
    tail = request_of(
        raw | {"rtc": worker_pb2.Rtc(tail=worker_pb2.Tensor(dtype="float32", shape=[1, 7], data=bytes(28)))}
    )

    def images_of(request: Any) -> Any:
        return service.coming(request, frames_of(request))

    assert service.begin(one, images_of(one), call) is None
    launching = True
    assert service.begin(two, images_of(two), call) is None
    assert service.begin(tail, images_of(tail), call) is None
    for slow in (
        images_in(observations, "png"),
        images_in(observations, "jpeg"),  # on a CPU, without native threads
        images_in(observations, "raw", height=721, width=1280),
        raw["images"] | dict(list(images_in(observations, "png").items())[:1]),
    ):
        request = request_of({"images": slow})
        assert service.begin(request, images_of(request), call) is None
    rest = service.begin(one, images_of(one), call)
    assert rest is not None
    assert begun == [call.received]
    rest(answers.append)
    assert worker_pb2.InferResponse.FromString(answers[0]).results[0].actions.shape
    refused = service.begin(request_of({}, policy="other"), images_of(one), call)
    assert refused is not None
    refused(answers.append)
    assert answers[1].results[0].error.code == ErrorCode.UNKNOWN_POLICY.value
    assert len(begun) == 1


@pytest.mark.parametrize(("height", "on_the_loop"), [(720, True), (721, False)])
def test_a_row_of_frames_begun_by_native_threads_is_begun_on_the_loop_where_they_are_small(
    worker: Worker, request_of: Any, monkeypatch: pytest.MonkeyPatch, height: int, on_the_loop: bool
) -> None:
    service = copy.copy(worker._batches._listener._infer.begin.__self__)
    begun = BegunFrame(torch.empty(height, 1280, 3, dtype=torch.uint8), 0)
    monkeypatch.setattr(type(worker.engine), "launches_at_once", True)
    monkeypatch.setattr(worker.engine, "begin_frames", lambda frames: [begun] * len(frames))
    monkeypatch.setattr(worker.engine, "begin", lambda *_, **__: print)
    request = request_of({})
    rest = service.begin(request, service.coming(request, frames_of(request)), CallContext(Call(1, 60.0, 0, [])))
    assert (rest is not None) is on_the_loop


def test_a_launched_batch_is_answered_though_nothing_of_its_answer_can_be_written_ahead(
    worker: Worker,
    request_of: Any,
    observations: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no page is left")

    monkeypatch.setattr("taktline_worker.service.AnswerAhead", fails)
    service = worker._batches._listener._infer.begin.__self__
    request = request_of({"images": images_in(observations, "raw")})
    answers: list[Any] = []
    service.infer(
        request, service.coming(request, frames_of(request)), CallContext(Call(1, 60.0, 0, [])), answers.append
    )
    assert answers[0].results[0].actions.shape
    assert "ahead" in caplog.text


def test_nothing_is_decoded_of_a_batch_that_will_be_refused(
    worker: Worker, request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = copy.copy(worker._batches._listener._infer.begin.__self__)
    asked: list[list[str]] = []

    def begin_frames(frames: Any) -> Any:
        asked.append([name for name, _ in frames])
        return [None] * len(frames)

    monkeypatch.setattr(worker.engine, "begin_frames", begin_frames)
    good = request_of({}, {})
    for bad in (request_of({}, policy="other"), request_of({}, revision="r2")):
        (images,) = service.coming(bad, frames_of(bad))
        assert all(image.begun is None for image in images.values())
    assert asked == []
    service.coming(good, frames_of(good))
    assert asked == [[name for item in good.items for name in item.images]]
    service._places = type(service._places)()
    assert len(service.coming(good, frames_of(good))) == 2
    assert len(asked) == 1
