"""The captured GPU runner of π0.5: official values, bit-equal replays, no influence of neighbours, no allocation."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_worker.models.pi.runner import PiRow, collate
from taktline_worker.models.pi.weights import BF16_VISION, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def captured(golden: Any, network: Any) -> tuple[Any, list[PiRow], dict[str, torch.Tensor], int]:
    from taktline_worker.models.pi.graphs import Bucket, GraphRunner

    folder = golden / "pi05_tiny" / "full_real_heads"
    heads = json.loads((folder / "config_tiny.json").read_text())["vision"]["num_attention_heads"]
    eager, architecture = network.load(folder / "model.safetensors", heads, BF16_VISION)
    case = load_file(folder / "case_b1.safetensors")
    runner = GraphRunner(
        on_device(eager.weights, torch.device("cuda")), architecture, 50, [Bucket(1, 2, 64), Bucket(4, 3, 64)]
    )
    runner.capture()
    return runner, network.rows(case, architecture), case, architecture.tokens_per_image


def test_golden_actions(captured: Any, distance: Any) -> None:
    runner, rows, case, tokens = captured
    actions = runner.run(collate(rows, tokens))
    official = distance(case["actions_bf16_rope_fp32"], case["actions"])
    ours = distance(actions, case["actions"])
    print(f"bf16 error: engine {ours:.3e}, official {official:.3e}")
    assert 1e-5 < ours <= 1.25 * official
    assert float(torch.nn.functional.cosine_similarity(actions.flatten(1), case["actions"].flatten(1)).min()) >= 0.999


def test_replays_are_bit_identical_and_neighbours_do_not_matter(captured: Any) -> None:
    runner, rows, _, tokens = captured
    quiet = [rows[0]] * 3
    loud = [rows[0], *(dataclasses.replace(row, noise=row.noise * 3, pixels=-row.pixels) for row in quiet[1:])]
    first, second = runner.run(collate(quiet, tokens)), runner.run(collate(loud, tokens))
    assert torch.equal(first, runner.run(collate(quiet, tokens)))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[1], second[1])


def test_nothing_is_allocated_after_capture(captured: Any) -> None:
    runner, rows, _, tokens = captured
    batch = collate(rows, tokens)
    runner.run(batch)
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        runner.run(batch)
    assert torch.cuda.memory_reserved() == before


def test_a_batch_that_fits_no_bucket_is_refused(captured: Any) -> None:
    runner, rows, _, tokens = captured
    with pytest.raises(ValueError, match="no bucket"):
        runner.run(collate([rows[0]] * 5, tokens))
