"""One process of the mesh test: takes part in every mesh that has a place for it, and writes down what it got.

Arguments: rank, folder with the checkpoints `nano` and `edge`, which also gets the results.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from taktline_kernels import gpu_reference
from taktline_worker import fp8_layers
from taktline_worker.models.cosmos3 import fp8, modules
from taktline_worker.models.cosmos3.config import open_transformer
from taktline_worker.models.cosmos3.mesh import Place, ProcessGroupMesh, check_mesh, debug_checksum
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
    # Without guidance, as at most steps of Edge, the ranks of both branches share the tokens of one.
    "edge 2x1": ("edge", 2, 1, "tensor"),
    "edge 2x2 sequence": ("edge", 2, 2, "sequence"),
}
FP8_MESHES = {"fp8 1x2": ("nano", 1, 2, "tensor"), "fp8 1x2 sequence": ("nano", 1, 2, "sequence")}
"""With FP8 products and attention, stated plainly."""
SETTINGS = {"nano": OFFICIAL_TINY, "edge": EDGE_TINY}


def rows(kind: str):
    settings = SETTINGS[kind]
    return [make_request(settings, 3, imagine=True), make_request(settings, 4, 17)]


def state_fp8_plainly():
    """The functions of the GPU, in this process, by their plain statements."""
    fp8_layers.functions = modules.functions = lambda: gpu_reference  # type: ignore[assignment]
    fp8.attends_in_fp8 = lambda *_: True


def share(folder: Path, kind: str, place: Place, *, eight: bool):
    """Dimensions and one rank's weights."""
    a, files = open_transformer(folder / kind)
    dtype = torch.bfloat16 if eight else torch.float32
    weights = load_weights(files, a, SETTINGS[kind], dtype, torch.device("cpu"), place)
    return a, fp8.quantise(weights) if eight else weights


def run(folder: Path, kind: str, mesh: ProcessGroupMesh, *, eight: bool):
    """Actions and latents of two rows, and the state's checksum."""
    settings = SETTINGS[kind]
    a, weights = share(folder, kind, mesh.place, eight=eight)
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
        "bytes": 0 if eight else sum(layer.qkv.weight.nbytes + layer.up.weight.nbytes for layer in weights.joint),
    }


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    state_fp8_plainly()
    for name, (kind, branches, ranks, split) in (MESHES | FP8_MESHES).items():
        if rank >= branches * ranks:
            continue
        store = dist.PrefixStore(name, dist.FileStore(str(folder / "store"), -1))
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=branches * ranks, timeout=timedelta(seconds=120)
        )
        mesh = ProcessGroupMesh(branches, ranks, split)
        torch.save(run(folder, kind, mesh, eight=name in FP8_MESHES), folder / f"{name} {rank}.pt")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
