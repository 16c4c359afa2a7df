"""Servable checkpoint folders: random weights of the published size for a GPU, the golden tiny ones for a CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from random_vjepa2 import PUBLISHED, random_checkpoint
from safetensors.torch import save_file
from taktline_worker.models.pi.synthetic import PI05, stream_random_tensors

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
_PREFIX = "model.paligemma_with_expert."
_STORED = {
    "vision.": f"{_PREFIX}paligemma.model.vision_tower.vision_model.",
    "projector.": f"{_PREFIX}paligemma.model.multi_modal_projector.linear.",
    "prefix.": f"{_PREFIX}paligemma.model.language_model.",
    "expert.": f"{_PREFIX}gemma_expert.model.",
    "lm_head.": f"{_PREFIX}paligemma.lm_head.",
}
"""Canonical prefix -> LeRobot's; the action heads are `model.` and their own name."""


def pi05_folder(target: Path, device: torch.device) -> Path:
    """A LeRobot folder of π0.5: three cameras of 224x224, a state of 8, 50 actions of 7."""
    source = GOLDEN / "pi05_tiny" / "lerobot_folder"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("case_*", "README.md", "model.safetensors"))
    stated = {"control_period_ms": 50}
    if device.type == "cpu":
        shutil.copy(source / "model.safetensors", target)
        stated["architecture"] = {"vision_heads": 2}
    else:
        config = json.loads((target / "config.json").read_text())
        config |= {"chunk_size": 50, "n_action_steps": 50, "image_resolution": [224, 224]}
        (target / "config.json").write_text(json.dumps(config))
        tensors = {}
        for name, value in stream_random_tensors(PI05, device):
            prefix = next((one for one in _STORED if name.startswith(one)), "")
            stored = _STORED[prefix] + name.removeprefix(prefix) if prefix else f"model.{name}"
            tensors[stored] = value.bfloat16().cpu().contiguous()
        save_file(tensors, target / "model.safetensors")
    (target / "taktline.json").write_text(json.dumps(stated))
    return target


def planner_folder(target: Path, device: torch.device) -> Path:
    """A folder of V-JEPA 2-AC."""
    target.mkdir(parents=True)
    if device.type == "cpu":
        shutil.copy(GOLDEN / "vjepa2_ac_tiny" / "full" / "checkpoint.pt", target)
        stated = {"image_size": 128, "encoder_heads": 2, "predictor_heads": 2}
    else:
        made = random_checkpoint(device)
        towers = {"encoder": made.encoder, "predictor": made.predictor}
        stored = {
            tower: {f"module.{name}": value.bfloat16().cpu() for name, value in tensors.items()}
            for tower, tensors in towers.items()
        }
        torch.save(stored, target / "checkpoint.pt")
        a = PUBLISHED
        stated = {"image_size": a.image_size, "encoder_heads": a.encoder_heads, "predictor_heads": a.heads}
    (target / "taktline.json").write_text(json.dumps({"architecture": stated}))
    return target
