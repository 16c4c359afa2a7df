"""The demo policy as LeRobot saves a π0.5: weights under LeRobot's names, configuration, processors and statistics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor

from taktline_demo.arm import CAMERAS
from taktline_demo.policy.architecture import Architecture
from taktline_demo.policy.network import DemoPolicy
from taktline_demo.policy.normalisation import STATISTICS, Statistics
from taktline_demo.task import CONTROL_PERIOD_S

_TOWERS = "model.paligemma_with_expert."
_VISION = f"{_TOWERS}paligemma.model.vision_tower.vision_model."
_LANGUAGE = f"{_TOWERS}paligemma.model.language_model."
_EXPERT = f"{_TOWERS}gemma_expert.model."
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^vision\.((?:patch|position)_embedding\..+)$", rf"{_VISION}embeddings.\1"),
        (r"^vision\.layers\.(\d+)\.((?:q|k|v|out)_proj\..+)$", rf"{_VISION}encoder.layers.\1.self_attn.\2"),
        (r"^vision\.layers\.(\d+)\.(fc\d\..+)$", rf"{_VISION}encoder.layers.\1.mlp.\2"),
        (r"^vision\.layers\.(\d+)\.(.+)$", rf"{_VISION}encoder.layers.\1.\2"),
        (r"^vision\.(post_layernorm\..+)$", rf"{_VISION}\1"),
        (r"^projector\.(.+)$", rf"{_TOWERS}paligemma.model.multi_modal_projector.linear.\1"),
        (r"^embed_tokens\.(.+)$", rf"{_LANGUAGE}embed_tokens.\1"),
        (r"^prefix\.(\d+)\.projections\.((?:q|k|v|o)_proj\..+)$", rf"{_LANGUAGE}layers.\1.self_attn.\2"),
        (r"^prefix\.(\d+)\.projections\.(.+)$", rf"{_LANGUAGE}layers.\1.mlp.\2"),
        (r"^prefix\.(\d+)\.(.+)$", rf"{_LANGUAGE}layers.\1.\2"),
        (r"^prefix_norm\.(.+)$", rf"{_LANGUAGE}norm.\1"),
        (r"^expert\.(\d+)\.projections\.((?:q|k|v|o)_proj\..+)$", rf"{_EXPERT}layers.\1.self_attn.\2"),
        (r"^expert\.(\d+)\.projections\.(.+)$", rf"{_EXPERT}layers.\1.mlp.\2"),
        (r"^expert\.(\d+)\.(.+)$", rf"{_EXPERT}layers.\1.\2"),
        (r"^expert_norm\.(.+)$", rf"{_EXPERT}norm.\1"),
        (r"^((?:action_in_proj|action_out_proj|time_mlp_in|time_mlp_out)\..+)$", r"model.\1"),
    )
)
_NORM_MAP = {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"}
_PREPROCESSOR_STATISTICS = "policy_preprocessor_step_3_normalizer_processor.safetensors"
_POSTPROCESSOR_STATISTICS = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


def lerobot_name(name: str) -> str:
    """LeRobot's name of a parameter of `DemoPolicy`. Raises KeyError for a name that is none."""
    for pattern, replacement in _RULES:
        if pattern.match(name):
            return pattern.sub(replacement, name)
    raise KeyError(name)


def save_checkpoint(folder: Path, policy: DemoPolicy, statistics: dict[str, Statistics], description: str) -> None:
    """Writes everything but the tokenizer and the card. `statistics` has the keys observation.state and action.

    Weights are stored in bf16, which halves the folder; readers choose their own precision.
    """
    folder.mkdir(parents=True, exist_ok=True)
    a = policy.architecture
    tensors = {lerobot_name(name): _stored(value) for name, value in policy.state_dict().items()}
    # LeRobot's class also holds two language heads that no action depends on; its strict loader wants them.
    tensors[f"{_TOWERS}paligemma.lm_head.weight"] = tensors[f"{_LANGUAGE}embed_tokens.weight"].clone()
    tensors[f"{_TOWERS}gemma_expert.lm_head.weight"] = torch.zeros(a.vocabulary, a.expert_width, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(a))
    _write_json(folder / "policy_preprocessor.json", _preprocessor(a))
    _write_json(folder / "policy_postprocessor.json", _postprocessor(a))
    flat = {f"{key}.{name}": value for key, group in statistics.items() for name, value in group.values.items()}
    save_arrays(flat, folder / _PREPROCESSOR_STATISTICS)
    save_arrays(flat, folder / _POSTPROCESSOR_STATISTICS)
    sidecar = {
        "description": description,
        "control_period_ms": CONTROL_PERIOD_S * 1000.0,
        "architecture": {"vision_heads": a.vision_heads, "heads": a.heads, "head_dim": a.head_dim},
    }
    _write_json(folder / "taktline.json", sidecar)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files for their owner only; a checkpoint is for every worker


def load_checkpoint(folder: Path) -> tuple[DemoPolicy, dict[str, Statistics]]:
    """The policy in fp32 and its statistics, from a folder written by `save_checkpoint`."""
    policy = DemoPolicy(Architecture())
    stored = load_file(folder / "model.safetensors")
    policy.load_state_dict({name: stored[lerobot_name(name)].float() for name in policy.state_dict()})
    return policy.eval(), load_statistics(folder)


def load_statistics(folder: Path) -> dict[str, Statistics]:
    """Statistics of observation.state and action."""
    flat: dict[str, NDArray[np.float32]] = load_arrays(folder / _PREPROCESSOR_STATISTICS)
    return {
        key: Statistics({name: flat[f"{key}.{name}"] for name in STATISTICS}) for key in ("observation.state", "action")
    }


def _stored(value: Tensor) -> Tensor:
    return value.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _input_features(a: Architecture) -> dict[str, Any]:
    images = {
        f"observation.images.{name}": {"type": "VISUAL", "shape": [3, a.image_size, a.image_size]} for name in CAMERAS
    }
    return {**images, "observation.state": {"type": "STATE", "shape": [a.state_dim]}}


def _output_features(a: Architecture) -> dict[str, Any]:
    return {"action": {"type": "ACTION", "shape": [a.action_dim]}}


def _config(a: Architecture) -> dict[str, Any]:
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": _input_features(a),
        "output_features": _output_features(a),
        "device": "cpu",
        "use_amp": False,
        "use_peft": False,
        "push_to_hub": False,
        "repo_id": None,
        "private": None,
        "tags": None,
        "license": "apache-2.0",
        "pretrained_path": None,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": a.horizon,
        "n_action_steps": a.horizon,
        "max_state_dim": 32,
        "max_action_dim": a.action_width,
        "num_inference_steps": a.solver_steps,
        "time_sampling_beta_alpha": 1.5,
        "time_sampling_beta_beta": 1.0,
        "time_sampling_scale": 0.999,
        "time_sampling_offset": 0.001,
        "min_period": a.min_period,
        "max_period": a.max_period,
        "use_relative_actions": False,
        "relative_exclude_joints": [],
        "action_feature_names": None,
        "rtc_config": None,
        "image_resolution": [a.image_size, a.image_size],
        "empty_cameras": 0,
        "tokenizer_max_length": a.prompt_tokens,
        "normalization_mapping": _NORM_MAP,
        "gradient_checkpointing": False,
        "compile_model": False,
        "compile_mode": "max-autotune",
        "freeze_vision_encoder": False,
        "train_expert_only": False,
    }


def _preprocessor(a: Architecture) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {
            "registry_name": "relative_actions_processor",
            "config": {"enabled": False, "exclude_joints": [], "action_names": None},
        },
        {
            "registry_name": "normalizer_processor",
            "config": {"eps": 1e-8, "features": {**_input_features(a), **_output_features(a)}, "norm_map": _NORM_MAP},
            "state_file": _PREPROCESSOR_STATISTICS,
        },
        {"registry_name": "pi05_prepare_state_tokenizer_processor_step", "config": {}},
        {
            "registry_name": "tokenizer_processor",
            "config": {
                "max_length": a.prompt_tokens,
                "task_key": "task",
                "padding_side": "right",
                "padding": "max_length",
                "truncation": True,
                "tokenizer_name": "tokenizer",
            },
            "artifacts": {"tokenizer_name": "tokenizer"},
        },
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    return {"name": "policy_preprocessor", "steps": steps}


def _postprocessor(a: Architecture) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {
            "registry_name": "unnormalizer_processor",
            "config": {"eps": 1e-8, "features": _output_features(a), "norm_map": _NORM_MAP},
            "state_file": _POSTPROCESSOR_STATISTICS,
        },
        {"registry_name": "absolute_actions_processor", "config": {"enabled": False}},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    return {"name": "policy_postprocessor", "steps": steps}
