"""Resize, normalisation, state digits and prompts against the official values of both layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from taktline_worker.models.pi.normalise import Mode, Normaliser, make_normaliser, state_bins
from taktline_worker.models.pi.processor import PiProcessor
from taktline_worker.models.pi.resize import to_model_input
from taktline_worker.models.pi.tokenizer import SentencePieceTokenizer

SIZES = ["480x640", "300x200", "224x224", "1080x1920"]


@pytest.fixture(scope="module")
def preprocess(golden: Path) -> Path:
    return golden / "preprocess"


@pytest.fixture(scope="module")
def processor(golden: Path, network: Any, preprocess: Path) -> Any:
    """A processor of given conventions around the golden tokenizer, with a π0.5 or π0 architecture."""

    def make(family: str, **conventions: Any) -> PiProcessor:
        name = f"{family}_tiny/lerobot_folder"
        _, architecture = network.load(golden / name / "model.safetensors", 2)
        tokenizer = SentencePieceTokenizer(golden / "pi05_tiny" / "lerobot_folder" / "tokenizer" / "tokenizer.model")
        return PiProcessor(architecture, network.conventions(family, **conventions), tokenizer, {})

    return make


def _png(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.array(Image.open(path).convert("RGB"))


def test_lerobot_resize_of_the_short_set(preprocess: Path) -> None:
    case = load_file(preprocess / "cases.safetensors")
    names = [name.removeprefix("raw_") for name in case if name.startswith("raw_")]
    assert names
    for name in names:
        ours = to_model_input(case[f"raw_{name}"], 224, "bilinear").numpy()
        assert np.abs(ours - case[f"model_input_{name}"]).max() <= 2e-6


@pytest.mark.parametrize("size", SIZES)
def test_lerobot_resize(preprocess: Path, size: str) -> None:
    expected = load_file(preprocess / "full" / "images.safetensors")[f"model_input_{size}"]
    ours = to_model_input(_png(preprocess / "full" / f"raw_{size}.png"), 224, "bilinear").numpy()
    assert np.abs(ours - expected).max() <= 2e-6


@pytest.mark.parametrize("size", SIZES)
def test_openpi_resize(preprocess: Path, size: str) -> None:
    raw = preprocess / "full" / f"raw_{size}.png"
    expected = raw if size == "224x224" else preprocess / "openpi" / f"resized_{size}.png"
    ours = to_model_input(_png(raw), 224, "pil")
    levels = ((ours + 1) / 2 * 255).round().permute(1, 2, 0).numpy()
    assert np.array_equal(levels, _png(expected))


def test_the_two_resizes_differ_where_they_shrink(preprocess: Path) -> None:
    raw = _png(preprocess / "full" / "raw_1080x1920.png")
    difference = (to_model_input(raw, 224, "pil") - to_model_input(raw, 224, "bilinear")).abs()
    assert 1e-2 < float(difference.max()) < 1e-1


def test_legacy_letterbox_bands_are_minus_three() -> None:
    frame = np.full((50, 100, 3), 128, np.uint8)
    legacy, current = (to_model_input(frame, 56, method) for method in ("bilinear_legacy", "bilinear"))
    assert float(legacy[0, 0, 0]) == -3.0
    assert float(current[0, 0, 0]) == -1.0
    assert torch.equal(legacy[:, 20:36], current[:, 20:36])
    square = np.full((80, 80, 3), 9, np.uint8)
    assert torch.equal(to_model_input(square, 56, "bilinear_legacy"), to_model_input(square, 56, "bilinear"))


def test_state_bins(preprocess: Path) -> None:
    case = load_file(preprocess / "cases.safetensors")
    assert np.array_equal(state_bins(case["state_normalised"]), case["state_bins"])
    assert state_bins(np.array([-1.5, -1.0, 0.0, 1.0, 7.0])).tolist() == [-1, 0, 128, 255, 255]


def test_pi05_prompts_of_the_short_set(preprocess: Path, processor: Any) -> None:
    pi05 = processor("pi05")
    for row in json.loads((preprocess / "prompts.json").read_text()):
        # A value in the middle of each bin, so that the digits are the row's own.
        state = np.array([(index + 0.5) / 128 - 1 for index in row["state_bins"]])
        assert pi05.prompt(row["task"], state) == row["prompt"]


def test_prompts_on_and_beside_bin_edges(preprocess: Path, processor: Any) -> None:
    pi05, pi0 = processor("pi05"), processor("pi0")
    rows = json.loads((preprocess / "full" / "prompts.json").read_text())
    assert len(rows) > 6
    for row in rows:
        state = np.array([float.fromhex(text) for text in row["state_hex"]], np.float32)
        assert pi05.prompt(row["task"], state) == row["pi05_prompt"]
        if "bins" in row:
            assert state_bins(state).tolist() == row["bins"]
            assert pi0.prompt(row["task"], state) == row["pi0_prompt"]


def test_prompts_from_normalised_states(preprocess: Path, processor: Any) -> None:
    case = load_file(preprocess / "full" / "normalise.safetensors")
    pi05 = processor("pi05")
    for row in json.loads((preprocess / "full" / "end_to_end_prompts.json").read_text()):
        state = case["quantiles.state_normalised"][row["row"], :5]
        assert pi05.prompt("wipe_the table", state) == row["pi05_prompt"]


def test_legacy_prompt_carries_the_padded_state(processor: Any) -> None:
    state = np.array([-1.0, 0.5], np.float32)
    assert processor("pi05").prompt("go", state) == "Task: go, State: 0 192;\nAction: "
    legacy = processor("pi05", state_prompt_width=32).prompt("go", state)
    assert legacy == f"Task: go, State: 0 192{' 128' * 30};\nAction: "


LEROBOT_MODES = [("quantiles", "QUANTILES"), ("mean_std", "MEAN_STD"), ("min_max", "MIN_MAX")]


def _lerobot(case: dict[str, Any], feature: str, mode: str) -> Normaliser:
    prefix = f"stats.{feature}."
    statistics = {name.removeprefix(prefix): value for name, value in case.items() if name.startswith(prefix)}
    return make_normaliser(
        cast(Mode, mode), statistics, feature=feature, width=0, eps=1e-8, always_add_eps=False, source="case"
    )


def _close(value: Any, reference: Any, tolerance: float) -> bool:
    return bool(np.all(np.abs(value - reference) <= tolerance * np.maximum(1, np.abs(reference))))


@pytest.mark.parametrize(("name", "mode"), LEROBOT_MODES)
def test_lerobot_normalisation_in_float32(preprocess: Path, name: str, mode: str) -> None:
    case = load_file(preprocess / "full" / "normalise.safetensors")
    state, action = (_lerobot(case, feature, mode) for feature in ("observation.state", "action"))
    assert _close(state.forward(case["state"]), case[f"{name}.state_normalised"], 1e-6)
    assert _close(action.forward(case["action_raw"]), case[f"{name}.action_normalised"], 1e-6)
    restored = action.inverse(case["action_normalised_in"])
    assert restored.dtype == np.float32
    assert _close(restored, case[f"{name}.action_unnormalised"], 1e-6)


def test_ten_percent_quantiles_use_their_own_statistics() -> None:
    statistics = {"q10": np.array([0.0, 2.0], np.float32), "q90": np.array([4.0, 2.0], np.float32)}
    normaliser = make_normaliser(
        "QUANTILE10", statistics, feature="x", width=2, eps=1e-8, always_add_eps=False, source="t"
    )
    assert normaliser.forward(np.array([1.0, 2.0], np.float32)).tolist() == [-0.5, -1.0]
    assert normaliser.inverse(np.array([-0.5, -1.0], np.float32)).tolist() == [1.0, 2.0]


def _openpi(preprocess: Path, feature: str, mode: str) -> Normaliser:
    content = json.loads((preprocess / "openpi" / "norm_stats.json").read_text())["norm_stats"][feature]
    statistics = {name: np.array(values, np.float64) for name, values in content.items()}
    return make_normaliser(
        cast(Mode, mode), statistics, feature=feature, width=0, eps=1e-6, always_add_eps=True, source="case"
    )


@pytest.mark.parametrize(("name", "mode"), LEROBOT_MODES[:2])
def test_openpi_normalisation_in_float64(preprocess: Path, name: str, mode: str) -> None:
    case = load_file(preprocess / "openpi" / "values.safetensors")
    state, actions = _openpi(preprocess, "state", mode), _openpi(preprocess, "actions", mode)
    ours = state.forward(case["state"])
    assert ours.dtype == np.float64
    assert _close(ours, case[f"{name}.state_normalised"], 1e-9)
    assert _close(actions.forward(case["actions"]), case[f"{name}.actions_normalised"], 1e-9)
    restored = actions.inverse(case["model_actions_padded"][..., :7])
    assert _close(restored, case[f"{name}.actions_unnormalised_padded"][..., :7], 1e-9)


def test_openpi_normalisation_needs_float64(preprocess: Path) -> None:
    """The degenerate dimensions tell the two precisions apart: the case really tests the dtype."""
    case = load_file(preprocess / "openpi" / "values.safetensors")
    wide = _openpi(preprocess, "state", "QUANTILES")
    narrow = Normaliser("QUANTILES", wide.low.astype(np.float32), wide.high.astype(np.float32), 1e-6, True)
    reference = case["quantiles.state_normalised"]
    assert np.abs(narrow.forward(case["state"]) - reference).max() > 1e-2


def test_openpi_token_ids(preprocess: Path, processor: Any) -> None:
    case = load_file(preprocess / "openpi" / "values.safetensors")
    normalised = case["quantiles.state_normalised"]
    order: dict[str, int] = {}
    for entry in json.loads((preprocess / "openpi" / "cases.json").read_text())["prompts"]:
        model, budget = entry["model"], entry["max_len"]
        index = order[model] = order.get(model, -1) + 1
        family, prompt = ("pi0", "text_then_newline") if model == "pi0" else ("pi05", "state")
        made = processor(family, prompt=prompt, prompt_tokens=budget, truncate_prompt=True)
        state = normalised[0 if entry["state_row"] is None else entry["state_row"]]
        assert made.prompt(entry["task"], state) == entry["encoded_strings"][0]
        tokens = made.tokens(entry["task"], state)
        mask = case[f"token_mask.{model}.{index}"]
        assert tokens.tolist() == case[f"tokens.{model}.{index}"][mask].tolist()
        assert len(tokens) == entry["valid"]


def test_pi05_without_state_reads_like_pi0(processor: Any) -> None:
    libero = processor("pi05", prompt="text_then_newline")
    states = (np.zeros(8), np.ones(8))
    first, second = (libero.tokens("pick_up the cup", state).tolist() for state in states)
    assert first == second
    assert first == processor("pi0", prompt="text_then_newline").tokens("pick_up the cup", states[0]).tolist()


def test_relative_actions_of_both_codes(preprocess: Path, processor: Any) -> None:
    lerobot = load_file(preprocess / "full" / "normalise.safetensors")
    mask = tuple(bool(on) for on in lerobot["relative.mask"])
    assert mask.count(False) == 1
    action = _lerobot(lerobot, "action", "QUANTILES")
    made = processor("pi05", action_dim=7, action_normaliser=action, relative_mask=mask)
    for row in range(4):
        padded = torch.zeros(10, 32)
        padded[:, :7] = torch.from_numpy(lerobot["action_normalised_in"][row])
        ours = made.finish(padded, lerobot["state"][row].astype(np.float64))
        assert _close(ours, lerobot["absolute.action"][row], 1e-6)

    openpi = load_file(preprocess / "openpi" / "values.safetensors")
    delta = tuple(bool(on) for on in openpi["delta.mask"])
    plain = processor("pi05", action_dim=7, relative_mask=delta)
    for row in range(4):
        padded = torch.zeros(10, 32)
        padded[:, :7] = torch.from_numpy(openpi["actions"][row])
        assert _close(
            plain.finish(padded, openpi["state"][row].astype(np.float64)), openpi["absolute.actions"][row], 1e-6
        )


@pytest.mark.parametrize(
    ("prompt", "budget", "slots"),
    [
        ("state", 200, (64, 128, 200)),
        ("state", 100, (64, 100)),
        ("state", 64, (64,)),
        ("text_then_newline", 200, (16, 48, 200)),
        ("text_then_newline", 48, (16, 48)),
        ("text_newline", 48, (16, 48)),
        ("text_newline", 12, (12,)),
    ],
)
def test_slots_that_prompts_are_padded_to(network: Any, prompt: Any, budget: int, slots: tuple[int, ...]) -> None:
    """Every prompt within the budget has a graph, and those of a usual length a smaller one."""
    assert network.conventions("pi05", prompt=prompt, prompt_tokens=budget).prompt_slots == slots
