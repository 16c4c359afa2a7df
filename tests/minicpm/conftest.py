"""What the MiniCPM-Robot tests share: a tiny random checkpoint in the published layout, and folders to serve."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig
from taktline_worker.checkpoint import TensorFiles
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow
from taktline_worker.models.minicpm_robot.config import MiniCpmArchitecture, Stated, expected_shapes, read_architecture
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from taktline_worker.models.minicpm_robot.weights import load_weights
from taktline_worker.observation import EncodedImage, RobotInput
from torch import Tensor
from transformers import MiniCPMV4_6Config, MiniCPMV4_6Model

from tests.engine_fixtures import one_thread, pool, relative_l2  # noqa: F401 (fixtures)

IMAGE_TOKEN = 500
HEAD_WIDTH, LAYERS, BANKS, STATE, ACTION, HORIZON = 32, 4, 5, 12, 10, 6
STATED = {"action_horizon": HORIZON, "head_heads": 4, "image_size": 112}
TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 140,
    "patch_size": 14,
}
BACKBONE = {"text_config": TEXT, "vision_config": VISION, "insert_layer_id": 1, "image_token_id": IMAGE_TOKEN}


def official() -> MiniCPMV4_6Model:
    """The official backbone with random weights of a scale at which every part matters."""
    torch.manual_seed(5)
    config = MiniCPMV4_6Config(**json.loads(json.dumps(BACKBONE)))
    config._attn_implementation = "eager"
    model = MiniCPMV4_6Model(config).eval()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("A_log"):
                value.copy_(noise * 0.5)
            elif value.ndim == 1:
                value.copy_(0.3 * noise + (1.0 if "norm" in name and "language_model" not in name else 0.0))
            else:
                value.copy_(noise / value[0].numel() ** 0.5 if "embed" not in name else noise)
    return model


def head_tensors() -> dict[str, Tensor]:
    """The action head by its published names, without their prefix."""
    w = HEAD_WIDTH
    shapes: dict[str, tuple[int, ...]] = {"future_tokens.weight": (3, w), "position_embedding.weight": (16, w)}

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

    linear("model.timestep_encoder.timestep_embedder.linear_1", w, 256)
    linear("model.timestep_encoder.timestep_embedder.linear_2", w, w)
    linear("model.proj_out_1", 2 * w, w)
    linear("model.proj_out_2", 40, w)
    for name, rows, columns in (
        ("action_encoder.W1", ACTION + STATE, w),
        ("action_encoder.W2", 2 * w, w),
        ("action_encoder.W3", w, w),
        ("action_decoder.layer1", 40, 36),
        ("action_decoder.layer2", 36, ACTION),
    ):
        shapes[f"{name}.W"], shapes[f"{name}.b"] = (BANKS, rows, columns), (BANKS, columns)
    for index in range(LAYERS):
        prefix = f"model.transformer_blocks.{index}"
        memory = w if index % 2 else TEXT["hidden_size"]
        linear(f"{prefix}.norm1.linear", 2 * w, w)
        linear(f"{prefix}.attn1.to_q", w, w)
        linear(f"{prefix}.attn1.to_k", w, memory)
        linear(f"{prefix}.attn1.to_v", w, memory)
        linear(f"{prefix}.attn1.to_out.0", w, w)
        linear(f"{prefix}.ff.net.0.proj", 4 * w, w)
        linear(f"{prefix}.ff.net.2", w, 4 * w)
    generator = torch.Generator().manual_seed(7)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        if name.endswith((".bias", ".b")):
            return 0.1 * noise
        fan_in = shape[-2] if name.endswith(".W") else shape[-1]
        return noise if name in ("future_tokens.weight", "position_embedding.weight") else noise / fan_in**0.5

    return {name: made(name, shape) for name, shape in shapes.items()}


def checkpoint(prefix: str = "vlm.model.") -> dict[str, Tensor]:
    """All tensors of the tiny model under their published names."""
    backbone = {f"{prefix}{name}": value.detach().clone() for name, value in official().state_dict().items()}
    return backbone | {f"action_head.{name}": value for name, value in head_tensors().items()}


def write(target: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
    """Weights and config.json alone."""
    target.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint() if tensors is None else tensors, target / "model.safetensors")
    written = {"model_type": "minicpm_vla", "vlm_config": BACKBONE} | config
    (target / "config.json").write_text(json.dumps(written))
    return target


def architecture(folder: Path, **stated: Any) -> MiniCpmArchitecture:
    config = json.loads((folder / "config.json").read_text())
    return read_architecture(config, Stated(**(STATED | stated)), TensorFiles(folder).shapes)


def make_runner(folder: Path, dtype: torch.dtype = torch.float32) -> MiniCpmRunner:
    a = architecture(folder)
    weights = load_weights(TensorFiles(folder), a, list(range(BANKS)), dtype, torch.device("cpu"))
    return MiniCpmRunner(weights, a, IMAGE_TOKEN)


def make_row(images: int, words: int, embodiment: int = 1, seed: int = 0) -> MiniCpmRow:
    """Random patches behind random text; every image is framed by two tokens as in a prompt."""
    generator = np.random.default_rng(seed)
    tokens: list[int] = generator.integers(1, 400, 3).tolist()
    for _ in range(images):
        tokens += [498, *[IMAGE_TOKEN] * 4, 499]
    tokens += generator.integers(1, 400, words).tolist()
    return MiniCpmRow(
        patches=torch.from_numpy(generator.standard_normal((images, 64, 3 * 14 * 14), np.float32)),
        tokens=np.array(tokens, np.int64),
        state=torch.from_numpy(generator.standard_normal(STATE, np.float32)),
        noise=torch.from_numpy(generator.standard_normal((HORIZON, ACTION), np.float32)),
        embodiment=embodiment,
    )


# As published models spell it: images are placeholders between the turn's own symbols.
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{%- endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SYMBOLS = {
    "image_token": "<|image_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def make_tokenizer(target: Path, image_id: int = IMAGE_TOKEN) -> None:
    """A character-level tokenizer with the family's symbols, and its configuration and template."""
    symbols = ["<image>", "</image>", "<image_id>", "</image_id>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {chr(code): code for code in range(1, 400)} | {"[unk]": 0}
    vocabulary |= {symbol: 490 + index for index, symbol in enumerate(symbols)} | {"<|image_pad|>": image_id}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens([tokenizers.AddedToken(symbol, special=True) for symbol in (*symbols, "<|image_pad|>")])
    made.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": SYMBOLS}))
    (target / "chat_template.jinja").write_text(TEMPLATE)


def make_folder(target: Path, tensors: dict[str, Tensor] | None = None, **sidecar: Any) -> Path:
    """A servable folder: two cameras, an embodiment that uses part of the state and of the actions."""
    write(target, tensors)
    make_tokenizer(target)
    stated = {
        "cameras": ["agentview", "wrist"],
        "embodiment": 3,
        "state_channels": [[2, 6]],
        "action_channels": [[1, 3], [7, 10]],
        "control_period_ms": 50.0,
        "architecture": STATED,
    }
    (target / "taktline.json").write_text(json.dumps(stated | sidecar))
    return target


def engine_config(path: Path, **changes: Any) -> EngineConfig:
    model = {name: changes.pop(name) for name in ("sha256", "cameras", "statistics") if name in changes}
    options = {"precision": "fp32", "device": "cpu", "buckets": (1, 2)} | changes
    return EngineConfig(
        policy="manip",
        model=ModelConfig(family="minicpm-robot", path=str(path), revision="r1", **model),
        engine=EngineOptions(**options),
    )


def random_raw(height: int = 112, width: int = 112, seed: int = 0) -> EncodedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return EncodedImage("raw", pixels.tobytes(), pixels.shape)


def observe(**changes: Any) -> RobotInput:
    """A good observation for `make_folder`."""
    values: dict[str, Any] = {
        "images": {"agentview": random_raw(96, 128, seed=1), "wrist": random_raw(seed=2)},
        "state": np.array([0.5, 0.25, -0.4, 0.04]),
        "instruction": "Put the red block into the box.",
        "seed": 7,
    }
    return RobotInput(**(values | changes))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint's weights and config.json."""
    return write(tmp_path_factory.mktemp("minicpm") / "tiny")


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The helpers above, as one fixture because test folders are no packages."""
    return SimpleNamespace(
        distance=relative_l2,
        official=official,
        head=head_tensors,
        checkpoint=checkpoint,
        write=write,
        architecture=architecture,
        expected=expected_shapes,
        runner=make_runner,
        row=make_row,
        image_token=IMAGE_TOKEN,
        stated=STATED,
        served=make_folder,
        tokenizer=make_tokenizer,
        config=engine_config,
        observe=observe,
        raw=random_raw,
        heads=STATED["head_heads"],
        horizon=HORIZON,
        action=ACTION,
        state=STATE,
    )
