"""Prompts by their parts and in C, and a launch in one call: each the same as the statement in Python, or not done."""

from __future__ import annotations

import ctypes
import io
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from numpy.typing import NDArray
from taktline_worker.models.pi import native_rows
from taktline_worker.models.pi.native_rows import Launch, NativePrompts, NativeRows, native_prompts
from taktline_worker.models.pi.normalise import Mode, Normaliser, state_bins
from taktline_worker.models.pi.prompt_table import NUMBERS, PromptTable
from taktline_worker.models.pi.tokenizer import BOS_ID, JsonTokenizer, SentencePieceTokenizer, Tokenizer

SAID = (
    "go",
    "Wipe the table.",
    "pick up 12 of 255: now; then: 7",
    "  émigré 手を振る 🤖 ",
    "Task: x, State: 1 2;",
    "▁ a:",
)


@pytest.fixture(scope="module")
def rows() -> NativeRows:
    return NativeRows()


def trained(folder: Path, **rules: Any) -> SentencePieceTokenizer:
    """One of the kind that PaliGemma has, or by other rules, from prompts whose numbers repeat."""
    draw = np.random.default_rng(3)
    prompts = [
        f"Task: {word} the block, State: {' '.join(map(str, draw.choice([0, 7, 12, 128, 255], 8)))};\nAction: "
        for word in ("pick", "push", "lift", "turn", "stack") * 40
    ]
    common = {
        "vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "pad_id": 0, "eos_id": 1, "bos_id": 2,
        "unk_id": 3, "add_dummy_prefix": False, "remove_extra_whitespaces": False, "normalization_rule_name":
        "identity", "hard_vocab_limit": False, "minloglevel": 2,
    }  # fmt: skip
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(prompts), model_writer=model, **{**common, **rules})
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return SentencePieceTokenizer(path)


GEMMA = {"split_digits": True}
UNIGRAM = {"split_digits": True, "model_type": "unigram", "vocab_size": 330}


@pytest.fixture(scope="module", params=["json", "model", "gemma", "unigram"])
def tokenizer(golden: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = golden / "pi05_tiny" / "lerobot_folder" / "tokenizer"
    if request.param == "json":
        return JsonTokenizer(folder / "tokenizer.json")
    if request.param == "model":
        return SentencePieceTokenizer(folder / "tokenizer.model")
    rules = {"gemma": GEMMA, "unigram": UNIGRAM}[request.param]
    return trained(tmp_path_factory.mktemp("tokenizer"), **rules)


def whole(tokenizer: Tokenizer, instruction: str, numbers: list[int]) -> list[int]:
    text = f"Task: {instruction}, State: {' '.join(map(str, numbers))};\nAction: "
    return [BOS_ID, *tokenizer.encode(text)]


def test_a_prompts_parts_are_the_prompt(tokenizer: Tokenizer) -> None:
    table, draw = PromptTable(tokenizer), np.random.default_rng(1)
    pairs = [number for pair in itertools.product((-1, 0, 9, 10, 99, 128, 255), NUMBERS) for number in pair]
    lists = [pairs, *(draw.integers(-1, 256, count).tolist() for count in (1, 2, 7, 8, 14, 32) for _ in range(30))]
    for at, numbers in enumerate(lists):
        said = SAID[at % len(SAID)]
        ids = [*table.words(said, str).ids, *(i for n in numbers for i in table.numbers[n + 1]), *table.end]
        assert ids == whole(tokenizer, said, numbers)


def test_an_instruction_is_tokenised_once_and_not_many_are_kept(golden: Path) -> None:
    table = PromptTable(JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json"))
    asked: list[str] = []

    def cleaned(instruction: str) -> str:
        asked.append(instruction)
        return instruction

    first = table.words("go", cleaned)
    assert table.words("go", cleaned) is first
    assert asked == ["go"]
    for number in range(300):
        table.words(f"go {number}", cleaned)
    assert len(table._words) == 256
    assert table.words("go", cleaned).ids.tolist() == first.ids.tolist()
    assert asked.count("go") == 2


class Joining:
    """A tokenizer of single characters, but for two that are one where they meet; it may not say so."""

    path, pieces = Path(), 1 << 16

    def __init__(self, pair: str, says: bool) -> None:
        self._pair, self._says = pair, says

    def vocabulary(self) -> list[str]:
        return [self._pair.replace(" ", "▁")] if self._says else []

    def encode(self, text: str) -> list[int]:
        return [ord(one) for one in text.replace(self._pair, "\uffff")]


@pytest.mark.parametrize("pair", [": ", "7 ", "5;", "0 1", " 12 3"])
def test_a_tokenizer_that_joins_parts_is_not_taken_apart(pair: str) -> None:
    if len(pair) < 5:  # the last one is too rare to be met
        with pytest.raises(ValueError, match=r"cuts|joins"):
            PromptTable(Joining(pair, says=False))
    with pytest.raises(ValueError, match="joins"):
        PromptTable(Joining(pair, says=True))


def test_a_trained_tokenizer_that_joins_numbers_is_noticed(tmp_path: Path) -> None:
    joining = trained(tmp_path, split_by_number=False)
    assert joining.encode(" 0;\n") != joining.encode(" 0") + joining.encode(";\n")
    with pytest.raises(ValueError, match="joins"):
        PromptTable(joining)


MODES: tuple[Mode, ...] = ("MEAN_STD", "MIN_MAX", "QUANTILES")


def normaliser(mode: Mode, openpi: bool, width: int) -> Normaliser:
    draw, kind = np.random.default_rng(2), np.float64 if openpi else np.float32
    low = draw.normal(size=width).astype(kind)
    high = (np.abs(draw.normal(size=width)) + (0 if mode == "MEAN_STD" else low)).astype(kind)
    high[2] = 0 if mode == "MEAN_STD" else low[2]
    return Normaliser(mode, low, high, 1e-6 if openpi else 1e-8, openpi)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("openpi", [True, False])
@pytest.mark.parametrize("width", [0, 32])
def test_prompts_in_c_are_those_of_python(rows: NativeRows, golden: Path, mode: Mode, openpi: bool, width: int) -> None:
    tokenizer = JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json")
    rule = normaliser(mode, openpi, 9)
    prompts = NativePrompts(rows, PromptTable(tokenizer), rule, 8, width, 200)
    draw, told, bins = np.random.default_rng(5), 0, set()
    for number in range(400):
        wanted = draw.uniform(-1.2, 1.2, 8)
        if number % 2:  # as near to the edges of bins as the robot's own numbers can be
            wanted = draw.integers(-130, 130, 8) / 128
        state = rule.inverse(wanted).astype((np.float32, np.float64)[number % 3 % 2])
        state[2] = rule.low[2]
        ids = prompts.tokens(SAID[number % len(SAID)], state, str)
        prompts.look_ahead()
        with np.errstate(over="ignore"):
            normalised = rule.forward(state.astype(np.float64))
        numbers = state_bins(np.pad(normalised, (0, width - 8)) if width else normalised).tolist()
        bins.update(numbers)
        expected = whole(tokenizer, SAID[number % len(SAID)], numbers)
        if len(expected) > 200:
            assert ids is None
        else:
            told += 1
            assert ids is not None
            assert ids.dtype == np.int64
            assert ids.tolist() == expected
    assert told > 300
    assert len(bins) > 200


def test_bins_are_those_of_python_on_and_beside_every_edge(rows: NativeRows, golden: Path) -> None:
    tokenizer = JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json")
    none = Normaliser("MEAN_STD", np.zeros(1), np.ones(1), 0.0, True)
    prompts = NativePrompts(rows, PromptTable(tokenizer), none, 1, 0, 200)
    edges = np.linspace(-1, 1, 257)
    values = [*edges, *np.nextafter(edges, 2), *np.nextafter(edges, -2), -0.0, 1e30, -1e30, 5e-324, -5e-324]
    for value in values:
        ids = prompts.tokens("go", np.array([value]), str)
        assert ids is not None
        assert ids.tolist() == whole(tokenizer, "go", state_bins(np.array([value])).tolist())


@pytest.mark.parametrize(
    "state",
    [
        np.array([0, np.nan, 0], np.float64), np.array([0, 0, np.inf], np.float32), np.array([1e39, 0, 0], np.float64),
        np.array([3e38, 0, 0], np.float64), np.zeros(2), np.zeros(4), np.zeros((1, 3)), np.zeros(3, np.int64),
        np.zeros(3, np.uint8),
    ],
)  # fmt: skip
def test_what_is_out_of_the_ordinary_is_left_to_python(
    rows: NativeRows, golden: Path, state: NDArray[np.generic]
) -> None:
    tokenizer = JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json")
    rule = Normaliser("MEAN_STD", np.zeros(3), np.full(3, 1e-3), 0.0, True)
    prompts = NativePrompts(rows, PromptTable(tokenizer), rule, 3, 0, 200)
    assert prompts.tokens("go", np.zeros(3), str) is not None
    assert prompts.tokens("go", state, str) is None


def test_a_prompt_that_just_fits_is_made_and_one_more_id_is_not(rows: NativeRows, golden: Path) -> None:
    tokenizer = JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json")
    rule, table = Normaliser("MEAN_STD", np.zeros(3), np.ones(3), 0.0, True), PromptTable(tokenizer)
    expected = whole(tokenizer, "go", [128] * 3)
    fits, not_quite = (NativePrompts(rows, table, rule, 3, 0, len(expected) - less) for less in (0, 1))
    made = fits.tokens("go", np.zeros(3), str)
    assert made is not None
    assert made.tolist() == expected
    assert not_quite.tokens("go", np.zeros(3), str) is None
    assert NativePrompts(rows, table, rule, 3, 0, 5).tokens("go on and on", np.zeros(3), str) is None


def test_tokens_of_one_row_are_not_those_of_another(rows: NativeRows, golden: Path) -> None:
    tokenizer = JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json")
    rule = Normaliser("MEAN_STD", np.zeros(1), np.ones(1), 0.0, True)
    prompts = NativePrompts(rows, PromptTable(tokenizer), rule, 1, 0, 200)
    made = []
    for number in range(12):
        made.append((number, prompts.tokens("go", np.array([number / 128]), str)))
        if number % 3:
            prompts.look_ahead()
    for number, ids in made:
        assert ids is not None
        assert ids.tolist() == whole(tokenizer, "go", [128 + number])


def test_checkpoints_whose_prompts_need_more_are_left_to_python(
    rows: NativeRows, golden: Path, network: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = JsonTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.json")
    ordinary = {"state_dim": 3, "state_normaliser": Normaliser("MEAN_STD", np.zeros(3), np.ones(3), 0.0, True)}
    assert native_prompts(rows, network.conventions("pi05", **ordinary), tokenizer, 1000) is not None
    assert native_prompts(rows, network.conventions("pi0", **ordinary), tokenizer, 1000) is None
    assert native_prompts(rows, network.conventions("pi05", adapt_to_pi=True, **ordinary), tokenizer, 1000) is None
    with caplog.at_level("INFO"):
        assert native_prompts(rows, network.conventions("pi05", **ordinary), tokenizer, 400) is None
        assert native_prompts(rows, network.conventions("pi05", state_dim=3), tokenizer, 1000) is None, "IDENTITY"
        joins = Joining(": ", says=True)
        assert native_prompts(rows, network.conventions("pi05", **ordinary), joins, 1000) is None
    assert caplog.text.count("tokenised anew") == 3


def test_where_there_is_no_compiler_python_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert native_rows.native_rows() is None
    assert "no-such-compiler" in caplog.text


COPIED = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
CALLED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


@pytest.mark.parametrize("fails", ["", "copy 2", "record", "launch 8"])
def test_a_launch_copies_records_and_launches_in_this_order_and_ends_at_the_first_error(
    rows: NativeRows, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    done: list[tuple[Any, ...]] = []

    def noted(name: str, *told: Any) -> int:
        done.append((name, *told))
        return 700 if fails in (name, f"{name} {told[0]}") else 0

    class Runtime:
        cudaMemcpyAsync = COPIED(lambda to, at, size, way, stream: noted("copy", to, at, size, way, stream))
        cudaEventRecord = CALLED(lambda event, stream: noted("record", event, stream))
        cudaGraphLaunch = CALLED(lambda graph, stream: noted("launch", graph, stream))

    monkeypatch.setattr(native_rows, "cuda_runtime", Runtime)
    launch = Launch(rows, [7, 8], 3)
    expected = [
        ("copy", 1, 11, 100, 1, 5), ("copy", 2, 12, 200, 1, 5), ("record", 9, 5), ("launch", 7, 5), ("launch", 8, 5),
    ]  # fmt: skip
    if not fails:
        launch.begin([(1, 11, 100), (2, 12, 200)], 9, 5)
        assert done == expected
        done.clear()
        launch.begin([(3, 13, 300)], 9, 5)
        assert [told[:2] for told in done] == [("copy", 3), ("record", 9), ("launch", 7), ("launch", 8)]
        return
    with pytest.raises(RuntimeError, match="700"):
        launch.begin([(1, 11, 100), (2, 12, 200)], 9, 5)
    assert done == expected[: len(done)]
    assert fails in (done[-1][0], f"{done[-1][0]} {done[-1][1]}")
