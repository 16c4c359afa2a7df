"""One process of the mesh test: takes part in every mesh that has a place for it, and writes down what it got.

Arguments: rank, folder with the checkpoints `nano` and `edge`, which also gets the results.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from taktline_worker.models.cosmos3.config import open_transformer
from taktline_worker.models.cosmos3.mesh import ProcessGroupMesh, check_mesh, debug_checksum
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.weights import load_weights
from torch import distributed as dist

from tests.cosmos3.tiny_policy import EDGE_TINY, OFFICIAL_TINY, fake_encoder, make_request

MESHES = {
    "2x1": ("nano", 2, 1, "tensor"),
    "1x2": ("nano", 1, 2, "tensor"),
    "2x2": ("nano", 2, 2, "tensor"),
    "1x2 sequence": ("nano", 1, 2, "sequence"),
    "2x2 sequence": ("nano", 2, 2, "sequence"),
    "1x4 sequence": ("nano", 1, 4, "sequence"),
    "edge 2x2": ("edge", 2, 2, "tensor"),
}
SETTINGS = {"nano": OFFICIAL_TINY, "edge": EDGE_TINY}


def rows(kind: str):
    settings = SETTINGS[kind]
    return [make_request(settings, 3, imagine=True), make_request(settings, 4, 17)]


def run(folder: Path, kind: str, mesh: ProcessGroupMesh):
    """Actions and latents of two rows, and the state's checksum."""
    a, files = open_transformer(folder / kind)
    settings = SETTINGS[kind]
    weights = load_weights(files, a, settings, torch.float32, torch.device("cpu"), mesh.place)
    check_mesh(a, mesh.place, guided=True)
    runner = Cosmos3Runner(weights, a, settings, fake_encoder, mesh)
    requests = rows(kind)
    inputs = runner.prepare(requests)
    state = runner.solve(inputs)
    outcomes = runner.outcomes(requests, inputs, state)
    return {
        "actions": torch.stack([one.actions for one in outcomes]),
        "latents": outcomes[0].latents,
        "checksum": debug_checksum(state),
        "bytes": sum(layer.qkv.weight.nbytes + layer.up.weight.nbytes for layer in weights.joint),
    }


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    for name, (kind, branches, ranks, split) in MESHES.items():
        if rank >= branches * ranks:
            continue
        store = dist.PrefixStore(name, dist.FileStore(str(folder / "store"), -1))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=branches * ranks, timeout=timedelta(seconds=120)
        )
        torch.save(run(folder, kind, ProcessGroupMesh(branches, ranks, split)), folder / f"{name} {rank}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
