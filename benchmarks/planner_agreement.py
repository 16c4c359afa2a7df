"""How a planner's energies agree with those in fp32, on the actions that a search scored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from planner_search import SETTINGS
from taktline_worker.models.vjepa2_ac.runner import VJepa2World
from taktline_worker.planning.search import Problem, search
from taktline_worker.planning.world import Scene
from torch import Tensor


def energies_of(world: VJepa2World, scene: Scene, sets: dict[str, Tensor]) -> dict[str, Tensor]:
    """Energies (candidates,) of each set (candidates, horizon, 7)."""
    prepared = world.prepare(scene)
    found = {name: torch.empty(len(actions), device=world.device) for name, actions in sets.items()}
    for name, actions in sets.items():
        for start in range(0, len(actions), world.micro_batch):
            part = slice(start, start + world.micro_batch)
            world.score(prepared, actions[part], found[name][part])
    return found


def agreement(found_energies: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Any]:
    """How energies rank the candidates of each set beside the fp32 statement's, and of all sets together."""
    found: dict[str, Any] = {}
    together = {"all of them": [torch.cat(list(one.values())) for one in (found_energies, exact)]}
    pairs = {name: [ours, exact[name]] for name, ours in found_energies.items()}
    for name, (ours, theirs) in (pairs | together).items():
        ranks = torch.stack([one.argsort().argsort().double() for one in (ours, theirs)])
        elites = max(1, len(ours) * SETTINGS.elites // SETTINGS.candidates)
        best = [set(one.argsort(stable=True)[:elites].tolist()) for one in (ours, theirs)]
        found[name] = {
            "pearson": float(torch.corrcoef(torch.stack((ours, theirs)).double())[0, 1]),
            "spearman": float(torch.corrcoef(ranks)[0, 1]),
            "candidates": len(ours),
            "elites": elites,
            "elites_in_common": len(best[0] & best[1]),
            "mean_signed_error": float((ours - theirs).mean()),
            "error_spread": float((ours - theirs).std()),
            "spread": float(theirs.std()),
        }
    return found


def recorded_rounds(world: VJepa2World, scene: Scene, rounds: tuple[int, ...]) -> dict[str, Tensor]:
    """The actions that a search scored in some of its rounds."""
    kept: dict[str, Tensor] = {}

    def observe(_: int, number: int, actions: Tensor, energies: Tensor) -> None:
        del energies
        if number in rounds:
            kept[f"round {number + 1}"] = actions.clone()

    search(world, [Problem(scene, replace(SETTINGS, rounds=max(rounds) + 1))], observer=observe)
    return kept
