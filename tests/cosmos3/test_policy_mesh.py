"""Meshes of processes give the actions of one process: guidance branches, split heads, split tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from taktline_kernels import gpu_reference
from taktline_protocol import TaktlineError
from taktline_worker import fp8_layers
from taktline_worker.models.cosmos3 import fp8, modules
from taktline_worker.models.cosmos3.config import open_transformer
from taktline_worker.models.cosmos3.mesh import Place, better_split, check_mesh, place_of
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.weights import load_weights

from tests.cosmos3.mesh_rank import FP8_MESHES, MESHES, SETTINGS, rows, share
from tests.cosmos3.tiny_policy import fake_encoder, make_model, write_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank of every mesh got; the processes are started once."""
    folder = tmp_path_factory.mktemp("mesh")
    for kind in SETTINGS:
        write_checkpoint(make_model(kind), folder / kind)
    command = (sys.executable, "-m", "tests.cosmos3.mesh_rank")
    ranks = [
        subprocess.Popen((*command, str(rank), str(folder)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in ranks:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def alone(results):
    found = {}
    for kind, settings in SETTINGS.items():
        a, files = open_transformer(results / kind)
        weights = load_weights(files, a, settings, torch.float32, torch.device("cpu"))
        outcomes = Cosmos3Runner(weights, a, settings, fake_encoder).run(rows(kind))
        size = sum(layer.qkv.weight.nbytes + layer.up.weight.nbytes for layer in weights.joint)
        found[kind] = torch.stack([one.actions for one in outcomes]), outcomes[0].latents, size
    return found


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_gives_the_actions_of_one_process(results, alone, name):
    kind, branches, ranks, split = MESHES[name]
    actions, latents, size = alone[kind]
    got = [torch.load(results / f"{name} {rank}.pt") for rank in range(branches * ranks)]
    for one in got:
        assert float((one["actions"] - actions).norm() / actions.norm()) < 1e-5
        assert float((one["latents"] - latents).norm() / latents.norm()) < 1e-5
        # Each rank steps a solver of its own: they must not drift apart by a single bit.
        assert one["checksum"] == got[0]["checksum"]
        assert one["bytes"] == (size // ranks if split == "tensor" else size)


@pytest.mark.parametrize("name", FP8_MESHES)
def test_in_fp8_a_mesh_is_as_near_to_fp32_as_one_process(results, alone, name, monkeypatch):
    monkeypatch.setattr(fp8_layers, "functions", lambda: gpu_reference)
    monkeypatch.setattr(modules, "functions", lambda: gpu_reference)
    monkeypatch.setattr(fp8, "attends_in_fp8", lambda *_: True)
    kind, branches, ranks, _ = FP8_MESHES[name]
    a, weights = share(results, kind, Place(), eight=True)
    outcomes = Cosmos3Runner(weights, a, SETTINGS[kind], fake_encoder).run(rows(kind))
    exact = alone[kind][0]
    apart = float((torch.stack([one.actions for one in outcomes]) - exact).norm() / exact.norm())
    got = [torch.load(results / f"{name} {rank}.pt") for rank in range(branches * ranks)]
    for one in got:
        # Rows and heads are rounded at other places, so the values differ; how far they are from the truth does not.
        assert float((one["actions"] - exact).norm() / exact.norm()) < 1.6 * apart < 0.3
        assert one["checksum"] == got[0]["checksum"]


def test_ranks_are_numbered_branch_by_branch():
    assert [(p.branch, p.index) for p in (place_of(rank, 2, 4) for rank in range(8))] == [
        *((0, index) for index in range(4)),
        *((1, index) for index in range(4)),
    ]
    assert all(place_of(rank, 2, 4).rank == rank for rank in range(8))
    with pytest.raises(ValueError, match="rank 8 of 2 x 4"):
        place_of(8, 2, 4)


def test_the_tokens_are_shared_wherever_the_whole_weights_fit_a_rank():
    assert better_split(30 << 30, None) == "sequence"
    assert better_split(30 << 30, 141 << 30) == "sequence"
    assert better_split(30 << 30, 24 << 30) == "tensor"
    assert better_split(30 << 30, 32 << 30) == "tensor"  # they fit, and nothing beside them


def test_heads_that_cannot_be_split_are_refused(results):
    a, _ = open_transformer(results / "nano")
    with pytest.raises(TaktlineError, match=r"parallel\.tp is 4, which does not divide the 2 key heads") as refused:
        check_mesh(a, Place(ranks=4), guided=True)
    assert "one of 1, 2" in refused.value.next_step
    check_mesh(a, Place(ranks=4, split="sequence"), guided=True)  # tokens can be


def test_a_second_branch_without_guidance_is_refused(results):
    a, _ = open_transformer(results / "nano")
    with pytest.raises(TaktlineError, match="no second branch"):
        check_mesh(a, Place(branches=2), guided=False)
