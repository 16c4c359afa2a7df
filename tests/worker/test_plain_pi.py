"""The plain statement that the π engines are measured against says what the official code says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_worker.models.pi.config import ArchitectureHints, read_architecture
from taktline_worker.models.pi.keys import canonical_names, family_of

from benchmarks.plain_pi import PlainPi

CASES = [
    ("pi05_tiny/full", "case_b1"),
    ("pi05_tiny/full", "case_b3"),
    ("pi0_tiny/full", "case_b1"),
    ("pi0_tiny/full", "case_b3"),
]


@pytest.mark.parametrize(("name", "case_name"), CASES)
def test_it_is_the_golden_case(golden: Any, distance: Any, name: str, case_name: str) -> None:
    folder = golden / name
    stored = load_file(folder / "model.safetensors")
    tensors = {target: stored[old] for old, target in canonical_names(stored).items()}
    tensors.setdefault("prefix.embed_tokens.weight", tensors.get("lm_head.weight", torch.empty(0)))
    shapes = {target: tuple(tensor.shape) for target, tensor in tensors.items()}
    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    family = "pi05" if family_of(shapes) == "pi05" else "pi0"
    architecture = read_architecture(family, shapes, ArchitectureHints(vision_heads=heads))
    case = load_file(folder / f"{case_name}.safetensors")
    plain = PlainPi(tensors, architecture, 10)
    for row in range(len(case["tokens"])):
        cameras = [i for i in range(3) if bool(case[f"image_mask_{i}"][row])]
        with torch.inference_mode():
            actions = plain(
                torch.stack([case[f"image_{i}"][row] for i in cameras])[None],
                case["tokens"][row][None],
                case["token_mask"][row][None].bool(),
                case["noise"][row][None],
                case["state"][row][None] if family == "pi0" else None,
            )
        assert distance(actions, case["actions"][row][None]) < 1e-5
