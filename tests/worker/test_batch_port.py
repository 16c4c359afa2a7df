"""The batch port of a real worker: what comes back is what gRPC gives, and it drains like the rest."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from taktline_gateway import batch_channel
from taktline_gateway.batch_channel import BatchChannel, WorkerCallError
from taktline_gateway.tls import TlsFiles as GatewayFiles
from taktline_gateway.tls import WorkerTls
from taktline_protocol import ErrorCode, Image, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.batch_frames import Call
from taktline_worker import batch_port
from taktline_worker.adapter import Description
from taktline_worker.batch_connection import BatchConnection, CallContext, InThreads
from taktline_worker.batch_port import BatchPort
from taktline_worker.cli import main
from taktline_worker.engine import Engine, Item
from taktline_worker.models.registry import load_adapter
from taktline_worker.observation import RobotInput
from taktline_worker.server import ServeOptions, Worker
from taktline_worker.tls import TlsFiles

from tests.gateway.certificates import Authority
from tests.ports import free_port
from tests.waiting import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests is no fault of the port."""
    monkeypatch.setattr(batch_channel, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(batch_port, "OPEN_TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def config(folders: Any, config_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = folders.lerobot(tmp_path_factory.mktemp("batch-port") / "policy", "pi05")
    return config_of(path, solver_steps=2, buckets=(1, 2))


@pytest.fixture(scope="module")
def worker(config: Any) -> Any:
    made = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0))
    made.start()
    yield made
    made.drain()


def members_of(observations: Any, seeds: tuple[int, ...]) -> Any:
    found = []
    for seed in seeds:
        observation = observations.make(seed=seed)
        item = worker_pb2.InferItem(
            request_id=f"q{seed}",
            state=worker_pb2.Tensor(dtype="float32", shape=[8], data=observation.state.astype("<f4").tobytes()),
            instruction=observation.instruction,
            seed=seed,
        )
        frames = {
            name: Image(image.encoding, bytes(image.data), tuple(image.shape) or None)
            for name, image in observation.images.items()
        }
        found.append((item, frames))
    return found


def whole(request: worker_pb2.InferRequest, members: Any) -> worker_pb2.InferRequest:
    message = worker_pb2.InferRequest()
    message.CopyFrom(request)
    for item, frames in members:
        added = message.items.add()
        added.CopyFrom(item)
        for name, image in frames.items():
            added.images[name].encoding, added.images[name].data = image.encoding, image.data
            added.images[name].shape.extend(image.shape or ())
    return message


def over_batch_port(worker: Worker, request: Any, members: Any, timeout_s: float = 60.0) -> Any:
    async def ask() -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as plain:
            info = worker_pb2_grpc.WorkerStub(plain).Info(worker_pb2.InfoRequest(), timeout=20)
        channel = await BatchChannel.connect("127.0.0.1", info.batch_port, info.batch_token)
        try:
            return await channel.infer(request, members, timeout_s, ())
        finally:
            channel.close()

    return asyncio.run(ask())


def test_both_ways_give_the_same_actions_and_the_same_errors(worker: Worker, observations: Any) -> None:
    request = worker_pb2.InferRequest(policy="tiny", revision="r1")
    members = members_of(observations, (1, 2))
    camera = next(iter(members[1][1]))
    members[1][1][camera] = Image("jpeg", b"\xff\xd8 no picture")
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        plain = worker_pb2_grpc.WorkerStub(channel).Infer(whole(request, members), timeout=60)
    ours = over_batch_port(worker, request, members)
    assert [result.request_id for result in ours.results] == ["q1", "q2"]
    assert ours.results[0].actions == plain.results[0].actions
    assert ours.results[1].error == plain.results[1].error
    assert ours.results[1].error.code == "image_corrupt"


def test_a_batch_whose_deadline_is_over_is_dropped(worker: Worker, observations: Any) -> None:
    request = worker_pb2.InferRequest(policy="tiny")
    with pytest.raises(WorkerCallError) as caught:
        over_batch_port(worker, request, members_of(observations, (1,)), timeout_s=0.0)
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_draining_ends_the_port_after_what_runs(config: Any, observations: Any) -> None:
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0))
    worker.start()
    assert over_batch_port(worker, worker_pb2.InferRequest(policy="tiny"), members_of(observations, (3,))).results
    port = worker._batches.port
    worker.drain()
    with pytest.raises(ConnectionRefusedError):
        asyncio.run(BatchChannel.connect("127.0.0.1", port, b""))


def test_a_call_whose_answer_cannot_be_written_has_ended_all_the_same() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        connection = BatchConnection(b"", InThreads(print, lambda _, frames: list(frames), pool), set())
        said, done = threading.Event(), loop.create_future()
        connection._calls[7] = (done, CallContext(Call(7, 10.0, 0, [])))

        class Broken:
            def rest(self) -> None:
                raise OSError("no more room")

        connection._writing = Broken()  # type: ignore[assignment]
        with pytest.raises(OSError, match="no more room"):
            connection._finish(7, said)
        assert said.is_set()
        assert done.done()
        assert connection.running() == []

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(check())


def test_the_port_may_be_chosen_or_left_out(config: Any, observations: Any) -> None:
    chosen = free_port()
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0, batch_port=chosen))
    worker.start()
    try:
        assert worker._batches.port == chosen
        assert over_batch_port(worker, worker_pb2.InferRequest(policy="tiny"), members_of(observations, (4,))).results
    finally:
        worker.drain()
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0, batch_port=None))
    worker.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as plain:
            info = worker_pb2_grpc.WorkerStub(plain).Info(worker_pb2.InfoRequest(), timeout=20)
        assert (info.batch_port, info.batch_token, info.batch_version) == (0, b"", 0)
    finally:
        worker.drain()


def test_a_port_that_cannot_be_had_is_refused_before_anything_is_loaded(config: Any) -> None:
    def load(_: Any) -> Any:
        raise AssertionError("nothing is to be loaded")

    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(TaktlineError, match=f"cannot listen on 127.0.0.1:{taken}") as refused:
            Worker(config, ServeOptions("127.0.0.1:0", batch_port=taken), load)
        assert refused.value.code is ErrorCode.CONFIG_INVALID
    both = free_port()
    with pytest.raises(TaktlineError, match="it is the batch port, too"):
        Worker(config, ServeOptions(f"127.0.0.1:{both}", batch_port=both), load)


def test_a_port_that_is_taken_while_the_policy_loads_is_refused_by_name(config: Any) -> None:
    taken = free_port()
    with contextlib.ExitStack() as stack:

        def load(engine: Any) -> Any:
            stack.enter_context(socket.create_server(("127.0.0.1", taken)))
            return load_adapter(engine)

        with pytest.raises(TaktlineError, match=f"cannot listen on 127.0.0.1:{taken}") as refused:
            Worker(config, ServeOptions("127.0.0.1:0", batch_port=taken), load)
        assert refused.value.code is ErrorCode.CONFIG_INVALID


@pytest.mark.parametrize("word", ["-1", "65536", "any", ""])
def test_a_word_that_is_no_port_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--config", "engine.json", "--batch-port", word])
    assert "neither off nor a port" in capsys.readouterr().err


def test_the_port_has_the_certificates_of_grpc(config: Any, observations: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "factory")
    cert, key = authority.issue("worker", "127.0.0.1")
    files = TlsFiles(cert, key, authority.ca)
    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0, tls=files))
    worker.start()
    own = authority.issue("gateway")
    context = WorkerTls(GatewayFiles(cert=own[0], key=own[1], ca=authority.ca)).context

    async def ask() -> Any:
        port = worker._batches
        channel = await BatchChannel.connect("127.0.0.1", port.port, port.token, context)
        try:
            request = worker_pb2.InferRequest(policy="tiny")
            return await channel.infer(request, members_of(observations, (5,)), 60.0, ())
        finally:
            channel.close()

    try:
        assert asyncio.run(ask()).results[0].request_id == "q5"
        with pytest.raises(OSError, match=r"closed|does not answer|reset"):
            asyncio.run(BatchChannel.connect("127.0.0.1", worker._batches.port, worker._batches.token))
    finally:
        worker.drain()


def test_a_policy_is_loaded_once_and_not_for_each_client(config: Any, observations: Any) -> None:
    """LeRobot: the server loads the policy again for every client that connects."""
    loads = []

    def load(engine: Any) -> Any:
        loads.append(engine.policy)
        return load_adapter(engine)

    worker = Worker(config, ServeOptions("127.0.0.1:0", linger_s=0.0), load)
    worker.start()
    try:
        for seed in (6, 7, 8):  # a connection each
            request = worker_pb2.InferRequest(policy="tiny")
            assert over_batch_port(worker, request, members_of(observations, (seed,))).results
    finally:
        worker.drain()
    assert loads == ["tiny"]


def test_frames_that_cannot_be_looked_at_fail_their_call_alone() -> None:
    def coming(request: Any, frames: Any) -> Any:
        if request.policy == "bad":
            raise ValueError("such frames")
        return list(frames)

    def infer(request: Any, images: Any, context: Any, answered: Any) -> None:
        answered(worker_pb2.InferResponse(revision="r"))

    port = BatchPort("127.0.0.1", infer, coming, 1)

    async def ask() -> None:
        channel = await BatchChannel.connect("127.0.0.1", port.port, port.token)
        with pytest.raises(WorkerCallError, match="such frames"):
            await channel.infer(worker_pb2.InferRequest(policy="bad"), [], 30.0, ())
        assert (await channel.infer(worker_pb2.InferRequest(policy="good"), [], 30.0, ())).revision == "r"
        channel.close()

    asyncio.run(ask())
    began = time.monotonic()
    port.close(30.0)
    assert time.monotonic() - began < 20.0, "nothing is left that nobody ends"


def test_gateways_that_connect_again_and_a_call_beside_the_port_do_not_make_its_loop_wait_for_a_hung_engine() -> None:
    hang, ended = threading.Event(), threading.Event()

    class Launched:
        seconds = 0.0

        def __init__(self) -> None:
            self._hangs = hang.is_set()

        def wait(self) -> list[Any]:
            assert not self._hangs or ended.wait(60)
            return [0.0]

    class Row:
        def result(self) -> float:
            return 0.0

    class Adapter:
        description = Description("scripted", "fp32", "cpu", (), (), 1, 1, 1, 0.1)

        def begin(self, *_: Any) -> Row:
            return Row()

        def run(self, *_: Any) -> Any:
            raise AssertionError("it was not launched")

        def draft(self, pending: Any) -> None:
            return None

        def launch(self, *_: Any) -> Launched:
            return Launched()

        def finish(self, rows: Any, outputs: Any) -> Any:
            return [np.zeros((1, 1), np.float32) for _ in rows]

    engine = Engine(Adapter(), (1,), 1)  # type: ignore[arg-type]
    item, begun = Item(RobotInput({}, np.zeros(1), "")), []

    def infer(request: Any, images: Any, context: Any, answered: Any) -> None:
        engine.infer([item])
        answered(worker_pb2.InferResponse())

    def begin(request: Any, images: Any, context: Any) -> Any:
        if not engine.launches_at_once:
            return None
        wait = engine.begin([item])
        begun.append(threading.current_thread().name)
        return lambda answered: (wait(), answered(worker_pb2.InferResponse()))

    port = BatchPort("127.0.0.1", infer, lambda _, frames: list(frames), 8, begin=begin)

    async def ask(timeout_s: float) -> None:
        channel = await asyncio.wait_for(BatchChannel.connect("127.0.0.1", port.port, port.token), 10.0)
        try:
            await channel.infer(worker_pb2.InferRequest(), [], timeout_s, ())
        finally:
            channel.close()

    engine.infer([item])
    asyncio.run(ask(60.0))
    assert begun == ["batch-port"]
    until(lambda: engine._uncollected == 0, "its end")
    hang.set()
    beside = ThreadPoolExecutor(1)
    plain = beside.submit(engine.infer, [item])
    until(lambda: engine._uncollected == 1, "a call through gRPC")
    for _ in range(4):
        with pytest.raises((WorkerCallError, TimeoutError)):
            asyncio.run(ask(0.2))
    assert begun == ["batch-port"] * 2, "the place behind what hangs is taken once"
    ended.set()
    plain.result(30)
    until(lambda: engine._uncollected == 0 and not engine._asked, "all others")
    hang.clear()
    asyncio.run(ask(60.0))
    assert len(begun) == 3
    port.close(30.0)
    engine.close()
    beside.shutdown()
