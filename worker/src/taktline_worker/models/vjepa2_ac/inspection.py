"""What `taktline checkpoint inspect` says of a planner's folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from taktline_worker.checkpoint import read_sidecar
from taktline_worker.models.vjepa2_ac.adapter import FAMILY
from taktline_worker.models.vjepa2_ac.config import (
    ACTION_WIDTH,
    POSE_WIDTH,
    PUBLISHED_CONTROL_PERIOD_S,
    Sidecar,
    expected_encoder_shapes,
    expected_predictor_shapes,
)
from taktline_worker.models.vjepa2_ac.processor import CAMERA, GOAL
from taktline_worker.models.vjepa2_ac.weights import find_file, open_checkpoint

_TORCH = (".pt", ".pth", ".pth.tar")
_OF_OTHERS = frozenset(
    {
        "assets",
        "config.json",
        "policy_preprocessor.json",
        "policy_postprocessor.json",
        "processor_config.json",
        "statistics.json",
        "embodiment_id.json",
        "preprocessor_config.json",
        "chat_template.jinja",
        "tokenizer",
        "tokenizer.json",
        "tokenizer.model",
    }
)
"""Names in the folders of the policies with an action head; one that lacks its config.json is no planner's for that."""


def recognises(path: Path) -> bool:
    """Whether the folder holds a torch file, or a safetensors file and nothing that other families' folders have."""
    if not path.is_dir():
        return False
    names = [one.name for one in path.iterdir() if one.is_file()]
    return any(name.endswith(_TORCH) for name in names) or (
        _OF_OTHERS.isdisjoint(one.name for one in path.iterdir())
        and any(name.endswith(".safetensors") for name in names)
    )


def describe(path: Path, tag: str, read_weights: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Report fields, and (finding, next step) notes. The tensors are checked as they are opened.

    Raises:
        TaktlineError: the first reason for which a worker would refuse the folder.
    """
    del tag, read_weights
    sidecar = read_sidecar(path, Sidecar, "docs/planner.md")
    file = find_file(path)
    checkpoint = open_checkpoint(file, sidecar.architecture)
    a = checkpoint.architecture
    shapes = [*expected_encoder_shapes(a).values(), *expected_predictor_shapes(a).values()]
    fields: dict[str, Any] = {
        "family": FAMILY,
        "layout": "safetensors" if file.suffix == ".safetensors" else "torch",
        "description": sidecar.description,
        "parameters": sum(math.prod(shape) for shape in shapes),
        "bytes": file.stat().st_size,
        "cameras": (CAMERA, GOAL),
        "state_dim": POSE_WIDTH,
        "action_dim": ACTION_WIDTH,
        "control_period_ms": sidecar.control_period_ms or 1000.0 * PUBLISHED_CONTROL_PERIOD_S,
        "facts": {
            "file": file.name,
            "encoder": f"{a.encoder_depth} blocks, width {a.encoder_width}, {a.encoder_heads} heads, {a.image_size} px",
            "predictor": f"{a.depth} blocks, width {a.width}, {a.heads} heads, {a.frame_tokens} tokens a frame",
        },
    }
    return fields, []
