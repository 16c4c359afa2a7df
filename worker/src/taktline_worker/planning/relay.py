"""How the ranks of a mesh get to run one search: rank 0 sends the problems, the others follow until told to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from taktline_worker.planning.mesh import Mesh, hear, tell
from taktline_worker.planning.search import Plan, Problem, Standing, search
from taktline_worker.planning.settings import SearchSettings
from taktline_worker.planning.world import Scene, WorldModel

_FLOATS = {"float32": torch.float32, "float64": torch.float64}


class _TensorHead(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str


class _ProblemHead(msgspec.Struct, frozen=True):
    settings: dict[str, Any]
    seed: int
    deadline: float | None
    tensors: dict[str, _TensorHead]


class _Order(msgspec.Struct, frozen=True):
    problems: tuple[_ProblemHead, ...]


def lead(
    world: WorldModel,
    problems: Sequence[Problem],
    mesh: Mesh,
    clock: Callable[[], float] = time.monotonic,
    standings: Callable[[list[Standing], float], None] | None = None,
) -> list[Plan]:
    """Runs a search on all ranks from rank 0. Latents cross the mesh once a plan; in a round only energies do.

    Args:
        standings: see `search`.

    Raises:
        RankLostError: a rank is gone.
        ScoringError: rank 0 could not score its units; the others are in step and wait for the next order.
    """
    if mesh.size > 1:
        tell(mesh, _Order(tuple(_head(problem) for problem in problems)))
        for problem in problems:
            for tensor in _tensors(problem).values():
                mesh.send(tensor.contiguous())
    return search(world, problems, mesh, clock, standings=standings)


def follow(world: WorldModel, mesh: Mesh) -> None:
    """Runs on every rank but 0: searches as ordered, returns on `dismiss`."""
    while (order := hear(mesh, _Order)).problems:
        search(world, [_receive(head, mesh, world.device) for head in order.problems], mesh)


def dismiss(mesh: Mesh) -> None:
    """From rank 0: lets the followers return."""
    if mesh.size > 1:
        tell(mesh, _Order(()))


def _tensors(problem: Problem) -> dict[str, Tensor]:
    named = {
        "latent": problem.scene.latent,
        "goal": problem.scene.goal,
        "pose": problem.scene.pose,
        "previous": problem.previous,
        "noise": problem.noise,
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _head(problem: Problem) -> _ProblemHead:
    tensors = {
        name: _TensorHead(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in _tensors(problem).items()
    }
    settings = {name: getattr(problem.settings, name) for name in SearchSettings.__slots__}
    return _ProblemHead(settings, problem.seed, problem.deadline, tensors)


def _receive(head: _ProblemHead, mesh: Mesh, device: torch.device) -> Problem:
    # Dictionaries keep their order on the way, so both sides name the tensors in the same one.
    got = {
        name: mesh.send(torch.empty(tensor.shape, dtype=_FLOATS[tensor.dtype], device=device))
        for name, tensor in head.tensors.items()
    }
    settings = msgspec.convert(head.settings, SearchSettings)
    scene = Scene(got["latent"], got["goal"], got["pose"])
    return Problem(scene, settings, head.seed, got.get("previous"), head.deadline, got.get("noise"))
