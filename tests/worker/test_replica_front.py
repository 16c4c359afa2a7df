"""The port before the replicas, with replicas that are told when to answer: whose batch is whose, and until when."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from taktline_protocol import worker_pb2, worker_pb2_grpc
from taktline_worker.lifecycle import SERVICE_NAME
from taktline_worker.replicas.assignment import STUCK_FLOOR_S, Assignment
from taktline_worker.replicas.front import Front, _Fleet, _handlers

from tests.waiting import until


class Scripted:
    """A replica in this process that answers when it may, or with a status."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.status: grpc.StatusCode | None = None
        self.got: list[str] = []
        self.taken_back: list[str] = []
        self.ended = 0
        self._server = grpc.server(ThreadPoolExecutor(16))
        handler = grpc.unary_unary_rpc_method_handler(self._infer)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Infer": handler}),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.infer = self._channel.unary_unary(f"/{SERVICE_NAME}/Infer")

    def _infer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        name = worker_pb2.InferRequest.FromString(request).items[0].request_id
        self.got.append(name)
        answered: list[None] = []
        context.add_callback(lambda: None if answered else self.taken_back.append(name))
        self.may_answer.wait(60)
        if self.status is not None:
            context.abort(self.status, "so it was told")
        answered.append(None)
        result = worker_pb2.InferResult(request_id=name)
        return worker_pb2.InferResponse(results=[result]).SerializeToString()

    def end(self) -> None:
        self.ended += 1

    def close(self) -> None:
        self.may_answer.set()
        self._channel.close()
        self._server.stop(None).wait()


@pytest.fixture
def served() -> Iterator[Callable[[int], SimpleNamespace]]:
    """Makes a front with so many replicas, each of 10 ms a batch."""
    with contextlib.ExitStack() as closing:

        def made(count: int) -> SimpleNamespace:
            front = Front.__new__(Front)
            front._policy, front._changed, front._fleet = "p", threading.Condition(), _Fleet(Assignment(), {})
            front.replicas = [Scripted() for _ in range(count)]  # type: ignore[misc]
            for index, replica in enumerate(front.replicas):
                closing.callback(replica.close)  # type: ignore[attr-defined]
                front._fleet.assignment.add(index, {1: 0.010})
            server = grpc.server(ThreadPoolExecutor(16))
            server.add_generic_rpc_handlers((_handlers(front),))
            port = server.add_insecure_port("127.0.0.1:0")
            server.start()
            closing.callback(lambda: server.stop(None).wait())
            channel = grpc.insecure_channel(f"127.0.0.1:{port}")
            closing.callback(channel.close)
            return SimpleNamespace(
                replicas=front.replicas, assignment=front._fleet.assignment, stub=worker_pb2_grpc.WorkerStub(channel)
            )

        yield made


def batch(name: str) -> worker_pb2.InferRequest:
    return worker_pb2.InferRequest(policy="p", items=[worker_pb2.InferItem(request_id=name)])


def held(front: SimpleNamespace) -> list[int]:
    return [len(queue) for queue in front.assignment._outstanding.values()]


def test_a_replica_that_hangs_keeps_its_batch_beyond_the_callers_patience(
    served: Callable[[int], SimpleNamespace], caplog: pytest.LogCaptureFixture
) -> None:
    """With the batch forgotten at each caller's deadline it was never found stuck, and got every other batch."""
    caplog.set_level(logging.ERROR)
    front = served(2)
    hung, other = front.replicas
    hung.may_answer.clear()
    with pytest.raises(grpc.RpcError) as caught:
        front.stub.Infer(batch("a"), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for name in "bcd":
        front.stub.Infer(batch(name), timeout=30)
    assert (hung.got, other.got) == (["a"], ["b", "c", "d"])
    assert hung.taken_back == []
    assert front.assignment.stuck(time.monotonic() + STUCK_FLOOR_S) == [0]
    hung.may_answer.set()
    until(lambda: held(front) == [0, 0], "the late answer being counted")
    assert front.assignment.stuck(time.monotonic() + STUCK_FLOOR_S) == []
    assert "Traceback" not in caplog.text


def test_a_batch_that_nobody_waits_for_is_taken_back_from_the_queue_and_not_from_the_engine(
    served: Callable[[int], SimpleNamespace],
) -> None:
    front = served(1)
    (replica,) = front.replicas
    replica.may_answer.clear()
    first = front.stub.Infer.future(batch("first"))
    until(lambda: replica.got == ["first"], "the first batch")
    behind = front.stub.Infer.future(batch("behind"))
    until(lambda: replica.got == ["first", "behind"], "the one behind it")
    for call in (first, behind):
        call.cancel()
    until(lambda: replica.taken_back == ["behind"], "the second one being taken back")
    until(lambda: held(front) == [1], "its place being free")
    replica.may_answer.set()
    until(lambda: held(front) == [0], "the first one's answer")
    assert replica.taken_back == ["behind"]


def test_only_a_replica_that_is_gone_is_said_to_have_ended(served: Callable[[int], SimpleNamespace]) -> None:
    front = served(2)
    front.replicas[0].status = grpc.StatusCode.RESOURCE_EXHAUSTED
    (result,) = front.stub.Infer(batch("a"), timeout=30).results
    assert result.error.code == "worker_failed"
    assert result.error.message == "replica 0 failed this batch (RESOURCE_EXHAUSTED: so it was told)"
    assert "restarted" not in result.error.next_step
    assert (front.replicas[0].ended, front.assignment.replicas) == (0, (0, 1))
    front.replicas[0].status = grpc.StatusCode.UNAVAILABLE
    (result,) = front.stub.Infer(batch("b"), timeout=30).results
    assert "replica 0 ended" in result.error.message
    assert (front.replicas[0].ended, front.assignment.replicas) == (1, (1,))
