"""What the worker's tests share: golden cases as rows, golden folders as servable checkpoints, small observations."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_worker.models.pi.config import ArchitectureHints, PiArchitecture, PiConventions, read_architecture
from taktline_worker.models.pi.keys import canonical_names, family_of
from taktline_worker.models.pi.normalise import identity
from taktline_worker.models.pi.runner import PiRow, PiRunner
from taktline_worker.models.pi.weights import FP32, DTypePolicy, pack_weights
from taktline_worker.observation import EncodedImage, RobotInput
from torch import Tensor

from tests.engine_fixtures import one_thread, pool, relative_l2  # noqa: F401 (fixtures)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TOKENIZER = GOLDEN / "pi05_tiny" / "lerobot_folder" / "tokenizer"


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def distance() -> Callable[[Tensor, Tensor], float]:
    return relative_l2


def plain_conventions(family: str, **changes: Any) -> PiConventions:
    """Conventions of a case that gives network inputs directly."""
    values: dict[str, Any] = {
        "layout": "lerobot", "slots": (), "state_dim": 32, "action_dim": 32, "state_normaliser": identity(),
        "action_normaliser": identity(), "prompt": "state" if family == "pi05" else "text_newline",
        "prompt_tokens": 200, "resize": "bilinear", "horizon": 10, "solver_steps": 10,
    }  # fmt: skip
    return PiConventions(**{**values, **changes})


def load_network(
    weights: Path, vision_heads: int, policy: DTypePolicy = FP32, **conventions: Any
) -> tuple[PiRunner, PiArchitecture]:
    stored = load_file(weights)
    canonical = {target: stored[name] for name, target in canonical_names(stored).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical.items()}
    family = family_of(shapes)
    architecture = read_architecture(family, shapes, ArchitectureHints(vision_heads=vision_heads))
    packed = pack_weights(
        canonical, architecture, plain_conventions(family, **conventions), policy, torch.device("cpu")
    )
    return PiRunner(packed, architecture), architecture


def case_rows(case: Mapping[str, Tensor], architecture: PiArchitecture) -> list[PiRow]:
    """Rows of a golden case that holds network inputs; masked cameras and prompt padding are left out."""
    rows = []
    for index in range(case["tokens"].shape[0]):
        present = [case[f"image_{i}"][index] for i in range(3) if bool(case[f"image_mask_{i}"][index])]
        count = int(case["token_mask"][index].sum())
        rows.append(
            PiRow(
                pixels=torch.stack(present),
                tokens=case["tokens"][index, :count].numpy(),
                noise=case["noise"][index],
                state=case["state"][index] if architecture.family == "pi0" else None,
            )
        )
    return rows


@dataclass(frozen=True)
class Network:
    """The helpers above, handed to tests as one fixture because test folders are no packages."""

    load: Callable[..., tuple[PiRunner, PiArchitecture]] = load_network
    rows: Callable[..., list[PiRow]] = case_rows
    conventions: Callable[..., PiConventions] = plain_conventions


@pytest.fixture(scope="session")
def network() -> Network:
    return Network()


# Cameras that the golden requests leave out in some case.
OPTIONAL = {"pi05": ["left_wrist_0_rgb"], "pi0": ["image"]}


def make_folder(target: Path, family: str, **sidecar: Any) -> Path:
    """A servable copy of the golden LeRobot folder of `family`."""
    shutil.copytree(
        GOLDEN / f"{family}_tiny" / "lerobot_folder", target, ignore=shutil.ignore_patterns("case_*", "README.md")
    )
    shutil.copytree(TOKENIZER, target / "tokenizer", dirs_exist_ok=True)
    content = {"architecture": {"vision_heads": 2}, "control_period_ms": 50} | sidecar
    (target / "taktline.json").write_text(json.dumps(content))
    return target


def make_openpi_folder(
    target: Path, family: str = "pi0", statistics: Mapping[str, Any] | None = None, **sidecar: Any
) -> Path:
    """A servable openpi folder: golden weights under that layout's names, statistics of 8 and 7 dimensions or given."""
    target.mkdir(parents=True)
    stored = load_file(GOLDEN / f"{family}_tiny" / "lerobot_folder" / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in stored.items() if "embed_tokens" not in name}
    save_file(renamed, target / "model.safetensors")
    assets = target / "assets" / "lab" / "arm"
    assets.mkdir(parents=True)
    if statistics is None:
        shutil.copy(GOLDEN / "preprocess" / "openpi" / "norm_stats.json", assets / "norm_stats.json")
    else:
        (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": statistics}))
    shutil.copy(TOKENIZER / "tokenizer.model", target / "tokenizer.model")
    content = {"architecture": {"vision_heads": 2}, "control_period_ms": 50} | sidecar
    (target / "taktline.json").write_text(json.dumps(content))
    return target


@dataclass(frozen=True)
class Folders:
    """Makers of checkpoint folders."""

    lerobot: Callable[..., Path] = make_folder
    openpi: Callable[..., Path] = make_openpi_folder


@pytest.fixture(scope="session")
def folders() -> Folders:
    return Folders()


def engine_config(path: Path, family: str = "pi05", **changes: Any) -> EngineConfig:
    model = {name: changes.pop(name) for name in ("sha256", "cameras", "statistics") if name in changes}
    options = {"precision": "fp32", "device": "cpu", "buckets": (1, 2, 4)} | changes
    return EngineConfig(
        policy="tiny",
        model=ModelConfig(family=family, path=str(path), revision="r1", **model),
        engine=EngineOptions(**options),
    )


@pytest.fixture(scope="session")
def config_of() -> Callable[..., EngineConfig]:
    return engine_config


def encoded(kind: str, height: int = 48, width: int = 64, seed: int = 0) -> EncodedImage:
    """A random frame as JPEG, PNG or raw bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if kind == "raw":
        return EncodedImage("raw", pixels.tobytes(), pixels.shape)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind.upper())
    return EncodedImage(kind, stream.getvalue())


CAMERAS = {"pi05": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"), "pi0": ("image", "image2")}


def observe(family: str = "pi05", **changes: Any) -> RobotInput:
    """A good observation for the golden folders."""
    values: dict[str, Any] = {
        "images": {name: encoded("jpeg", seed=index) for index, name in enumerate(CAMERAS[family])},
        "state": np.linspace(-1, 1, 8, dtype=np.float32),
        "instruction": "pick the red cube",
        "seed": 7,
    }
    return RobotInput(**(values | changes))


@dataclass(frozen=True)
class Observations:
    """Makers of frames and observations."""

    image: Callable[..., EncodedImage] = encoded
    make: Callable[..., RobotInput] = observe


@pytest.fixture(scope="session")
def observations() -> Observations:
    return Observations()
