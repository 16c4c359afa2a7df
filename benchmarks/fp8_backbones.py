"""What FP8 products in the backbones of GR00T and MiniCPM-Robot do to actions, on a CPU over reference operations.

GR00T: the golden cases, against the official fp32 actions. MiniCPM-Robot, which has no such case: random weights of the
published widths with fewer layers, against its own fp32 actions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from taktline_kernels import gpu_reference
from taktline_worker import fp8_layers
from taktline_worker.checkpoint import TensorFiles
from taktline_worker.models.groot import fp8 as groot_fp8
from taktline_worker.models.groot.batch import GrootRow
from taktline_worker.models.groot.config import read_architecture
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.weights import load_weights
from taktline_worker.models.minicpm_robot import fp8 as minicpm_fp8
from taktline_worker.models.minicpm_robot import synthetic as minicpm
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from taktline_worker.models.minicpm_robot.weights import pack_weights
from torch import Tensor
from torch.nn.functional import cosine_similarity

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "groot_n1_7_tiny"
CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
SMALL = replace(
    minicpm.PUBLISHED,
    vision=replace(minicpm.PUBLISHED.vision, depth=4, insert=1, image_size=112),
    text=replace(minicpm.PUBLISHED.text, layers=8, full=(3, 7), vocabulary=minicpm.IMAGE_TOKEN + 2),
    head=replace(minicpm.PUBLISHED.head, layers=4, embodiments=1),
)


def backbone_errors() -> list[dict[str, Any]]:
    """Relative L2 error and least cosine of each case in bf16 and FP8."""
    with patch.object(fp8_layers, "functions", lambda: gpu_reference):
        return [*_groot(), *_minicpm()]


def _groot() -> Iterator[dict[str, Any]]:
    config, backbone = (json.loads((GOLDEN / name).read_text()) for name in ("config.json", "backbone_config.json"))
    files = TensorFiles(GOLDEN)
    a = read_architecture(config, backbone, files.shapes)
    for name in ("case_b1", "case_b2"):
        case = load_file(GOLDEN / f"{name}.safetensors")
        rows = golden_rows(case)
        for number_format in ("bf16", "fp8"):
            weights = load_weights(files, a, list(range(a.head.embodiments)), DTYPES[number_format], CPU)
            weights = groot_fp8.quantise(weights) if number_format == "fp8" else weights
            actions = GrootRunner(weights, a).run(rows)
            yield _row("gr00t-n1.7", f"groot_n1_7_tiny/{name}", number_format, actions, case["actions"])


def golden_rows(case: dict[str, Tensor]) -> list[GrootRow]:
    """The rows of a golden case of GR00T, without padding."""
    count = len(case["input_ids"])
    images = len(case["image_grid_thw"]) // count
    patches = case["pixel_values"].view(count, images, -1, case["pixel_values"].shape[1])
    grids = case["image_grid_thw"].view(count, images, 3).tolist()
    return [
        GrootRow(
            patches=tuple(patches[i]),
            grids=tuple((rows, columns) for _, rows, columns in grids[i]),
            tokens=case["input_ids"][i][case["attention_mask"][i].bool()].numpy(),
            state=case["state"][i, 0],
            noise=case["noise"][i],
            embodiment=int(case["embodiment_id"][i]),
        )
        for i in range(count)
    ]


def _minicpm() -> Iterator[dict[str, Any]]:
    tensors = minicpm.random_tensors(SMALL, CPU)
    rows = [minicpm.random_row(SMALL, 2, 28, seed) for seed in (1, 2)]
    actions = {}
    for number_format, dtype in DTYPES.items():
        weights = pack_weights(tensors, SMALL, [0], dtype, CPU)
        weights = minicpm_fp8.quantise(weights) if number_format == "fp8" else weights
        actions[number_format] = MiniCpmRunner(weights, SMALL, minicpm.IMAGE_TOKEN).run(rows)
    for number_format in ("bf16", "fp8"):
        yield _row("minicpm-robot", "random, 8 text layers", number_format, actions[number_format], actions["fp32"])


def _row(policy: str, case: str, number_format: str, actions: Tensor, expected: Tensor) -> dict[str, Any]:
    return {
        "policy": policy,
        "case": case,
        "dtype": number_format,
        "relative": float((actions - expected).norm() / expected.norm()),
        "cosine": float(cosine_similarity(actions.flatten(1), expected.flatten(1)).min()),
    }
