"""GR00T N1.7 against the official values, step by step in fp32, and its backbone against `transformers`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from taktline_worker.models.groot import modules
from taktline_worker.models.groot.batch import GrootRow, lay_out, text_positions
from taktline_worker.models.groot.runner import Features, GrootRunner
from torch import Tensor

BAR = 1e-5


@pytest.fixture(scope="module")
def runner(kit: Any) -> GrootRunner:
    return kit.runner()


def encoded(runner: GrootRunner, *rows: GrootRow) -> Features:
    return runner.encode(lay_out(rows, runner.architecture))


def test_one_row_step_by_step(kit: Any, runner: GrootRunner) -> None:
    case, rows = kit.case("case_b1")
    batch = lay_out(rows, runner.architecture)
    features = runner.encode(batch)
    assert kit.distance(features.backbone, case["backbone_features"]) < BAR
    assert kit.distance(features.refined, case["vl_embeddings"]) < BAR
    assert torch.equal(batch.image.index[0], case["image_mask"][0].nonzero()[:, 0])
    assert torch.equal(batch.text.index[0], (~case["image_mask"][0]).nonzero()[:, 0])
    projector = runner.weights.head.projectors[rows[0].embodiment]
    assert kit.distance(modules.embed_state(projector, case["state"][:, 0]), case["state_features"][:, 0]) < BAR
    found: list[Tensor] = []
    actions = runner.run(rows, lambda step, x, velocity: found.append(velocity))
    assert [kit.distance(ours, theirs) < BAR for ours, theirs in zip(found, case["velocity"], strict=True)] == [
        True
    ] * 4
    assert kit.distance(actions, case["actions"]) < BAR


def test_a_row_of_a_batch_gets_what_it_gets_alone(kit: Any, runner: GrootRunner) -> None:
    case, rows = kit.case("case_b2")
    actions = runner.run(rows)
    assert kit.distance(actions, case["actions_row_alone"]) < BAR
    # The official batch lets the padding of the shorter row into its attention: the case shows what must not happen.
    assert kit.distance(case["actions"][1], case["actions_row_alone"][1]) > 0.01
    valid = case["attention_mask"].bool()
    batch = lay_out(rows, runner.architecture)
    backbone = runner.encode(batch).backbone
    ours = torch.cat([backbone[i][batch.all.index[i][batch.all.valid[i, 0, 0]]] for i in range(2)])
    assert kit.distance(ours, case["backbone_features"][valid]) < BAR


def test_embodiments_lengths_and_image_counts_mix(kit: Any, runner: GrootRunner) -> None:
    rows = [*kit.case("case_b2")[1], *kit.case("case_b1")[1]]
    alone = torch.cat([runner.run([row]) for row in rows])
    assert kit.distance(runner.run(rows), alone) < 1e-6
    assert kit.distance(runner.run(rows[::-1]).flip(0), alone) < 1e-6


def test_a_block_reads_text_or_images_and_projects_no_others(
    kit: Any, runner: GrootRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*kit.case("case_b2")[1], *kit.case("case_b1")[1]]
    image = [int((row.tokens == runner.architecture.text.image_token).sum()) for row in rows]
    text = [len(row.tokens) - count for row, count in zip(rows, image, strict=True)]
    projected: list[int] = []
    memory = modules.memory
    monkeypatch.setattr(modules, "memory", lambda a, h, f: (projected.append(f.shape[1]), memory(a, h, f))[1])
    runner.run(rows)
    assert set(projected) == {max(image), max(text)}


def test_an_embodiment_changes_the_answer(kit: Any, runner: GrootRunner) -> None:
    (row,) = kit.case("case_b1")[1]
    other = dataclasses.replace(row, embodiment=1)
    assert kit.distance(runner.run([other]), runner.run([row])) > 0.1


def make_reference(kit: Any, dtype: torch.dtype = torch.float32) -> Any:
    transformers = pytest.importorskip("transformers")
    stated = json.loads((kit.golden / "backbone_config.json").read_text())
    config = transformers.Qwen3VLConfig(
        text_config=stated["text_config"] | {"num_hidden_layers": kit.architecture().text.layers},
        vision_config=stated["vision_config"],
        image_token_id=500,
        vision_start_token_id=498,
        vision_end_token_id=499,
    )
    model = transformers.Qwen3VLModel(config).eval()
    prefix = "backbone.model.model."
    tensors = load_file(kit.golden / "model.safetensors")
    model.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    return model.to(dtype)


def reference_features(model: Any, row: GrootRow) -> Tensor:
    """The last layer's output before the final norm."""
    kept: list[Tensor] = []
    layer = model.language_model.layers[-1]
    hook = layer.register_forward_hook(
        lambda module, given, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    ids = torch.from_numpy(row.tokens)[None]
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=torch.cat(row.patches).to(model.dtype),
            image_grid_thw=torch.tensor([[1, *grid] for grid in row.grids]),
            mm_token_type_ids=(ids == 500).int(),
        )
    hook.remove()
    return kept[0]


def oblong(seed: int) -> GrootRow:
    """Two images of different grids, neither of them square, with text before, between and behind."""
    generator = torch.Generator().manual_seed(seed)
    grids = ((6, 10), (8, 4))
    tokens = [5, 6]
    for rows, columns in grids:
        tokens += [498, *[500] * (rows * columns // 4), 499, 7]
    return GrootRow(
        patches=tuple(torch.randn(rows * columns, 1536, generator=generator) for rows, columns in grids),
        grids=grids,
        tokens=torch.tensor([*tokens, 8, 9, 10]).numpy(),
        state=torch.zeros(20),
        noise=torch.zeros(6, 20),
        embodiment=0,
    )


def test_backbone_is_transformers_for_oblong_images(kit: Any, runner: GrootRunner) -> None:
    model, row = make_reference(kit), oblong(3)
    assert kit.distance(encoded(runner, row).backbone, reference_features(model, row)) < BAR
    ids = torch.from_numpy(row.tokens)[None]
    grid = torch.tensor([[1, *one] for one in row.grids])
    official, _ = model.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=(ids == 500).int())
    assert torch.equal(text_positions(row, 500, 2), official[:, 0].T)


def test_bf16_is_no_further_from_fp32_than_the_official_backbone(kit: Any, runner: GrootRunner) -> None:
    exact, rounded = make_reference(kit), make_reference(kit, torch.bfloat16)
    ours = kit.runner(torch.bfloat16)
    for row in (kit.case("case_b1")[1][0], oblong(4)):
        reference = reference_features(exact, row)
        official = kit.distance(reference_features(rounded, row), reference)
        assert 1e-4 < kit.distance(encoded(ours, row).backbone, reference) <= 1.25 * official
    case, rows = kit.case("case_b1")
    actions = ours.run(rows)
    cosine = torch.nn.functional.cosine_similarity(actions.flatten(), case["actions"].flatten(), dim=0)
    assert cosine >= 0.999
    assert 1e-4 < kit.distance(actions, case["actions"]) < 0.03


def test_a_change_of_any_solver_constant_shows(kit: Any, runner: GrootRunner) -> None:
    """Guards the order of the adaptive norms' halves and of the sinusoids against a silent swap."""
    case, rows = kit.case("case_b1")
    head = runner.weights.head
    norms = tuple(dataclasses.replace(one, weight=1.0 + one.bias, bias=one.weight - 1.0) for one in head.tail_norms)
    swapped = dataclasses.replace(head, tail_norms=norms)
    other = GrootRunner(dataclasses.replace(runner.weights, head=swapped), runner.architecture)
    assert kit.distance(other.run(rows), case["actions"]) > 0.01
