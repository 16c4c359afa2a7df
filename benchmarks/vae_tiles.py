"""How far an imagined video that is decoded in tiles is from one decoded whole, by the margin that a tile sees.

    python benchmarks/vae_tiles.py [--ranks 8] [--margins 0 1 2 4 8 14] [--published] [--frames 3] [--json FILE]

All tiles are decoded one after the other in this process, as the ranks of a mesh would. Two ways side by side: ours,
whose middle (with the attention over the whole picture) every rank computes whole, and the usual one, where a tile
is cut out of the latents and everything behind it sees nothing else. Random weights: trained ones are not to be had
here, so the figures say how the error falls with the margin, not what it will be on a real video. `--published` takes
the published widths (needs a GPU); without it every layer is there at a fraction of its width.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from taktline_worker.models.cosmos3 import vae
from taktline_worker.models.cosmos3.request import PRESETS
from taktline_worker.models.cosmos3.vae_config import VaeConfig, decoder_shapes, encoder_shapes, read_vae_config
from taktline_worker.models.cosmos3.vae_tiles import decode_tiled, grid_of, stitch, tiles_of
from taktline_worker.models.cosmos3.vae_weights import VaeWeights, pack_vae
from torch import Tensor

WIDTHS = {"small": (8, 12), "published": (160, 256)}


def random_vae(widths: str, device: torch.device, latents: int = 48, dtype: torch.dtype = torch.float32) -> VaeWeights:
    """A VAE of the published structure whose tensors keep the size of what passes through them."""
    base, decoder = WIDTHS[widths]
    stated = {
        "is_residual": True,
        "z_dim": latents,
        "patch_size": 2,
        "in_channels": 12,
        "out_channels": 12,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True],
        "base_dim": base,
        "decoder_base_dim": decoder,
        "latents_mean": [0.0] * latents,
        "latents_std": [1.0] * latents,
    }
    draw = torch.Generator().manual_seed(0)
    shapes = _shapes(stated)
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith("gamma"):
            tensors[name] = torch.ones(shape)
        elif name.endswith("bias"):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = torch.randn(shape, generator=draw) / math.sqrt(math.prod(shape[1:]))
    return pack_vae(read_vae_config(stated, shapes), tensors, dtype, device)


def _shapes(stated: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from taktline_worker.models.cosmos3 import vae_config

    config: VaeConfig = vae_config.parse_config(stated)
    return encoder_shapes(config) | decoder_shapes(config)


def ours(weights: VaeWeights, latents: Tensor, ranks: int, margin: int) -> Tensor:
    """All ranks one after the other."""
    sent: list[Tensor] = []

    def gather(mine: Tensor) -> Sequence[Tensor] | None:
        sent.append(mine)
        return sent if len(sent) == ranks else None

    found = [decode_tiled(weights, latents, rank, ranks, gather, margin) for rank in range(ranks)]
    assert found[-1] is not None
    return found[-1]


def usual(weights: VaeWeights, latents: Tensor, ranks: int, margin: int) -> Tensor:
    """Tiles cut out of the latents."""
    rows, columns = latents.shape[-2:]
    tiles = tiles_of(rows, columns, ranks, margin)
    decoded = [vae.decode(weights, latents[..., tile.seen[0], tile.seen[1]]) for tile in tiles]
    return stitch(tiles, decoded, rows, columns, weights.config.space)


def measure(
    preset: str, widths: str, frames: int, ranks: int, margins: Sequence[int], device: str
) -> list[dict[str, Any]]:
    """A row for each margin."""
    weights = random_vae(widths, torch.device(device))
    _, rows, columns = PRESETS[preset].latent_grid
    latents = torch.randn(1, 48, frames, rows, columns, generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    with torch.inference_mode():
        whole = vae.decode(weights, latents)
        for margin in margins:
            row: dict[str, Any] = {
                "bench": "vae_tiles",
                "policy": "cosmos3-nano",
                "shape": {"preset": preset, "latent_rows": rows, "latent_columns": columns, "latent_frames": frames},
                "grid": list(grid_of(ranks)),
                "margin": margin,
                "widths": widths,
                "dtype": "fp32",
                "batch": 1,
                "gpus": ranks if device == "cuda" else 0,
            }
            for name, way in (("", ours), ("peer_", usual)):
                error = (way(weights, latents, ranks, margin) - whole).abs()
                mean = float(error.square().mean())
                row |= {
                    f"{name}psnr_db": round(10 * math.log10(4.0 / mean), 1) if mean else None,
                    f"{name}largest": float(error.max()),
                }
            found.append(row)
            print(
                f"{preset:9} margin {margin:2}: {row['psnr_db']} dB, largest {row['largest']:.2e};"
                f" cut out of the latents {row['peer_psnr_db']} dB, {row['peer_largest']:.2e}",
                flush=True,
            )
    return found


def main() -> None:
    """Measures both presets and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--margins", type=int, nargs="+", default=[0, 1, 2, 4, 8, 14])
    parser.add_argument("--frames", type=int, default=3, help="latent frames")
    parser.add_argument("--published", action="store_true", help="the published widths")
    parser.add_argument("--presets", nargs="+", default=["official", "paper"], choices=list(PRESETS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    widths = "published" if options.published else "small"
    rows = []
    for preset in options.presets:
        rows += measure(preset, widths, options.frames, options.ranks, options.margins, device)
    stamp = {
        "versions": {"torch": torch.__version__.split("+")[0]},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python " + " ".join(["benchmarks/vae_tiles.py", *sys.argv[1:]]),
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([row | stamp for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
