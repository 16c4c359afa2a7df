"""Observations to requests: composition, padding, prompts and conversions, against independent statements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Cosmos3OmniPipeline
from taktline_protocol.deployment import EngineOptions, WorldActionOptions
from taktline_worker.models.cosmos3 import composition
from taktline_worker.models.cosmos3.processor import Cosmos3Processor, PreparedRow
from taktline_worker.models.cosmos3.prompt import prompt_text
from taktline_worker.models.cosmos3.request import OFFICIAL, PAPER, draw_noise
from taktline_worker.models.cosmos3.settings import VIEW_TEXT, Serving, Sidecar, resolve
from taktline_worker.models.cosmos3.tokenizer import ChatTokenizer
from taktline_worker.observation import EncodedImage, RobotInput
from transformers import PreTrainedTokenizerFast

from tests.cosmos3.tokenizer_folders import TEMPLATE, VOCABULARY, make_tokenizer, save_tokenizer

TASK = "Put the banana into the bowl"


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")), VOCABULARY)


def serving(sidecar: Sidecar | None = None, **options: Any) -> Serving:
    return resolve(sidecar or Sidecar(), EngineOptions(**options), edge=False, domains=32, action_width=64)


def picture(height: int, width: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def raw(frame: np.ndarray[Any, np.dtype[np.uint8]]) -> EncodedImage:
    return EncodedImage("raw", frame.tobytes(), frame.shape)


def views() -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    sizes = {composition.WRIST: (360, 640), **dict.fromkeys(composition.EXTERIOR, (720, 1280))}
    return {name: picture(*size, seed) for seed, (name, size) in enumerate(sizes.items())}


STATE = np.array([0.1, -0.2, 0.3, -1.5, 0.5, 1.6, 0.7, 0.25])


def observation(**changes: Any) -> RobotInput:
    values: dict[str, Any] = {
        "images": {name: raw(frame) for name, frame in views().items()},
        "state": STATE,
        "instruction": TASK,
        "seed": 7,
    }
    return RobotInput(**(values | changes))


def prepared(processor: Cosmos3Processor, pool: ThreadPoolExecutor, **changes: Any) -> PreparedRow:
    return processor.begin(observation(**changes), pool).result()


def plain_bilinear(frame: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """Half-pixel centres, two taps a side, edges repeated: written out with plain loops over numpy."""
    out = np.zeros((height, width, 3))
    source = frame.astype(np.float64)
    h, w = frame.shape[:2]
    for row in range(height):
        y = max((row + 0.5) * h / height - 0.5, 0.0)
        top = min(int(y), h - 1)
        below, part = min(top + 1, h - 1), y - int(y)
        line = source[top] * (1 - part) + source[below] * part
        x = np.maximum((np.arange(width) + 0.5) * w / width - 0.5, 0.0)
        left = np.minimum(x.astype(int), w - 1)
        share = (x - left)[:, None]
        out[row] = line[left] * (1 - share) + line[np.minimum(left + 1, w - 1)] * share
    return out


def test_the_wrist_stands_above_the_two_exterior_views() -> None:
    wrist, first, second = picture(36, 64, 0), picture(54, 96, 1), picture(72, 64, 2)
    found = composition.compose(wrist, first, second)
    assert found.shape == (54, 64, 3)
    assert np.array_equal(found[:36], wrist)
    for frame, part in ((first, found[36:, :32]), (second, found[36:, 32:])):
        exact = plain_bilinear(frame, 18, 32)
        # Fractions are cut off, not rounded; where fp32 lies on the other side of a whole number both are right.
        near = np.abs(exact - np.round(exact)) < 1e-3
        assert np.array_equal(part[~near], np.floor(exact)[~near].astype(np.uint8))
        assert np.abs(part - exact).max() <= 1.001


def test_the_picture_is_mirrored_to_the_right_and_below() -> None:
    frame = picture(54, 64, 3)
    found = composition.to_frames(frame, (54, 64), (64, 80), 5)
    assert found.shape == (3, 5, 64, 80)
    expected = np.pad(frame, ((0, 10), (0, 16), (0, 0)), mode="reflect").transpose(2, 0, 1).astype(np.float32)
    assert torch.equal(found[:, 0], torch.from_numpy(expected) / 127.5 - 1)
    assert bool((found[:, 1:] == -1).all())


def test_edges_are_repeated_where_there_is_not_enough_to_mirror() -> None:
    frame = picture(16, 16, 4)
    found = composition.to_frames(frame, (16, 16), (16, 48), 1)
    expected = np.pad(frame, ((0, 0), (0, 32), (0, 0)), mode="edge").transpose(2, 0, 1).astype(np.float32)
    assert torch.equal(found[:, 0], torch.from_numpy(expected) / 127.5 - 1)


def test_a_request_of_the_official_shape(tokenizer: ChatTokenizer, pool: ThreadPoolExecutor) -> None:
    processor = Cosmos3Processor(serving(), tokenizer, {}, 64)
    assert processor.cameras == composition.VIEWS
    request = prepared(processor, pool).request
    assert request.frames.shape == (3, 1, 544, 736)
    composed = composition.compose(*views().values())
    content = (request.frames[:, 0, :540, :640] + 1) * 127.5
    assert torch.equal(content.round().to(torch.uint8), torch.from_numpy(composed).permute(2, 0, 1))
    assert request.state is not None
    # The gripper alone is turned round; joints are radians as they are.
    assert request.state.tolist() == pytest.approx([*STATE[:7], 0.75])
    video, actions = draw_noise(OFFICIAL, 64, 7)
    assert torch.equal(request.video_noise, video)
    assert torch.equal(request.action_noise, actions)
    assert request.video_noise.shape == (48, 9, 33, 40)
    assert request.action_noise.shape == (33, 64)
    assert not request.imagine


def test_a_picture_that_the_robot_composes_is_the_same_request(
    tokenizer: ChatTokenizer, pool: ThreadPoolExecutor
) -> None:
    three = prepared(Cosmos3Processor(serving(), tokenizer, {}, 64), pool).request
    ready = Cosmos3Processor(serving(), tokenizer, {"composed": "image"}, 64)
    assert ready.cameras == ("composed",)
    one = prepared(ready, pool, images={"composed": raw(composition.compose(*views().values()))}).request
    assert torch.equal(one.frames, three.frames)


def test_seeds_beyond_the_generators_range_count_by_their_low_bits(
    tokenizer: ChatTokenizer, pool: ThreadPoolExecutor
) -> None:
    processor = Cosmos3Processor(serving(), tokenizer, {}, 64)
    low, high = (prepared(processor, pool, seed=seed).request for seed in (7, 7 + 2**40))
    assert torch.equal(low.video_noise, high.video_noise)
    first, second = (prepared(processor, pool, seed=None).request for _ in range(2))
    assert not torch.equal(first.video_noise, second.video_noise)


def test_actions_come_back_in_robot_units(tokenizer: ChatTokenizer) -> None:
    processor = Cosmos3Processor(serving(action_horizon=20), tokenizer, {}, 64)
    given = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    found = processor.actions(given)
    assert found.shape == (20, 8)
    assert found.dtype == np.float32
    assert np.array_equal(found[:, :7], given[:20, :7].numpy())
    assert np.array_equal(found[:, 7], 1 - given[:20, 7].numpy())
    # What was given is another's: it is not written to.
    assert torch.equal(given, torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))


def test_the_papers_shape_has_no_state_row(tokenizer: ChatTokenizer, pool: ThreadPoolExecutor) -> None:
    processor = Cosmos3Processor(serving(world_action=WorldActionOptions(preset="paper")), tokenizer, {}, 64)
    assert processor.state_dim == 0
    request = prepared(processor, pool, state=np.zeros(0)).request
    assert request.state is None
    assert request.frames.shape == (3, 1, 480, 832)
    assert request.action_noise.shape == (PAPER.actions, 64)
    assert not bool(request.action_noise[:, 10:].any())
    # Its actions are no DROID actions: nothing of them is turned round.
    given = torch.rand(32, 10)
    assert np.array_equal(processor.actions(given), given.numpy())


def oracle_prompt(**changes: Any) -> Any:
    fields = {"view_point": "concat_view", "num_frames": 33, "fps": 15.0, "height": 544, "width": 736}
    return json.loads(Cosmos3OmniPipeline._build_action_json_prompt(TASK, **(fields | changes)))


@pytest.mark.parametrize("settings", [OFFICIAL, PAPER, replace(OFFICIAL, fps=30.0, frames=61)])
def test_the_json_prompt_is_the_oracles_with_the_layout_added(settings: Any) -> None:
    height, width = settings.padded
    expected = oracle_prompt(num_frames=settings.frames, fps=settings.fps, height=height, width=width)
    base = expected["cinematography"]["framing"]
    assert VIEW_TEXT.startswith(f"{base} ")
    expected["cinematography"]["framing"] = VIEW_TEXT
    # The order of the keys and the spaces are part of it.
    assert prompt_text("json", TASK, VIEW_TEXT, settings) == json.dumps(expected)


def test_a_sentence_keeps_its_own_end() -> None:
    for given, expected in (("Go", "Go."), (" Go! ", "Go!"), ("Go?", "Go?"), ("Go.", "Go.")):
        found = json.loads(prompt_text("json", given, VIEW_TEXT, OFFICIAL))
        assert found["actions"][0]["description"] == expected


def test_the_plain_prompt_is_four_sentences() -> None:
    assert prompt_text("plain", "Lift it", "One view.", OFFICIAL) == (
        "Lift it. One view. The video is 2.0 seconds long and is of 15 FPS. This video is of 544x736 resolution."
    )


@pytest.mark.parametrize("in_file", [False, True])
def test_tokens_are_those_of_the_oracle(tmp_path: Path, in_file: bool) -> None:
    ours = ChatTokenizer(save_tokenizer(tmp_path, in_file=in_file), VOCABULARY)
    theirs = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), eos_token="<|im_end|>", chat_template=TEMPLATE)
    pipeline = SimpleNamespace(
        config=SimpleNamespace(default_use_system_prompt=False),
        text_tokenizer=theirs,
        llm_special_tokens={
            "start_of_generation": theirs.convert_tokens_to_ids("<|vision_start|>"),
            "eos_token_id": theirs.eos_token_id,
        },
        image_resolution_template="",
        video_resolution_template="",
        inverse_image_resolution_template="",
        inverse_video_resolution_template="",
        _build_action_json_prompt=Cosmos3OmniPipeline._build_action_json_prompt,
    )
    conditional, unconditional = Cosmos3OmniPipeline.tokenize_prompt(
        pipeline, TASK, None, 33, 544, 736, 15.0, action_mode="policy", action_view_point="concat_view"
    )
    text = json.dumps(oracle_prompt())
    assert list(ours.encode(text)) == conditional
    assert list(ours.unconditional) == unconditional
    assert ours.unconditional[-2:] == ours.specials


def test_the_instruction_reaches_the_prompt(tokenizer: ChatTokenizer, pool: ThreadPoolExecutor) -> None:
    processor = Cosmos3Processor(serving(), tokenizer, {}, 64)
    request = prepared(processor, pool).request
    assert request.conditional == tokenizer.encode(prompt_text("json", TASK, VIEW_TEXT, OFFICIAL))
    assert request.unconditional == tokenizer.unconditional
    plain = Cosmos3Processor(serving(world_action=WorldActionOptions(prompt="plain")), tokenizer, {}, 64)
    assert prepared(plain, pool).request.conditional == tokenizer.encode(
        prompt_text("plain", TASK, VIEW_TEXT, OFFICIAL)
    )


def test_the_deployment_comes_before_the_folder_and_the_folder_before_the_preset() -> None:
    folder = Sidecar(guidance=2.0, shift=7.0, prompt="plain", guidance_interval=(100.0, 900.0))
    found = serving(folder, solver_steps=8, world_action=WorldActionOptions(guidance=4.0), control_period_ms=50.0)
    assert (found.settings.guidance, found.settings.shift, found.settings.steps) == (4.0, 7.0, 8)
    assert found.settings.interval == (100.0, 900.0)
    assert found.prompt == "plain"
    assert found.control_period_s == 0.05
    assert serving().settings == OFFICIAL
    assert serving().control_period_s == pytest.approx(1 / 15)


def test_the_edge_recipe_runs_guidance_at_its_first_step_only() -> None:
    edge = resolve(Sidecar(), EngineOptions(), edge=True, domains=32, action_width=64)
    assert edge.settings.interval == (960.0, 1001.0)
    everywhere = WorldActionOptions(guidance_interval=(0.0, 1001.0))
    found = resolve(Sidecar(), EngineOptions(world_action=everywhere), edge=True, domains=32, action_width=64)
    assert found.settings.interval == (0.0, 1001.0)
