"""Tiled decoding: exact where the margin is as wide as the network reaches, near elsewhere, the same on real ranks."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from taktline_worker.models.cosmos3 import vae
from taktline_worker.models.cosmos3.request import OFFICIAL
from taktline_worker.models.cosmos3.vae_tiles import EXACT_MARGIN, MARGIN, decode_tiled, grid_of, stitch, tiles_of
from taktline_worker.models.cosmos3.vae_weights import VaeWeights, load_vae
from torch import Tensor

from benchmarks import vae_tiles as benchmark
from tests.cosmos3.vae_checkpoints import save_vae, tiny_vae

ROWS, COLUMNS, FRAMES = 2, 40, 2
"""Wide, so that tiles are smaller than the picture even with the margin that makes them exact."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vae(tmp_path_factory.mktemp("vae"), tiny_vae())


@pytest.fixture(scope="module")
def weights(folder: Path) -> VaeWeights:
    return load_vae(folder, torch.float32, torch.device("cpu"), decoder=True)


def latents() -> Tensor:
    return torch.randn(1, 48, FRAMES, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def whole(weights: VaeWeights) -> Tensor:
    with torch.inference_mode():
        return vae.decode(weights, latents())


def tiled(weights: VaeWeights, ranks: int, margin: int) -> Tensor:
    """All ranks one after the other, in one process."""
    sent: list[Tensor] = []

    def gather(mine: Tensor) -> list[Tensor] | None:
        sent.append(mine)
        return sent if len(sent) == ranks else None

    with torch.inference_mode():
        found = [decode_tiled(weights, latents(), rank, ranks, gather, margin) for rank in range(ranks)]
    assert found[:-1] == [None] * (ranks - 1)
    assert found[-1] is not None
    return found[-1]


def psnr(found: Tensor, expected: Tensor) -> float:
    """In dB, for values that span 2."""
    return 10 * math.log10(4.0 / float((found - expected).square().mean()))


def test_the_grid_is_wide() -> None:
    assert [grid_of(ranks) for ranks in (1, 2, 3, 4, 6, 8, 16)] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (2, 2),
        (2, 3),
        (2, 4),
        (4, 4),
    ]
    with pytest.raises(ValueError, match="2 x 4 tiles"):
        tiles_of(8, 3, 8)


def test_tiles_of_the_paper_and_of_the_official_shape() -> None:
    sizes = [tuple(part.stop - part.start for part in tile.seen) for tile in tiles_of(30, 52, 8)]
    assert sizes == [(17, 15), (17, 17), (17, 17), (17, 15)] * 2
    tiles = tiles_of(33, 40, 8)
    covered = torch.zeros(33, 40)
    for tile in tiles:
        covered[tile.core] += 1
    assert bool((covered == 1).all())


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_margin_as_wide_as_the_network_reaches_is_exact(weights: VaeWeights, whole: Tensor, ranks: int) -> None:
    found = tiled(weights, ranks, EXACT_MARGIN)
    assert found.shape == whole.shape
    assert float((found - whole).abs().max()) <= 1e-5 * float(whole.abs().max())


def test_the_error_falls_with_the_margin(weights: VaeWeights, whole: Tensor) -> None:
    errors = [psnr(tiled(weights, 4, margin), whole) for margin in (0, MARGIN, 4, 8)]
    assert errors == sorted(errors)
    assert errors[1] > errors[0] + 3


def test_far_from_a_seam_nothing_changes(weights: VaeWeights, whole: Tensor) -> None:
    found = tiled(weights, 2, MARGIN)
    reach = EXACT_MARGIN * 16
    inner = slice(0, COLUMNS // 2 * 16 - reach)
    assert float((found - whole)[..., inner].abs().max()) <= 1e-5 * float(whole.abs().max())
    assert float((found - whole).abs().max()) > 1e-4


def test_the_fade_of_equal_tiles_changes_nothing() -> None:
    tiles = tiles_of(6, 12, 8, 1)
    picture = torch.rand(1, 3, 2, 6 * 16, 12 * 16, generator=torch.Generator().manual_seed(1))
    cuts = []
    for tile in tiles:
        rows, columns = (slice(part.start * 16, part.stop * 16) for part in tile.seen)
        cuts.append(picture[..., rows, columns])
    assert torch.allclose(stitch(tiles, cuts, 6, 12, 16), picture, atol=1e-6)


def test_the_benchmark_compares_with_tiles_that_are_cut_out_of_the_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(OFFICIAL, content=(32, 512), padded=(32, 512))
    monkeypatch.setattr(benchmark, "PRESETS", {"official": small})
    with torch.inference_mode():
        (row,) = benchmark.measure("official", "small", 1, 4, [MARGIN], "cpu")
    assert row["grid"] == [2, 2]
    assert row["psnr_db"] > row["peer_psnr_db"] > 0


RANK = """
import sys, torch
from datetime import timedelta
from pathlib import Path
from torch import distributed as dist
from taktline_worker.models.cosmos3.vae_tiles import decode_tiled, gather_to_first
from taktline_worker.models.cosmos3.vae_weights import load_vae
folder, rank, ranks, out = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
torch.set_num_threads(1)
store = dist.FileStore(str(out / "store"), ranks)
dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=200))
weights = load_vae(folder, torch.float32, torch.device("cpu"), decoder=True)
with torch.inference_mode():
    found = decode_tiled(weights, torch.load(out / "latents.pt"), rank, ranks, gather_to_first())
assert (found is None) == (rank > 0)
if found is not None:
    torch.save(found, out / "found.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_give_the_same_picture(folder: Path, weights: VaeWeights, tmp_path: Path, ranks: int) -> None:
    torch.save(latents(), tmp_path / "latents.pt")
    started = [
        subprocess.Popen([sys.executable, "-c", RANK, str(folder), str(rank), str(ranks), str(tmp_path)])
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(timeout=240) for process in started] == [0] * ranks
    finally:
        for process in started:
            process.kill()
    found = torch.load(tmp_path / "found.pt")
    assert torch.allclose(found, tiled(weights, ranks, MARGIN), atol=1e-6)
