"""Real-time chunking through adapter, engine and RPC: what robots send, what they get, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError, worker_pb2, worker_pb2_grpc
from taktline_protocol.deployment import RtcOptions
from taktline_worker.adapter import GuidedChunk
from taktline_worker.engine import Engine, Item
from taktline_worker.models.pi import adapter as pi_adapter
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.resize import to_model_input
from taktline_worker.models.pi.runner import PiRunner
from taktline_worker.observation import RtcInput
from taktline_worker.server import ServeOptions, Worker

HORIZON, ACTIONS = 10, 7


@pytest.fixture(scope="module")
def policy(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.lerobot(tmp_path_factory.mktemp("rtc") / "policy", "pi05")


@pytest.fixture(scope="module")
def trained_policy(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folders.lerobot(tmp_path_factory.mktemp("trained") / "policy", "pi05")
    config = json.loads((path / "config.json").read_text()) | {
        "rtc_training_max_delay": 4,
        "rtc_config": {"enabled": True, "prefix_attention_schedule": "EXP", "max_guidance_weight": 5.0},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def _chunk(adapter: PiAdapter, *observations: Any, pool: Any) -> list[Any]:
    rows = [adapter.begin(observation, pool).result() for observation in observations]
    return list(adapter.finish(rows, adapter.run(rows, len(rows))))


def test_a_chunk_continues_the_last_one(policy: Path, config_of: Any, observations: Any, pool: Any) -> None:
    """The robot goes on for three actions while the next chunk is made; the hand-off must not jump."""
    adapter = load(config_of(policy))
    (first,) = _chunk(adapter, observations.make(seed=1), pool=pool)
    tail = first[4:]
    sent = RtcInput(tail, delay=3)
    (plain,) = _chunk(adapter, observations.make(seed=2), pool=pool)
    (guided,) = _chunk(adapter, observations.make(seed=2, rtc=sent), pool=pool)
    assert isinstance(guided, GuidedChunk)
    assert (guided.mode, guided.delay, guided.prefix_end) == ("guided", 3, 6)
    assert (guided.schedule, guided.path) == ("linear", "batched")
    jump, calm = (np.abs(chunk[:3] - tail[:3]).mean() for chunk in (plain, guided.actions))
    assert calm < 0.2 * jump


def test_checkpoint_that_was_trained_for_it(trained_policy: Path, config_of: Any, observations: Any, pool: Any) -> None:
    adapter = load(config_of(trained_policy))
    assert (adapter.description.rtc, adapter.description.rtc_max_delay) == ("trained", 4)
    (first,) = _chunk(adapter, observations.make(seed=1), pool=pool)
    (chunk,) = _chunk(adapter, observations.make(seed=2, rtc=RtcInput(first[5:], delay=3)), pool=pool)
    assert (chunk.mode, chunk.delay, chunk.prefix_end, chunk.schedule) == ("trained", 3, 3, "hard")
    assert chunk.actions[:3] == pytest.approx(first[5:8], rel=1e-5, abs=1e-5)
    with pytest.raises(TaktlineError, match="at most 4"):
        adapter.begin(observations.make(rtc=RtcInput(first[3:], delay=5)), pool)


def test_the_checkpoint_states_its_guidance(trained_policy: Path, config_of: Any) -> None:
    adapter = load(config_of(trained_policy, rtc=RtcOptions(mode="guided")))
    assert adapter.processor.rtc is not None
    assert (adapter.processor.rtc.schedule, adapter.processor.rtc.max_guidance_weight) == ("exp", 5.0)


def test_rows_run_apart_come_back_in_their_places(policy: Path, config_of: Any, observations: Any, pool: Any) -> None:
    """Where captured graphs cannot guide, the rows with a tail run in a second, eager call."""
    whole = load(config_of(policy))
    assert isinstance(whole.runner, PiRunner)
    calls: list[list[bool]] = []

    class Recording:
        def __init__(self, runner: PiRunner) -> None:
            self.runner, self.device = runner, runner.device

        def run(self, batch: Any) -> Any:
            calls.append([batch.rtc is not None] * batch.tokens.shape[0])
            return self.runner.run(batch)

    apart = PiAdapter(
        whole.processor,
        Recording(whole.runner),
        "fp32",
        guided=Recording(PiRunner(whole.runner.weights, whole.processor.architecture)),
    )
    tail = RtcInput(np.zeros((6, ACTIONS), np.float32), delay=2)
    mixed = [observations.make(seed=i, **({"rtc": tail} if i in (0, 2) else {})) for i in range(4)]
    expected, found = (_chunk(adapter, *mixed, pool=pool) for adapter in (whole, apart))
    assert calls == [[True, True], [False, False]]
    for index in (0, 2):
        assert (expected[index].path, found[index].path) == ("batched", "apart")
        assert found[index].actions == pytest.approx(expected[index].actions, abs=1e-4)
    for index in (1, 3):
        assert found[index] == pytest.approx(expected[index], abs=1e-4)
    calls.clear()
    _chunk(apart, mixed[1], pool=pool)
    _chunk(apart, mixed[0], pool=pool)
    assert calls == [[False], [True]]
    apart.warm_guided([1, 3])
    assert calls[2:] == [[True], [True] * 3]


def _actions(outcome: Any, path: str) -> Any:
    """Actions of an answer, which took `path` where it is not empty."""
    if not path:
        assert isinstance(outcome, np.ndarray), outcome
        return outcome
    assert isinstance(outcome, GuidedChunk), outcome
    assert outcome.path == path
    return outcome.actions


class Resizing:
    """Takes frames as captured graphs do, and computes what the eager runner does with their pixels."""

    device = torch.device("cpu")
    seconds = 0.0

    def __init__(self, runner: PiRunner, method: Any) -> None:
        self._runner, self._method = runner, method

    def run(self, batch: Any) -> torch.Tensor:
        size = self._runner.architecture.image_size
        pixels = [to_model_input(frame.numpy(), size, self._method) for frame in batch.raw]
        self._actions = self._runner.run(dataclasses.replace(batch, pixels=torch.stack(pixels), raw=None))
        return self._actions

    def draft(self, batch: Any) -> Any:
        return batch

    def launch(self, batch: Any, draft: Any = None) -> Resizing:
        self.run(batch)
        return self

    def wait(self) -> torch.Tensor:
        return self._actions


@pytest.mark.parametrize("tails", [(0,), (1,), (0, 1, 2)])
def test_rows_with_and_without_a_tail_share_a_batch_of_frames(
    policy: Path, config_of: Any, observations: Any, pool: Any, monkeypatch: pytest.MonkeyPatch, tails: tuple[int, ...]
) -> None:
    """Where the runner resizes frames itself, those of rows with a tail too."""
    whole = load(config_of(policy))
    assert isinstance(whole.runner, PiRunner)
    resizing = Resizing(whole.runner, whole.processor.conventions.resize)
    monkeypatch.setattr(pi_adapter, "make_runner", lambda *_, **__: resizing)
    loaded = load(config_of(policy))
    assert loaded.processor.raw
    tail = RtcInput(np.zeros((6, ACTIONS), np.float32), delay=2)
    mixed = [observations.make(seed=i, **({"rtc": tail} if i in tails else {})) for i in range(3)]
    expected = _chunk(whole, *mixed, pool=pool)
    engine = Engine(loaded, (1, 4))
    try:
        outcomes = engine.infer([Item(observation) for observation in mixed]).outcomes
    finally:
        engine.close()
    for index, (theirs, ours) in enumerate(zip(expected, outcomes, strict=True)):
        path = "batched" if index in tails else ""
        np.testing.assert_array_equal(_actions(ours, path), _actions(theirs, path))


@pytest.mark.parametrize(
    "rtc",
    [
        RtcInput(np.zeros((6, ACTIONS - 1)), delay=2),
        RtcInput(np.zeros((HORIZON + 1, ACTIONS)), delay=2),
        RtcInput(np.full((6, ACTIONS), np.nan), delay=2),
        RtcInput(np.zeros((6, ACTIONS))),
        RtcInput(np.zeros((6, ACTIONS)), delay=HORIZON + 1),
        RtcInput(np.full((6, ACTIONS), 1e300), delay=2),
        RtcInput(np.zeros((6, ACTIONS)), delay=5, execution_horizon=4),
    ],
    ids=["width", "length", "nan", "no delay", "delay beyond the chunk", "absurd numbers", "s below d"],
)
def test_bad_tails_fail_alone(policy: Path, config_of: Any, observations: Any, rtc: RtcInput) -> None:
    engine = Engine(load(config_of(policy)), (1, 2))
    try:
        items = [Item(observations.make()), Item(observations.make(rtc=rtc))]
        good, bad = engine.infer(items).outcomes
    finally:
        engine.close()
    assert isinstance(good, np.ndarray)
    assert isinstance(bad, TaktlineError)
    assert bad.code is ErrorCode.RTC_INVALID
    assert bad.next_step


def test_a_policy_without_rtc_refuses_a_tail(policy: Path, config_of: Any, observations: Any) -> None:
    adapter = load(config_of(policy, rtc=RtcOptions(mode="off")))
    assert adapter.description.rtc == ""
    engine = Engine(adapter, (1,))
    try:
        tail = RtcInput(np.zeros((6, ACTIONS)), delay=2)
        (refused,) = engine.infer([Item(observations.make(rtc=tail))]).outcomes
    finally:
        engine.close()
    assert isinstance(refused, TaktlineError)
    assert refused.code is ErrorCode.RTC_INVALID


def test_trained_mode_of_an_untrained_checkpoint_is_refused_at_start(policy: Path, config_of: Any) -> None:
    with pytest.raises(TaktlineError) as caught:
        load(config_of(policy, rtc=RtcOptions(mode="trained")))
    assert caught.value.code is ErrorCode.CONFIG_INVALID


@pytest.fixture(scope="module")
def stub(policy: Path, config_of: Any) -> Iterator[Any]:
    worker = Worker(config_of(policy, solver_steps=4, buckets=(1, 2)), ServeOptions("127.0.0.1:0", linger_s=0.0))
    worker.start()
    with grpc.insecure_channel(f"127.0.0.1:{worker.port}") as channel:
        yield worker_pb2_grpc.WorkerStub(channel)
    worker.drain()


def test_over_the_rpc(stub: Any, observations: Any) -> None:
    info = stub.Info(worker_pb2.InfoRequest(), timeout=20)
    assert (info.rtc, info.rtc_max_delay) == ("guided", 0)
    observation = observations.make()

    def item(request_id: str, **changes: Any) -> worker_pb2.InferItem:
        images = {
            name: worker_pb2.Image(encoding=image.encoding, data=image.data)
            for name, image in observation.images.items()
        }
        state = worker_pb2.Tensor(dtype="float32", shape=[8], data=observation.state.astype("<f4").tobytes())
        return worker_pb2.InferItem(
            request_id=request_id, images=images, state=state, instruction="go", seed=3, **changes
        )

    tail = worker_pb2.Tensor(dtype="float64", shape=[5, ACTIONS], data=np.zeros((5, ACTIONS)).tobytes())
    items = [
        item("plain"),
        item("first", rtc=worker_pb2.Rtc(delay=2)),  # nothing left to continue
        item("guided", rtc=worker_pb2.Rtc(tail=tail, delay=2, execution_horizon=7)),
        item("bad", rtc=worker_pb2.Rtc(tail=worker_pb2.Tensor(dtype="float64", shape=[5, 7], data=b"short"))),
    ]
    answer = stub.Infer(worker_pb2.InferRequest(policy="tiny", items=items), timeout=30)
    plain, first, guided, bad = answer.results
    assert plain.actions.data == first.actions.data
    assert not plain.HasField("rtc")
    assert not first.HasField("rtc")
    applied = guided.rtc
    assert (applied.mode, applied.delay, applied.prefix_end, applied.schedule, applied.path) == (
        "guided", 2, 3, "linear", "batched",
    )  # fmt: skip
    assert guided.actions.data != plain.actions.data
    assert bad.error.code == "rtc_invalid"


@pytest.mark.gpu
def test_captured_graphs_and_guided_rows(golden: Path, network: Any) -> None:
    from safetensors.torch import load_file
    from taktline_worker.models.pi.runner import collate
    from taktline_worker.models.pi.weights import BF16_VISION, on_device
    from taktline_worker.rtc import RtcPlan, RtcSettings

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from taktline_worker.models.pi.rtc import RtcRow

    folder = golden / "pi05_tiny" / "full_real_heads"
    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    cpu, architecture = network.load(folder / "model.safetensors", heads, BF16_VISION, rtc_max_delay=8)
    eager = PiRunner(on_device(cpu.weights, torch.device("cuda")), architecture)
    row = network.rows(load_file(folder / "case_b1.safetensors"), architecture)[0]
    target = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    row = dataclasses.replace(row, rtc=RtcRow(target, torch.ones(50), RtcPlan(5, 50)))
    for settings in (
        RtcSettings("guided"),
        RtcSettings("guided", exact=True),
        RtcSettings("trained", max_delay=8),
    ):
        batch = collate([row, row], architecture.tokens_per_image, rtc=settings)
        ours, reference = eager.run(batch), cpu.run(batch)
        cosine = torch.nn.functional.cosine_similarity(ours.flatten(1), reference.flatten(1))
        assert float(cosine.min()) >= 0.999
        if settings.mode == "trained":
            assert torch.equal(ours[:, :5], target[None, :5].expand(2, -1, -1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("gradient", ["identity", "vjp"])
def test_frames_of_rows_with_and_without_a_tail_on_a_gpu(
    policy: Path, config_of: Any, observations: Any, pool: Any, gradient: Any
) -> None:
    """In one bucket each row gets what it gets alone, with frames of a robot's own size."""
    options = {"device": "cuda", "precision": "bf16", "buckets": (4,), "rtc": RtcOptions(gradient=gradient)}
    loaded = load(config_of(policy, **options))
    images = {name: observations.image("jpeg", 480, 640, seed=i) for i, name in enumerate(loaded.description.cameras)}
    images |= {
        name: observations.image("jpeg", 480, 640, seed=9 + i)
        for i, name in enumerate(loaded.description.optional_cameras)
    }
    tail = RtcInput(np.zeros((6, ACTIONS), np.float32), delay=2)
    mixed = [observations.make(seed=i, images=images, **({"rtc": tail} if i == 1 else {})) for i in range(3)]
    engine = Engine(loaded, (4,))
    try:
        together = engine.infer([Item(observation) for observation in mixed]).outcomes
        alone = [engine.infer([Item(observation)]).outcomes[0] for observation in mixed]
        plain = engine.infer([Item(dataclasses.replace(mixed[1], rtc=None))]).outcomes[0]
    finally:
        engine.close()
    path = "batched" if gradient == "identity" else "apart"
    for ours, theirs, taken in zip(together, alone, ("", path, ""), strict=True):
        np.testing.assert_array_equal(_actions(ours, taken), _actions(theirs, taken))
    assert np.abs(_actions(together[1], path) - _actions(plain, "")).max() > 0.01
