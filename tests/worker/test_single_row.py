"""A row that is alone: begun by native threads, drafted into a letter that is ready, and the same as the long way."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.devices import Running, Staged
from taktline_worker.engine import Engine, Item
from taktline_worker.jpeg_threads import JpegThreads
from taktline_worker.models.pi import native_rows, single_row
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.graphs import Bucket, GraphRunner
from taktline_worker.models.pi.native_rows import Launch, NativeRows
from taktline_worker.models.pi.pending import BegunPiRow, PendingPiRow
from taktline_worker.models.pi.runner import PiRow, collate
from taktline_worker.models.pi.runners import shorten
from taktline_worker.models.pi.single_row import RowLetter, SingleRows
from taktline_worker.observation import EncodedImage

TOKENS = 16
"""Of an image."""


def staged(state: bool) -> Staged:
    chunk = (4, 10, 8)
    return Staged(
        {
            "lengths": ((4,), torch.int32),
            "tokens": ((4 * 60,), torch.int64),
            "actions": (chunk, torch.float32),
            "source": ((4 * (3 * TOKENS + 60),), torch.int64),
            **({"state": ((4, 8), torch.float32)} if state else {}),
            "target": (chunk, torch.float32),
            "influence": (chunk[:2], torch.float32),
        },
        torch.device("cpu"),
    )


@pytest.mark.parametrize("state", [True, False])
def test_a_rows_letter_is_that_of_a_batch_of_it(state: bool) -> None:
    """In all that a graph of one row reads; where a letter has been before is another one's matter."""
    place, draw = staged(state), np.random.default_rng(4)
    runner: Any = SimpleNamespace(_staged=place, architecture=SimpleNamespace(tokens_per_image=TOKENS))
    runner.slots = lambda bucket: bucket.views * TOKENS + bucket.prompt
    for prompt in (20, 60):
        for images in (1, 2, 3):
            bucket = Bucket(1, 3, prompt)
            for count in (1, 7, prompt):
                row = PiRow(
                    pixels=torch.empty(images, 0),
                    tokens=draw.integers(1, 1 << 40, count),
                    noise=torch.randn(10, 8),
                    state=torch.randn(8) if state else None,
                )
                letter = RowLetter(place, bucket, images, TOKENS)
                expected = GraphRunner.write(runner, collate([row], TOKENS), bucket).arrays
                found = letter.write(row).arrays
                read = {"tokens": prompt, "source": 3 * TOKENS + prompt}
                assert found.keys() == expected.keys()
                for name, array in expected.items():
                    assert np.array_equal(found[name][: read.get(name, 1)], array[: read.get(name, 1)]), name


def jpeg(seed: int, height: int = 48, width: int = 64) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(
        stream, "JPEG"
    )
    return stream.getvalue()


class Launched:
    """What a runner gives."""

    seconds = 0.0

    def wait(self) -> torch.Tensor:
        return torch.zeros(1, 50, 7)


class Runner:
    """A runner with a shorter way for one row, which says what came on which way."""

    device, unnormalises = torch.device("cpu"), True

    def __init__(self, takes: bool = True) -> None:
        self.single, self.takes, self.fails = self, takes, False
        self.short: list[tuple[Any, list[torch.Tensor]]] = []
        self.long: list[Any] = []

    def draft(self, row: Any) -> Any:
        if not isinstance(row, PiRow):
            return None
        letter = RowLetter.__new__(RowLetter)
        letter.row = row  # type: ignore[attr-defined]
        return letter

    def launch(self, given: Any, draft: Any = None) -> Any:
        if isinstance(draft, RowLetter):
            if not self.takes:
                return None
            self.short.append((draft.row, [frame.clone() for frame in given]))  # type: ignore[attr-defined]
        else:
            self.long.append(given)
        return Launched()

    def look_ahead(self, last: Any) -> None:
        if self.fails:
            raise MemoryError("no page is left")


@pytest.fixture(scope="module")
def native() -> tuple[JpegThreads, NativeRows]:
    return JpegThreads(2), NativeRows()


@pytest.fixture(params=[0, 64])
def adapter(folders: Any, config_of: Any, tmp_path: Any, native: Any, request: pytest.FixtureRequest) -> PiAdapter:
    processor = load(config_of(folders.lerobot(tmp_path / "policy", "pi05"), frame_cache_mb=request.param)).processor
    processor.raw, processor.native = True, native[0]
    processor.look_prompts_up(native[1])
    return PiAdapter(processor, Runner(), "fp32")  # type: ignore[arg-type]


@pytest.fixture
def engine(adapter: PiAdapter) -> Iterator[Engine]:
    made = Engine(adapter, (1, 2), 2)
    yield made
    made.close()


def come(adapter: PiAdapter, observations: Any, number: int, **changes: Any) -> Any:
    """An observation as the service hands it on."""
    names = list(observations.make().images)
    files = {name: memoryview(jpeg(10 * number + at)) for at, name in enumerate(names)}
    begun = adapter.begin_frames([(name, ("jpeg", (), file)) for name, file in files.items()])
    images = {
        name: EncodedImage("jpeg", file, (), early) for (name, file), early in zip(files.items(), begun, strict=True)
    }
    return observations.make(**({"images": images, "seed": number} | changes))


def test_a_begun_row_is_that_of_the_long_way(adapter: PiAdapter, observations: Any) -> None:
    processor = adapter.processor
    with ThreadPoolExecutor(2) as pool:
        for seed in range(5):
            observation = come(adapter, observations, seed)
            short = adapter.begin(observation, pool)
            assert type(short) is BegunPiRow
            prompts, processor.prompts = processor.prompts, None
            long = adapter.begin(observation, pool)
            processor.prompts = prompts
            assert type(long) is PendingPiRow
            found, expected = short.result(), long.result()
            assert found.row.tokens.tolist() == expected.row.tokens.tolist()
            assert torch.equal(found.row.noise, expected.row.noise)
            assert np.array_equal(found.state, expected.state)
            for one, other in zip(found.row.raw or (), expected.row.raw or (), strict=True):
                assert torch.equal(one, other)
            assert torch.equal(short.without_frames().noise, found.row.noise)


def test_what_is_no_ordinary_row_takes_the_long_way(adapter: PiAdapter, observations: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        png = dict.fromkeys(observations.make().images, observations.image("png"))
        assert type(adapter.begin(observations.make(images=png), pool)) is PendingPiRow
        whole = come(adapter, observations, 1)
        integers = come(adapter, observations, 2, state=np.zeros(whole.state.shape, np.int64))
        assert type(adapter.begin(integers, pool)) is PendingPiRow
        for changes, code in (
            ({"state": whole.state[:-1]}, ErrorCode.STATE_INVALID),
            ({"state": np.full(whole.state.shape, np.nan)}, ErrorCode.STATE_INVALID),
            ({"instruction": " "}, ErrorCode.INSTRUCTION_INVALID),
            ({"instruction": "x" * 5000}, ErrorCode.INSTRUCTION_INVALID),
        ):
            with pytest.raises(TaktlineError) as raised:
                adapter.begin(come(adapter, observations, 3, **changes), pool).result()
            assert raised.value.code is code


@pytest.mark.parametrize("width", [0, 32])
def test_an_instruction_that_just_fits_is_served_however_long_the_prompts_of_other_states(
    adapter: PiAdapter, observations: Any, width: int
) -> None:
    """With a state that the prompt pads, it was refused by the length that numbers of three digits would have."""
    processor = adapter.processor
    processor.conventions = replace(
        processor.conventions, state_prompt_width=width, prompt_tokens=200, truncate_prompt=False
    )
    processor.look_prompts_up(NativeRows())
    inverse = processor.conventions.state_normaliser.inverse
    state = inverse(np.full(processor.conventions.state_dim, -0.99)).astype(np.float32)  # numbers of one digit
    lengths = 0
    with ThreadPoolExecutor(2) as pool:
        for words in range(1, processor.conventions.prompt_tokens):
            observation = come(adapter, observations, 3, instruction="a" + " b" * words, state=state)
            prompts, processor.prompts = processor.prompts, None
            try:
                expected = adapter.begin(observation, pool).result().row.tokens.tolist()
            except TaktlineError as error:
                expected = error.code
            processor.prompts = prompts
            try:
                found = adapter.begin(observation, pool).result().row.tokens.tolist()
            except TaktlineError as error:
                found = error.code
            assert found == expected, words
            lengths += isinstance(expected, list)
            if expected is ErrorCode.INSTRUCTION_INVALID:
                break
        nothing = come(adapter, observations, 3, instruction=" ", state=np.full_like(state, np.nan))
        with pytest.raises(TaktlineError) as raised:
            adapter.begin(nothing, pool).result()
    assert raised.value.code is ErrorCode.STATE_INVALID, "the state has its word first, as on the long way"
    assert lengths > 3


class Event:
    """A stand-in for CUDA's, which says what memory is there when it is waited for."""

    def __init__(self, there: Any = None, **_: Any) -> None:
        self.there, self.cuda_event, self.seen = there, 1, []

    def record(self) -> None:
        """Nothing runs here."""

    def synchronize(self) -> None:
        self.seen.append(self.there() is not None)


def test_a_forgotten_batch_gives_no_memory_back_before_a_stand_in_for_the_gpu_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = torch.zeros(3)
    ended = Event(weakref.ref(kept))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: ended)
    monkeypatch.setattr(torch, "empty", lambda shape, **_: torch.zeros(shape))  # pinned memory needs a GPU
    running = Running(Event(), torch.zeros(1), kept)  # type: ignore[arg-type]
    del kept
    assert not ended.seen
    del running
    assert ended.seen == [True]
    assert ended.there() is None


@pytest.mark.parametrize("where", ["launch", "answers"])
def test_a_launch_that_fails_halfway_is_waited_for_on_a_stand_in_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(where)

    stream = Event(lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=1, synchronize=stream.synchronize)
    )
    single = SingleRows.__new__(SingleRows)
    single._camera = SimpleNamespace(targets=lambda _: [1])  # type: ignore[assignment]
    single._answers, single._began = torch.zeros(1), Event()
    begin = fails if where == "launch" else lambda *_: None
    single._launches = {"bucket": SimpleNamespace(begin=begin)}  # type: ignore[dict-item]
    monkeypatch.setattr(single_row, "Running", fails)
    draft: Any = SimpleNamespace(bucket="bucket", letter=SimpleNamespace(copy=(1, 2, 3)))
    with pytest.raises(RuntimeError, match=where):
        single.launch([torch.zeros(2)], draft)
    assert stream.seen == [True]


def test_where_cudas_runtime_cannot_be_opened_the_policy_is_served_the_long_way(
    native: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Captured:
        single: Any = None

        def shorten(self, rows: NativeRows) -> None:
            self.single = Launch(rows, [1], 1)

    monkeypatch.setattr(native_rows, "cuda_runtime", lambda: native_rows.ctypes.CDLL("libcudart.so.no-such"))
    runner: Any = Captured()
    shorten(runner, native[1])
    assert runner.single is None
    assert "libcudart.so.no-such" in caplog.text


def test_a_row_that_is_alone_takes_the_short_way_and_two_do_not(
    engine: Engine, adapter: PiAdapter, observations: Any
) -> None:
    runner: Any = adapter.runner
    alone = come(adapter, observations, 4)
    assert isinstance(engine.infer([Item(alone)]).outcomes[0], np.ndarray)
    ((row, frames),) = runner.short
    assert not runner.long
    assert torch.equal(row.noise, adapter.processor.noise(4))
    for image, frame in zip(alone.images.values(), frames, strict=True):
        assert torch.equal(image.begun.pixels, frame)
    engine.infer([Item(come(adapter, observations, 5)), Item(come(adapter, observations, 6))])
    assert len(runner.short) == len(runner.long) == 1
    assert len(runner.long[0].raw) == 2 * len(frames)
    runner.takes = False
    assert isinstance(engine.infer([Item(come(adapter, observations, 7))]).outcomes[0], np.ndarray)
    assert len(runner.long) == 2
    assert torch.equal(runner.long[1].noise[0], adapter.processor.noise(7))


def test_a_damaged_frame_of_a_begun_row_gets_its_own_word(
    engine: Engine, adapter: PiAdapter, observations: Any
) -> None:
    good = jpeg(1)
    names = list(observations.make().images)
    files = {name: memoryview(good[: 4 * len(good) // 5] if name == names[-1] else good) for name in names}
    begun = adapter.begin_frames([(name, ("jpeg", (), file)) for name, file in files.items()])
    assert all(begun)
    images = {name: EncodedImage("jpeg", files[name], (), early) for name, early in zip(names, begun, strict=True)}
    (outcome,) = engine.infer([Item(observations.make(images=images))]).outcomes
    assert outcome.code is ErrorCode.IMAGE_CORRUPT
    assert names[-1] in outcome.message


def test_frames_are_kept_behind_the_launch_and_never_in_two_rows_memory(
    engine: Engine, adapter: PiAdapter, observations: Any
) -> None:
    runner, processor = adapter.runner, adapter.processor
    sent = [come(adapter, observations, seed) for seed in range(12, 18)]
    places = [image.begun.pixels.data_ptr() for one in sent for image in one.images.values()]
    assert len(set(places)) == len(places)
    for one in sent:
        engine.infer([Item(one)])
    for one, (_, frames) in zip(sent, runner.short, strict=True):  # type: ignore[attr-defined]
        for image, frame in zip(one.images.values(), frames, strict=True):
            assert torch.equal(image.begun.pixels, frame), "nobody has written there since"
    again = come(adapter, observations, 17)
    known = [image.begun.was_known for image in again.images.values()]
    assert known == [bool(processor.seen.limit_bytes)] * len(known)
    hits = processor.seen.hits
    assert hits == (len(known) if processor.seen.limit_bytes else 0)
    engine.infer([Item(again)])
    for old, new in zip(runner.short[-2][1], runner.short[-1][1], strict=True):  # type: ignore[attr-defined]
        assert torch.equal(old, new)
    ahead = [memory for memories in processor.ahead._ahead.values() for memory in memories]
    assert len({memory.address for memory in ahead}) == len(ahead) == len(known)
    assert all(memory.pixels.data_ptr() == memory.address for memory in ahead)


def test_noise_of_requests_without_a_seed_is_drawn_ahead_and_never_twice(
    engine: Engine, adapter: PiAdapter, observations: Any
) -> None:
    drawn = adapter.processor._noise
    for number in range(4):
        engine.infer([Item(come(adapter, observations, number, seed=None))])
        assert len(drawn) == 1
    short = adapter.processor.shortened(5)
    assert short.drawn(None).shape[0] == 5, "a shorter chunk has noise of its own"
    noises = [row.noise for row, _ in adapter.runner.short]  # type: ignore[attr-defined]
    assert len({noise.numpy().tobytes() for noise in (*noises, *drawn)}) == 5


def test_a_launched_row_is_answered_though_nothing_can_be_got_for_the_next(
    engine: Engine, adapter: PiAdapter, observations: Any, caplog: pytest.LogCaptureFixture
) -> None:
    adapter.runner.fails = True  # type: ignore[attr-defined]
    for number in range(2):
        assert isinstance(engine.infer([Item(come(adapter, observations, number))]).outcomes[0], np.ndarray)
    assert caplog.text.count("nothing is got ahead") == 2
    assert len(adapter.runner.short) == 2  # type: ignore[attr-defined]
