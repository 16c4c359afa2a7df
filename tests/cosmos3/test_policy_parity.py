"""The Cosmos3 engine against diffusers' transformer and solver: same weights, same noise, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taktline_worker.models.cosmos3.config import open_transformer
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.solver import advance, make_schedule
from taktline_worker.models.cosmos3.weights import load_weights

from tests.cosmos3.tiny_policy import (
    EDGE_TINY,
    OFFICIAL_TINY,
    PAPER_TINY,
    Statement,
    fake_encoder,
    make_model,
    make_request,
    make_scheduler,
    write_checkpoint,
)

CASES = {
    "nano, official request": ("nano", OFFICIAL_TINY),
    "nano, paper's shape": ("nano", PAPER_TINY),
    "edge, guidance at the first step only": ("edge", EDGE_TINY),
    "edge, guidance at every step": ("edge", OFFICIAL_TINY),
    "nano, no guidance": ("nano", replace(OFFICIAL_TINY, guidance=1.0)),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}
    for kind in ("nano", "edge"):
        folder = tmp_path_factory.mktemp(kind)
        model = make_model(kind)
        write_checkpoint(model, folder)
        made[kind] = folder, model
    return made


def load(checkpoints, kind, settings, dtype=torch.float32):
    a, files = open_transformer(checkpoints[kind][0])
    return Cosmos3Runner(load_weights(files, a, settings, dtype, torch.device("cpu")), a, settings, fake_encoder)


def relative(value, reference):
    return float((value.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("name", CASES)
def test_velocities_and_actions_are_those_of_the_statement_at_every_step(checkpoints, name):
    kind, settings = CASES[name]
    runner = load(checkpoints, kind, settings)
    row = make_request(settings, seed=3, imagine=True)
    seen = []
    [outcome] = runner.run([row], lambda step, x, velocity: seen.append(runner.unpack(velocity)))
    steps, latents, actions = Statement(checkpoints[kind][1], settings).run(row)
    first = int(settings.state_row)
    assert len(seen) == len(steps) == settings.steps
    for (video, moves), (of_video, of_moves) in zip(seen, steps, strict=True):
        assert relative(video[0], of_video[:, 1:]) < 1e-5
        assert relative(moves[0], of_moves[first:, : settings.raw_dims]) < 1e-5
        assert not of_video[:, 0].any()
    assert relative(outcome.actions, actions) < 1e-5
    assert relative(outcome.latents, latents) < 1e-5


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_solver_is_unipc_at_any_number_of_steps(steps, shift):
    settings = replace(OFFICIAL_TINY, steps=steps, shift=shift)
    scheduler, schedule = make_scheduler(settings), make_schedule(steps, shift)
    assert [step.time for step in schedule] == scheduler.timesteps.tolist()
    generator = torch.Generator().manual_seed(1)
    x = other = torch.randn(1, 64, generator=generator)
    history = None
    for step, time in zip(schedule, scheduler.timesteps, strict=True):
        velocity = torch.randn(1, 64, generator=generator)
        other = scheduler.step(velocity, time, other, return_dict=False)[0]
        x, history = advance(step, x, velocity, history)
        assert relative(x, other) < 1e-5


def test_official_request_has_the_times_of_the_released_server():
    assert [step.time for step in make_schedule(4, 5.0)] == [999, 937, 833, 624]


@pytest.mark.parametrize("kind", ["nano", "edge"])
def test_a_row_is_the_same_alone_and_among_others(checkpoints, kind):
    runner = load(checkpoints, kind, OFFICIAL_TINY)
    rows = [make_request(OFFICIAL_TINY, seed, length) for seed, length in ((1, 4), (2, 70), (3, 12))]
    together = runner.run(rows)
    for row, outcome in zip(rows, together, strict=True):
        [alone] = runner.run([row])
        assert relative(outcome.actions, alone.actions) < 1e-5


def test_actions_do_not_depend_on_whether_the_video_is_wanted(checkpoints):
    runner = load(checkpoints, "nano", OFFICIAL_TINY)
    [plain] = runner.run([make_request(OFFICIAL_TINY, 5)])
    [imagined] = runner.run([make_request(OFFICIAL_TINY, 5, imagine=True)])
    assert plain.latents is None
    assert imagined.latents.shape == (48, *OFFICIAL_TINY.latent_grid)
    assert relative(plain.actions, imagined.actions) < 1e-5


def test_texts_are_encoded_once(checkpoints):
    runner = load(checkpoints, "nano", OFFICIAL_TINY)
    first = runner.run([make_request(OFFICIAL_TINY, 8)])
    again = runner.run([make_request(OFFICIAL_TINY, 8)])
    assert runner.misses == {"instruction": 1, "empty_prompt": 1}
    assert runner.hits == {"instruction": 1, "empty_prompt": 1}
    assert torch.equal(first[0].actions, again[0].actions)


@pytest.mark.parametrize("kind", ["nano", "edge"])
def test_bf16_is_no_further_from_fp32_than_the_statement_in_bf16(checkpoints, kind):
    row = make_request(OFFICIAL_TINY, 3)
    exact = load(checkpoints, kind, OFFICIAL_TINY).run([row])[0].actions
    ours = relative(load(checkpoints, kind, OFFICIAL_TINY, torch.bfloat16).run([row])[0].actions, exact)
    statement = Statement(make_model(kind).to(torch.bfloat16), OFFICIAL_TINY)
    theirs = relative(statement.run(row)[2], exact)
    print(f"{kind}: bf16 actions are {ours:.2e} from fp32, those of the statement {theirs:.2e}")
    assert ours < 1.5 * theirs
