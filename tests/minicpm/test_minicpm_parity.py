"""MiniCPM-RobotManip beside its official parts: the backbone of transformers, and the head as it is documented."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from taktline_worker.models.minicpm_robot import modules
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow, lay_out
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from torch import Tensor

from benchmarks.plain_minicpm import PlainHead, PlainMiniCpm, backbone, packed, published_config

BAR = 1e-5
CPU = torch.device("cpu")
# Images, words, embodiment: rows of mixed lengths, one of them longer than a chunk of the delta rule.
SHAPES = [(1, 5, 1), (2, 70, 3), (3, 2, 1), (1, 1, 4)]


@pytest.fixture(scope="module")
def runner(kit: Any, folder: Path) -> MiniCpmRunner:
    return kit.runner(folder)


@pytest.fixture(scope="module")
def official(kit: Any) -> Any:
    return kit.official()


@torch.inference_mode()
def official_features(model: Any, row: MiniCpmRow) -> Tensor:
    """The official backbone's last hidden state (n, width) of one row alone."""
    out = model(
        input_ids=torch.from_numpy(row.tokens)[None],
        pixel_values=packed(row.patches),
        target_sizes=torch.tensor([[8, 8]] * len(row.patches), dtype=torch.int32),
    )
    return out.last_hidden_state[0]


def test_images_are_encoded_as_officially(kit: Any, runner: MiniCpmRunner, official: Any) -> None:
    patches = torch.cat([kit.row(2, 1, seed=1).patches, kit.row(1, 1, seed=2).patches])
    sizes = torch.tensor([[8, 8]] * 3, dtype=torch.int32)
    with torch.inference_mode():
        expected = torch.stack(official.get_image_features(packed(patches), sizes).pooler_output)
        found = modules.encode_images(runner.weights.vision, runner.architecture.vision, patches)
    assert found.shape == (3, 4, 48)
    assert kit.distance(found, expected) < BAR


@pytest.mark.parametrize(("images", "words", "embodiment"), SHAPES)
def test_features_are_those_of_the_official_backbone(
    kit: Any, runner: MiniCpmRunner, official: Any, images: int, words: int, embodiment: int
) -> None:
    row = kit.row(images, words, embodiment, seed=images + words)
    found = runner.encode(lay_out([row], kit.image_token, CPU))
    assert kit.distance(found[0], official_features(official, row)) < BAR


def test_features_of_a_mixed_batch_are_those_of_each_row(kit: Any, runner: MiniCpmRunner, official: Any) -> None:
    rows = [kit.row(*shape, seed=index) for index, shape in enumerate(SHAPES)]
    found = runner.encode(lay_out(rows, kit.image_token, CPU))
    for features, row in zip(found, rows, strict=True):
        assert kit.distance(features[: len(row.tokens)], official_features(official, row)) < BAR


@pytest.fixture(scope="module")
def plain(kit: Any) -> PlainHead:
    return PlainHead(kit.head(), kit.heads, kit.horizon)


def test_the_head_step_by_step(kit: Any, runner: MiniCpmRunner, plain: PlainHead) -> None:
    row = kit.row(2, 9, 3, seed=4)
    batch = lay_out([row], kit.image_token, CPU)
    features = runner.encode(batch)
    steps: list[tuple[Tensor, Tensor]] = []
    runner.solve(batch, features, lambda _, x, found: steps.append((x[0].clone(), found[0].clone())))
    with torch.inference_mode():
        expected = plain.actions(features[0].clone(), row)
    assert len(steps) == 4
    for (x, found), (x_expected, found_expected) in zip(steps, expected, strict=True):
        assert kit.distance(x, x_expected) < BAR
        assert kit.distance(found, found_expected) < BAR


def test_the_whole_answer_of_mixed_rows(kit: Any, runner: MiniCpmRunner, official: Any, plain: PlainHead) -> None:
    """Embodiments, images and lengths mixed: each row's answer is the official backbone's and head's for it alone."""
    rows = [kit.row(*shape, seed=20 + index) for index, shape in enumerate(SHAPES)]
    found = runner.run(rows)
    for actions, row in zip(found, rows, strict=True):
        with torch.inference_mode():
            expected = plain.actions(official_features(official, row), row)[-1][1]
        assert kit.distance(actions, expected) < 3 * BAR  # four steps follow one another


def test_a_row_depends_on_no_neighbour(kit: Any, runner: MiniCpmRunner) -> None:
    rows = [kit.row(*shape, seed=40 + index) for index, shape in enumerate(SHAPES)]
    alone = runner.run(rows[:1])[0]
    for neighbours in (rows[1:2], rows[1:], [replace(rows[0], state=10 * rows[0].state)]):
        assert kit.distance(runner.run([rows[0], *neighbours])[0], alone) < 2e-6


def test_state_embodiment_image_and_noise_all_count(kit: Any, runner: MiniCpmRunner) -> None:
    row = kit.row(1, 5, seed=60)
    base = runner.run([row])
    for other in (
        replace(row, state=row.state + 0.1),
        replace(row, embodiment=2),
        replace(row, patches=row.patches.flip(1)),
        replace(row, noise=-row.noise),
    ):
        assert kit.distance(runner.run([other]), base) > 1e-3


def test_the_plain_peer_of_the_benchmark_says_the_same(kit: Any, runner: MiniCpmRunner) -> None:
    """Built from the tensors alone, as it is at the published size."""
    a = runner.architecture
    tensors = kit.checkpoint()
    model = backbone(tensors, a, published_config(a, kit.image_token), torch.float32)
    row = kit.row(2, 9, 3, seed=4)
    plain = PlainMiniCpm(model, PlainHead(kit.head(), kit.heads, kit.horizon))
    assert kit.distance(plain(row), runner.run([row])[0]) < 3 * BAR


def test_bf16_backbone_stays_near(kit: Any, runner: MiniCpmRunner, folder: Path) -> None:
    row = kit.row(2, 9, 3, seed=4)
    found = kit.runner(folder, torch.bfloat16).run([row])
    assert found.dtype == torch.float32
    assert kit.distance(found, runner.run([row])) < 0.05
