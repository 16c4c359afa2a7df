"""The Wan VAE against diffusers' own, on tiny random checkpoints in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.models.cosmos3 import vae
from taktline_worker.models.cosmos3.vae_weights import VaeWeights, load_vae

from tests.cosmos3.vae_checkpoints import save_vae, tiny_vae

CPU = torch.device("cpu")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module")
def oracle() -> AutoencoderKLWan:
    return tiny_vae()


@pytest.fixture(scope="module")
def weights(oracle: AutoencoderKLWan, tmp_path_factory: pytest.TempPathFactory) -> VaeWeights:
    folder = save_vae(tmp_path_factory.mktemp("vae"), oracle)
    return load_vae(folder, torch.float32, CPU, decoder=True)


def frames(count: int, height: int, width: int, batch: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(count)
    return torch.rand(batch, 3, count, height, width, generator=draw) * 2 - 1


def official(oracle: AutoencoderKLWan, given: torch.Tensor) -> torch.Tensor:
    mean = torch.tensor(oracle.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(oracle.config.latents_std).view(1, -1, 1, 1, 1)
    return (oracle.encode(given).latent_dist.mode() - mean) / std


@pytest.mark.parametrize("count", [1, 5, 13])
@torch.inference_mode()
def test_latents_are_the_oracles(oracle: AutoencoderKLWan, weights: VaeWeights, count: int) -> None:
    given = frames(count, 48, 64, batch=2)
    found = vae.encode(weights, given)
    assert found.dtype == torch.float32
    assert found.shape == (2, 48, 1 + count // 4, 3, 4)
    assert relative(found, official(oracle, given)) <= 1e-5


@torch.inference_mode()
def test_the_first_frame_alone_gives_the_first_latent_frame_of_the_whole_video(
    oracle: AutoencoderKLWan, weights: VaeWeights
) -> None:
    given = frames(9, 48, 64)
    alone = vae.encode(weights, given[:, :, :1])
    # In our own code the two are the same computation, to the bit; against the oracle they differ by rounding only.
    assert torch.equal(alone, vae.encode(weights, given)[:, :, :1])
    assert relative(alone, official(oracle, given)[:, :, :1]) <= 1e-5
    # What comes after the first frame cannot reach it, whatever it is.
    other = torch.cat((given[:, :, :1], frames(8, 48, 64)), dim=2)
    assert torch.equal(alone, vae.encode(weights, other)[:, :, :1])
    assert not torch.equal(vae.encode(weights, given)[:, :, 1:], vae.encode(weights, other)[:, :, 1:])


@pytest.mark.parametrize("count", [1, 2, 4])
@torch.inference_mode()
def test_frames_are_the_oracles(oracle: AutoencoderKLWan, weights: VaeWeights, count: int) -> None:
    latents = torch.randn(2, 48, count, 3, 4, generator=torch.Generator().manual_seed(count))
    mean = torch.tensor(oracle.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(oracle.config.latents_std).view(1, -1, 1, 1, 1)
    expected = oracle.decode(latents * std + mean).sample
    found = vae.decode(weights, latents)
    assert found.shape == (2, 3, 1 + 4 * (count - 1), 48, 64)
    assert relative(found, expected) <= 1e-5


@torch.inference_mode()
def test_a_neighbour_changes_nothing(weights: VaeWeights) -> None:
    given = frames(5, 48, 64, batch=2)
    both = vae.encode(weights, given)
    for row in range(2):
        assert relative(vae.encode(weights, given[row : row + 1])[0], both[row]) <= 1e-6


@torch.inference_mode()
def test_bf16_stays_near_fp32(oracle: AutoencoderKLWan, tmp_path: Path) -> None:
    half = load_vae(save_vae(tmp_path, oracle), torch.bfloat16, CPU, decoder=False)
    assert half.decoder is None
    given = frames(5, 48, 64)
    expected = official(oracle, given)
    ours = relative(vae.encode(half, given), expected)
    theirs = tiny_vae().to(torch.bfloat16)
    mean = torch.tensor(oracle.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(oracle.config.latents_std).view(1, -1, 1, 1, 1)
    published = (theirs.encode(given.to(torch.bfloat16)).latent_dist.mode().float() - mean) / std
    # The oracle's own bf16 is the yardstick; twice its distance leaves room for another order of summation.
    assert ours <= 2 * relative(published, expected)


def edited(folder: Path, **changes: object) -> Path:
    path = folder / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_residual": False}, "is_residual"),
        ({"_class_name": "AutoencoderKL"}, "AutoencoderKL"),
        ({"latents_std": [1.0] * 47 + [0.0]}, "latents_std"),
        ({"latents_mean": [0.0] * 16}, "latents_mean"),
        ({"patch_size": 4}, "patch"),
        ({"base_dim": 16}, "encoder.conv_in"),
        ({"num_res_blocks": 1}, "unknown"),
    ],
)
def test_another_vae_is_refused(
    oracle: AutoencoderKLWan, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    folder = edited(save_vae(tmp_path, oracle), **changes)
    with pytest.raises(TaktlineError) as refused:
        load_vae(folder, torch.float32, CPU, decoder=True)
    assert refused.value.code is ErrorCode.CHECKPOINT_INVALID
    assert said in refused.value.message
    assert refused.value.next_step


def test_a_folder_without_a_vae_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaktlineError, match="is no folder"):
        load_vae(tmp_path, torch.float32, CPU, decoder=False)
