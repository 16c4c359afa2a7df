"""Tiny whole policy folders and engine configs for the serving tests: the official request in a small shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_worker.models.cosmos3.composition import VIEWS
from taktline_worker.observation import EncodedImage, RobotInput

from tests.cosmos3.tiny_policy import make_model, write_checkpoint
from tests.cosmos3.tokenizer_folders import VOCABULARY, save_tokenizer
from tests.cosmos3.vae_checkpoints import save_vae, tiny_vae

STATE = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, 0.25], dtype=np.float32)
TASK = "put the cup into the sink"
SHAPE = {"frames": 9, "actions": 8, "padded": [96, 128], "content": [92, 96], "fps": 15.0}


def save_policy(folder: Path, seed: int = 0) -> Path:
    """A Nano policy with two key heads, so that it can be cut in two."""
    write_checkpoint(make_model("nano", seed, vocab_size=VOCABULARY, num_hidden_layers=2), folder)
    save_vae(folder, tiny_vae(seed))
    save_tokenizer(folder)
    (folder / "taktline.json").write_text(json.dumps({"own_shape": SHAPE}))
    return folder


def engine_config(folder: Path, **options: Any) -> EngineConfig:
    model = ModelConfig(family="cosmos3-nano", path=str(folder), revision="r1")
    values = {"device": "cpu", "precision": "fp32", "buckets": (1, 2)} | options
    return EngineConfig(policy="cosmos", model=model, engine=EngineOptions(**values))


def pictures() -> dict[str, np.ndarray[Any, np.dtype[np.uint8]]]:
    random = np.random.default_rng(3)
    return {name: random.integers(0, 256, (60, 96, 3), dtype=np.uint8) for name in VIEWS}


def observe(**changes: Any) -> RobotInput:
    images = {name: EncodedImage("raw", frame.tobytes(), frame.shape) for name, frame in pictures().items()}
    values: dict[str, Any] = {"images": images, "state": STATE, "instruction": TASK, "seed": 5}
    return RobotInput(**(values | changes))
