"""What the GR00T tests share: the golden model, its cases as rows, and tiny servable folders around it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_worker.checkpoint import TensorFiles
from taktline_worker.models.groot.batch import GrootRow
from taktline_worker.models.groot.config import GrootArchitecture, read_architecture
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.weights import load_weights
from taktline_worker.observation import EncodedImage, RobotInput
from torch import Tensor

from benchmarks.fp8_backbones import golden_rows
from tests.engine_fixtures import one_thread, pool, relative_l2  # noqa: F401 (fixtures)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "groot_n1_7_tiny"
HORIZON = 6
CPU = torch.device("cpu")


def architecture() -> GrootArchitecture:
    config, backbone = (json.loads((GOLDEN / name).read_text()) for name in ("config.json", "backbone_config.json"))
    return read_architecture(config, backbone, TensorFiles(GOLDEN).shapes)


def make_runner(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> GrootRunner:
    a = architecture()
    slots = list(range(a.head.embodiments))
    return GrootRunner(load_weights(TensorFiles(GOLDEN), a, slots, dtype, device), a)


def read_case(name: str) -> tuple[dict[str, Tensor], list[GrootRow]]:
    """A golden case and its rows without padding."""
    case = load_file(GOLDEN / f"{name}.safetensors")
    return case, golden_rows(case)


def make_tokenizer(target: Path, image_id: int = 500) -> None:
    """A character-level tokenizer with the backbone's symbols at the golden model's ids."""
    symbols = {498: "<|vision_start|>", 499: "<|vision_end|>", 501: "<|im_start|>", 502: "<|im_end|>"}
    symbols[image_id] = "<|image_pad|>"
    vocabulary = {chr(code): code for code in range(1, 400)}
    vocabulary |= {symbol: index for index, symbol in symbols.items()} | {"[unk]": 0}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens([tokenizers.AddedToken(symbol, special=True) for symbol in symbols.values()])
    made.save(str(target))


def statistics_of(low: list[float], high: list[float]) -> dict[str, list[float]]:
    mid = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    spread = [(b - a) / 4 for a, b in zip(low, high, strict=True)]
    outer = [[a - 0.1 for a in low], [b + 0.1 for b in high]]
    return {"min": outer[0], "max": outer[1], "mean": mid, "std": spread, "q01": low, "q99": high}


def modality(keys: list[str], **extra: Any) -> dict[str, Any]:
    return {"delta_indices": [0], "modality_keys": keys} | extra


ABSOLUTE = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
TAGS: dict[str, dict[str, Any]] = {
    "libero_sim": {
        "video": modality(["image", "wrist_image"]),
        "state": modality(["arm", "gripper"], mean_std_embedding_keys=["gripper"]),
        "action": modality(["arm", "gripper"], action_configs=[ABSOLUTE, ABSOLUTE])
        | {"delta_indices": list(range(HORIZON))},
        "language": modality(["annotation.human.action.task_description"]),
    },
    "droid": {
        "video": {"delta_indices": [-15, 0], "modality_keys": ["exterior"]},
        "state": modality(["eef_9d", "joints", "angle"], sin_cos_embedding_keys=["angle"]),
        "action": modality(
            ["eef_9d", "joints"],
            action_configs=[
                {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": None},
                {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": "joints"},
            ],
        )
        | {"delta_indices": list(range(4))},
        "language": modality(["annotation.language"]),
    },
}
STATISTICS: dict[str, Any] = {
    "libero_sim": {
        "state": {"arm": statistics_of([-1.0, -0.5, 2.0], [1.0, 0.5, 2.0]), "gripper": statistics_of([0.0], [0.08])},
        "action": {"arm": statistics_of([-0.2, -0.1, 0.0], [0.2, 0.1, 0.4]), "gripper": statistics_of([0.0], [1.0])},
    },
    "droid": {
        "state": {
            "eef_9d": statistics_of([-1.0] * 9, [1.0] * 9),
            "joints": statistics_of([-2.0, -2.0], [2.0, 2.0]),
            "angle": statistics_of([-3.0], [3.0]),
        },
        "action": {"eef_9d": statistics_of([-1.0] * 9, [1.0] * 9), "joints": statistics_of([-1.0] * 2, [1.0] * 2)},
        "relative_action": {
            "eef_9d": statistics_of([-0.1] * 3 + [-1.0] * 6, [0.1] * 3 + [1.0] * 6),
            "joints": {
                name: [[sign * 0.1 * (t + 1)] * 2 for t in range(4)]
                for name, sign in {"min": -1, "max": 1, "mean": 0, "std": 1, "q01": -0.5, "q99": 0.5}.items()
            },
        },
    },
}
PROCESSOR = {
    "modality_configs": TAGS,
    "use_albumentations": True,
    "letter_box_transform": False,
    "shortest_image_edge": 256,
    "crop_fraction": 0.95,
    "formalize_language": True,
    "use_percentiles": True,
    "clip_outliers": True,
    "apply_sincos_state_encoding": True,
    "use_relative_action": True,
    "exclude_state": False,
    "max_state_dim": 20,
    "max_action_dim": 20,
}


def make_folder(target: Path, processor: dict[str, Any] | None = None, **sidecar: Any) -> Path:
    """A servable folder with the golden weights and two embodiments."""
    target.mkdir(parents=True)
    for name in ("config.json", "backbone_config.json", "model.safetensors"):
        shutil.copy(GOLDEN / name, target / name)
    make_tokenizer(target / "tokenizer.json")
    options = PROCESSOR | (processor or {})
    (target / "processor_config.json").write_text(json.dumps({"processor_kwargs": options}))
    (target / "statistics.json").write_text(json.dumps(STATISTICS))
    (target / "embodiment_id.json").write_text(json.dumps({"libero_sim": 2, "droid": 3, "unused": 1}))
    (target / "taktline.json").write_text(json.dumps({"control_period_ms": 50.0} | sidecar))
    return target


def engine_config(path: Path, tag: str = "libero_sim", **changes: Any) -> EngineConfig:
    model = {name: changes.pop(name) for name in ("sha256", "cameras") if name in changes}
    options = {"precision": "fp32", "device": "cpu", "buckets": (1, 2)} | changes
    return EngineConfig(
        policy="groot",
        model=ModelConfig(family="gr00t-n1.7", path=str(path), revision="r1", statistics=tag, **model),
        engine=EngineOptions(**options),
    )


def random_raw(height: int = 96, width: int = 128, seed: int = 0) -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return EncodedImage("raw", pixels.tobytes(), pixels.shape)


def observe(**changes: Any) -> RobotInput:
    """A good observation for `libero_sim`."""
    values: dict[str, Any] = {
        "images": {"image": random_raw(seed=1), "wrist_image": random_raw(128, 96, seed=2)},
        "state": np.array([0.5, 0.25, 2.0, 0.04]),
        "instruction": "Pick up the red block, please!",
        "seed": 7,
    }
    return RobotInput(**(values | changes))


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, as one fixture because test folders are no packages."""
    return SimpleNamespace(
        golden=GOLDEN,
        distance=relative_l2,
        architecture=architecture,
        runner=make_runner,
        case=read_case,
        folder=make_folder,
        tokenizer=make_tokenizer,
        config=engine_config,
        observe=observe,
        raw=random_raw,
    )
