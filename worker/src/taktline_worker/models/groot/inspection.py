"""What `taktline checkpoint inspect` says of a GR00T folder: every embodiment that it could be served for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from taktline_worker.checkpoint import TensorFiles, read_json, read_sidecar
from taktline_worker.models.groot.adapter import FAMILY, Sidecar
from taktline_worker.models.groot.config import BACKBONE_FILE, CONFIG_FILE, expected_shapes, read_architecture
from taktline_worker.models.groot.embodiment import STATISTICS_FILE, Embodiment, find, read_embodiment
from taktline_worker.models.groot.processor import open_tokenizer


def recognises(path: Path) -> bool:
    """Whether config.json says that this is a GR00T N1.7 folder."""
    if not (path / CONFIG_FILE).is_file():
        return False
    config = read_json(path / CONFIG_FILE)
    return "Gr00t" in str(config.get("model_type", config.get("architectures", ""))) or "backbone_model_type" in config


def describe(path: Path, tag: str, read_weights: bool) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Report fields, and (finding, next step) notes.

    Args:
        tag: the embodiment; empty describes the only one, or the choice where there are several.
        read_weights: look for NaN in every tensor that is read.

    Raises:
        TaktlineError: the first reason for which a worker would refuse the folder.
    """
    files = TensorFiles(path)
    backbone = path / BACKBONE_FILE
    a = read_architecture(
        read_json(path / CONFIG_FILE), read_json(backbone) if backbone.is_file() else None, files.shapes
    )
    sidecar = read_sidecar(path, Sidecar, "docs/groot.md")
    expected = expected_shapes(a)
    tokenizer = open_tokenizer(path)
    head = a.head
    fields: dict[str, Any] = {
        "family": FAMILY,
        "layout": "Isaac GR00T",
        "description": sidecar.description,
        "parameters": sum(math.prod(shape) for shape in expected.values()),
        "solver_steps": head.solver_steps,
        "control_period_ms": sidecar.control_period_ms or 0.0,
        "facts": {
            "vision": f"{a.vision.depth} blocks, width {a.vision.width}, patches of {a.vision.patch} px",
            "text": f"{a.text.layers} layers, width {a.text.width}, vocabulary {a.text.vocabulary:,}",
            "refinement": f"{head.vl_layers} vision-language blocks",
            "action head": f"{head.layers} blocks, width {head.width}, {head.embodiments} embodiment slots",
            "solver": f"{head.solver_steps} steps over {head.horizon} actions of {head.action_width} numbers",
            "tokenizer": f"{tokenizer.get_vocab_size():,} pieces",
        },
    }
    notes = []
    tags = [tag] if tag else sorted(read_json(find(path, STATISTICS_FILE))) or [""]
    for one in tags:
        embodiment = read_embodiment(path, one, head.horizon)
        fields["facts"][f"embodiment {one}"] = _embodiment(embodiment)
        if len(tags) == 1:
            fields |= {
                "cameras": embodiment.cameras,
                "state_dim": embodiment.state_dim,
                "action_dim": embodiment.action_dim,
                "horizon": embodiment.rows,
            }
    if len(tags) > 1:
        notes.append((f"the folder is for {len(tags)} embodiments", "set model.statistics to the tag of these robots"))
    if sidecar.control_period_ms is None:
        notes.append(("nothing in the folder states the control period", "set spec.engine.controlPeriodMs"))
    if read_weights:
        for _ in files.read({name: name for name in expected}):
            pass  # reading checks every tensor
    return fields, notes


def _embodiment(e: Embodiment) -> str:
    state = ", ".join(f"{part.key} {part.width}" for part in e.state)
    actions = ", ".join(
        f"{part.key} {part.width}" + ("" if part.relative == "no" else " relative") for part in e.actions
    )
    return f"slot {e.slot}; cameras {', '.join(e.cameras)}; state {state}; {e.rows} actions of {actions}"
