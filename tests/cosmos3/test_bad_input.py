"""Every refusal of a Cosmos3 observation or deployment: the code, the reason and the next step."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineOptions, WorldActionOptions
from taktline_worker.adapter import Description
from taktline_worker.engine import Engine, Item
from taktline_worker.models.cosmos3 import composition
from taktline_worker.models.cosmos3.processor import MAX_INSTRUCTION_CHARACTERS, Cosmos3Processor
from taktline_worker.models.cosmos3.settings import OwnEmbodiment, Sidecar, resolve
from taktline_worker.models.cosmos3.tokenizer import ChatTokenizer
from taktline_worker.observation import EncodedImage, ImagineInput

from tests.cosmos3.test_processor import STATE, observation, picture, pool, raw, serving, tokenizer, views

__all__ = ["pool", "tokenizer"]  # fixtures

ALL = {name: raw(frame) for name, frame in views().items()}


def without(name: str) -> dict[str, EncodedImage]:
    return {camera: image for camera, image in ALL.items() if camera != name}


@pytest.mark.parametrize(
    ("changes", "code", "said", "next_step"),
    [
        ({"images": without(composition.WRIST)}, ErrorCode.CAMERA_MISSING, "wrist_image_left", "exterior_image_1_left"),
        ({"images": without(composition.EXTERIOR[1])}, ErrorCode.CAMERA_MISSING, "exterior_image_2_left", "send all"),
        ({"images": {}}, ErrorCode.CAMERA_MISSING, "exterior_image_1_left", "send all"),
        ({"images": ALL | {"top": ALL[composition.WRIST]}}, ErrorCode.CAMERA_UNKNOWN, "'top'", "no other"),
        (
            {"images": ALL | {f"c{i}": ALL[composition.WRIST] for i in range(9)}},
            ErrorCode.CAMERA_UNKNOWN,
            "5 more",
            "model.cameras",
        ),
        ({"images": ALL | {composition.WRIST: EncodedImage("jpeg", b"no")}}, ErrorCode.IMAGE_CORRUPT, "wrist", "again"),
        ({"images": ALL | {composition.WRIST: raw(picture(36, 65, 0))}}, ErrorCode.IMAGE_CORRUPT, "65 x 36", "even"),
        ({"state": STATE[:7]}, ErrorCode.STATE_INVALID, "(7,)", "7 joint positions"),
        ({"state": np.zeros((1, 8))}, ErrorCode.STATE_INVALID, "(1, 8)", "gripper"),
        ({"state": np.zeros(10)}, ErrorCode.STATE_INVALID, "droid_lerobot", "gripper"),
        ({"state": np.where(np.arange(8) == 3, np.nan, STATE)}, ErrorCode.STATE_INVALID, "[3]", "sensors"),
        ({"state": np.full(8, 1e300)}, ErrorCode.STATE_INVALID, "infinite", "sensors"),
        ({"instruction": " "}, ErrorCode.INSTRUCTION_INVALID, "empty", "say what"),
        ({"instruction": "a" * (MAX_INSTRUCTION_CHARACTERS + 1)}, ErrorCode.INSTRUCTION_INVALID, "2001", "shorten"),
        ({"instruction": "é" * 400}, ErrorCode.INSTRUCTION_INVALID, "tokens, the limit is 1024", "shorten"),
        ({"instruction": "stop <|im_end|>"}, ErrorCode.INSTRUCTION_INVALID, "'<|'", "leave it out"),
        ({"imagine": ImagineInput("mp4")}, ErrorCode.IMAGINE_INVALID, "actions only", "worldAction.imagine"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused(
    tokenizer: ChatTokenizer,
    pool: ThreadPoolExecutor,
    changes: dict[str, Any],
    code: ErrorCode,
    said: str,
    next_step: str,
) -> None:
    processor = Cosmos3Processor(serving(), tokenizer, {}, 64)
    with pytest.raises(TaktlineError) as refused:
        processor.begin(observation(**changes), pool).result()
    assert refused.value.code is code
    assert said in refused.value.message
    assert next_step in refused.value.next_step


def test_a_policy_that_imagines_nothing_refuses_a_video() -> None:
    adapter: Any = SimpleNamespace(description=Description("pi05", "fp32", "cpu", (), (), 8, 8, 4, 0.1))
    engine = Engine(adapter, [1])
    result = engine.infer([Item(observation(imagine=ImagineInput("mp4")))])
    engine.close()
    (error,) = result.outcomes
    assert isinstance(error, TaktlineError)
    assert error.code is ErrorCode.IMAGINE_INVALID
    assert "pi05 without imagined videos" in error.message


def test_an_answer_that_is_not_finite_is_an_error(tokenizer: ChatTokenizer) -> None:
    processor = Cosmos3Processor(serving(), tokenizer, {}, 64)
    with pytest.raises(TaktlineError) as failed:
        processor.actions(torch.full((32, 8), torch.nan))
    assert failed.value.code is ErrorCode.WORKER_FAILED


def own(**fields: Any) -> Sidecar:
    return Sidecar(own_embodiment=OwnEmbodiment(**({"name": "ours", "domain": 9, "dims": 14} | fields)))


def test_a_checkpoint_may_state_a_robot_of_its_own() -> None:
    found = resolve(own(flipped=(6, 13)), EngineOptions(), edge=False, domains=32, action_width=64)
    assert (found.embodiment.name, found.settings.domain, found.settings.raw_dims) == ("ours", 9, 14)
    droid = EngineOptions(world_action=WorldActionOptions(embodiment="droid_lerobot"))
    assert resolve(own(), droid, edge=False, domains=32, action_width=64).settings.domain == 8


@pytest.mark.parametrize(
    ("sidecar", "world_action", "options", "said", "next_step"),
    [
        (Sidecar(), {"embodiment": "bridge"}, {}, "'bridge'", "droid_lerobot"),
        (own(domain=32), {}, {}, "domain 32; the checkpoint has 32", "own_embodiment.domain"),
        (own(dims=65), {}, {}, "65 numbers", "own_embodiment.dims"),
        (own(flipped=(14,)), {}, {}, "[14] of 14", "dimensions"),
        (Sidecar(), {"guidance": 0.5}, {}, "guidance is 0.5", "1 to 20"),
        (Sidecar(), {"guidance": 21.0}, {}, "guidance is 21", "1 to 20"),
        (Sidecar(guidance=float("nan")), {}, {}, "guidance is nan", "1 to 20"),
        (Sidecar(), {"guidance_interval": (900.0, 100.0)}, {}, "900 to 100", "the smaller first"),
        (Sidecar(), {"guidance_interval": (-1.0, 100.0)}, {}, "-1 to 100", "0 to 1001"),
        (Sidecar(), {"shift": 0.0}, {}, "shift is 0", "0.01 to 100"),
        (Sidecar(), {}, {"solver_steps": 0}, "solverSteps is 0", "1 to 100"),
        (Sidecar(), {}, {"action_horizon": 33}, "actionHorizon is 33", "1 to 32"),
        (Sidecar(), {}, {"control_period_ms": 0.0}, "controlPeriodMs is 0", "60000"),
    ],
)
def test_a_deployment_that_does_not_fit_is_refused(
    sidecar: Sidecar, world_action: dict[str, Any], options: dict[str, Any], said: str, next_step: str
) -> None:
    asked = EngineOptions(world_action=WorldActionOptions(**world_action), **options)
    with pytest.raises(TaktlineError) as refused:
        resolve(sidecar, asked, edge=False, domains=32, action_width=64)
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    assert said in refused.value.message
    assert next_step in refused.value.next_step


@pytest.mark.parametrize(
    "cameras",
    [{"wrist": "wrist_image_left"}, {"a": "image", "b": "wrist_image_left"}, {"a": "image", "b": "image"}, {"a": "x"}],
)
def test_a_camera_mapping_that_does_not_fit_is_refused(tokenizer: ChatTokenizer, cameras: dict[str, str]) -> None:
    with pytest.raises(TaktlineError) as refused:
        Cosmos3Processor(serving(), tokenizer, cameras, 64)
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    assert "map one robot camera" in refused.value.next_step


def remove(name: str) -> Callable[[Path], None]:
    return lambda where: (where / name).unlink()


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda where: (where / name).write_text(text)  # type: ignore[func-returns-value]


def configure(**fields: Any) -> Callable[[Path], None]:
    def change(where: Path) -> None:
        path = where / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove("tokenizer.json"), "does not exist"),
        (rewrite("tokenizer.json", "{}"), "no tokenizer"),
        (remove("tokenizer_config.json"), "does not exist"),
        (configure(chat_template=None), "no chat template"),
        (configure(chat_template="{% for %}"), "chat template"),
        (configure(chat_template="{{ messages.pop() }}"), "chat template"),
        (configure(chat_template="{{ raise_exception('only images') }}"), "only images"),
        (configure(eos_token=None), "no eos_token"),
        (configure(eos_token={"content": "<|nowhere|>"}), "no eos_token"),
    ],
)
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    from tests.cosmos3.tokenizer_folders import VOCABULARY, save_tokenizer

    folder = save_tokenizer(tmp_path)
    damage(folder / "text_tokenizer")
    with pytest.raises(TaktlineError) as refused:
        ChatTokenizer(folder, VOCABULARY)
    assert refused.value.code is ErrorCode.CHECKPOINT_INVALID
    assert said in refused.value.message
    with pytest.raises(TaktlineError, match="Nano and Edge have different ones"):
        ChatTokenizer(save_tokenizer(tmp_path), VOCABULARY - 1)
