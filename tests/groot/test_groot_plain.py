"""The plain statement that GR00T is measured against says the same as the engine and as the golden case."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.plain_groot import PlainGroot, PlainHead, backbone, published_config

pytest.importorskip("transformers")


def test_plain_statement_is_the_golden_case(kit: Any) -> None:
    a = kit.architecture()
    case, rows = kit.case("case_b1")
    tensors = load_file(kit.golden / "model.safetensors")
    stated = json.loads((kit.golden / "backbone_config.json").read_text())
    model = backbone(tensors, a, stated, torch.float32)
    plain = PlainGroot(model, PlainHead(tensors, a, rows[0].embodiment, torch.float32), a.text.image_token)
    assert kit.distance(plain(rows), case["actions"]) < 1e-5
    assert kit.distance(plain([*rows, *rows]), torch.cat([case["actions"]] * 2)) < 1e-5


def test_the_sections_of_an_architecture_are_those_of_its_file(kit: Any) -> None:
    stated = json.loads((kit.golden / "backbone_config.json").read_text())
    for section, fields in published_config(kit.architecture()).items():
        for name, value in fields.items():
            if name in stated[section] and name != "rope_parameters":
                assert stated[section][name] == value, name
