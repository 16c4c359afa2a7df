"""What `taktline checkpoint inspect` says of a MiniCPM-RobotManip folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from taktline_worker.checkpoint import read_json
from taktline_worker.models.minicpm_robot.adapter import FAMILY, open_folder, read_embodiment
from taktline_worker.models.minicpm_robot.config import CONFIG_FILE, MODEL_TYPE, SOLVER_STEPS, expected_shapes
from taktline_worker.models.minicpm_robot.processor import MiniCpmProcessor


def recognises(path: Path) -> bool:
    """Whether config.json says that this is a MiniCPM-RobotManip folder."""
    return (path / CONFIG_FILE).is_file() and read_json(path / CONFIG_FILE).get("model_type") == MODEL_TYPE


def describe(path: Path, embodiment: str, read_weights: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Report fields, and (finding, next step) notes.

    Args:
        embodiment: its number; empty takes taktline.json's.
        read_weights: look for NaN in every tensor.

    Raises:
        TaktlineError: the first reason for which a worker would refuse the folder.
    """
    folder = open_folder(path)
    a, sidecar = folder.architecture, folder.sidecar
    bank = read_embodiment(embodiment, sidecar)
    processor = MiniCpmProcessor(a, sidecar, folder.prompt, bank, {})
    expected = expected_shapes(a)
    v, t, h = a.vision, a.text, a.head
    fields: dict[str, Any] = {
        "family": FAMILY,
        "layout": "MiniCPM-RobotManip",
        "description": sidecar.description,
        "parameters": sum(math.prod(shape) for shape in expected.values()),
        "cameras": processor.cameras,
        "state_dim": processor.state_dim,
        "action_dim": processor.action_dim,
        "horizon": h.horizon,
        "solver_steps": SOLVER_STEPS,
        "control_period_ms": sidecar.control_period_ms or 0.0,
        "facts": {
            "vision": f"{v.depth} blocks, width {v.width}, frames of {v.image_size} px, {v.image_tokens} tokens each",
            "text": f"{t.layers} layers, {len(t.full)} of them softmax attention, width {t.width}",
            "action head": f"{h.layers} blocks, width {h.width}, {h.heads} heads, {h.embodiments} embodiments",
            "embodiment": f"{bank}; {h.horizon} actions of {h.action_width} numbers from a state of {h.state_width}",
            "tokenizer": f"{folder.prompt.pieces:,} pieces",
        },
    }
    notes = []
    if sidecar.control_period_ms is None:
        notes.append(("nothing in the folder states the control period", "set spec.engine.controlPeriodMs"))
    if sidecar.action_channels is None:
        notes.append(
            (
                f"robots get all {h.action_width} numbers, of which an embodiment uses few",
                "name them in taktline.json, e.g. action_channels: [[7, 17]] for LIBERO",
            )
        )
    if read_weights:
        for _ in folder.files.read({name: name for name in expected}):
            pass  # reading checks every tensor
    return fields, notes
