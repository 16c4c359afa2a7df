"""What the Wan 2.2 VAE of a checkpoint is: its dimensions from vae/config.json, checked against its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from taktline_worker.checkpoint import refuse
from taktline_worker.shapes import Shapes, linear, shown

VAE_FOLDER = "vae"
VAE_STEM = "diffusion_pytorch_model"
VAE_CLASS = "AutoencoderKLWan"
_PIXEL_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class StageConfig:
    """One stage of the encoder or decoder.

    Attributes:
        inputs: channels in; `outputs` out.
        blocks: residual blocks.
        space: factor of height and width, 1 or 2.
        time: factor of the frames, 1 or 2.
    """

    inputs: int
    outputs: int
    blocks: int
    space: int
    time: int


@dataclass(frozen=True, slots=True)
class VaeConfig:
    """All dimensions of one VAE.

    Attributes:
        latents: channels of a latent cell.
        patch: pixels of one side that the first and last layer take together.
        mean: of each latent channel, which `encode` takes off; `std` likewise is what it divides by.
    """

    latents: int
    patch: int
    encoder: tuple[StageConfig, ...]
    decoder: tuple[StageConfig, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def patch_channels(self) -> int:
        """Numbers of one patch of pixels."""
        return _PIXEL_CHANNELS * self.patch**2

    @property
    def space(self) -> int:
        """Pixels of one side of a latent cell."""
        return self.patch * math.prod(stage.space for stage in self.encoder)

    @property
    def time(self) -> int:
        """Frames of one latent frame but the first."""
        return math.prod(stage.time for stage in self.encoder)


def read_vae_config(config: Mapping[str, Any], shapes: Shapes) -> VaeConfig:
    """The VAE that vae/config.json states and the tensors have.

    Args:
        config: vae/config.json.
        shapes: stored tensor name -> shape.

    Raises:
        TaktlineError: CHECKPOINT_INVALID.
    """
    try:
        found = parse_config(config)
    except (KeyError, IndexError, ValueError, TypeError, ZeroDivisionError) as error:
        raise refuse(
            f"vae/config.json does not describe the Wan 2.2 VAE: {type(error).__name__} {error}",
            "use the vae folder that was published with the checkpoint, config.json included",
        ) from error
    expected = encoder_shapes(found) | decoder_shapes(found)
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or unknown:
        raise refuse(
            f"the VAE lacks {shown(missing)} and has the unknown {shown(unknown)}",
            "use all files of one published vae folder",
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise refuse(
                f"tensor {name!r} of the VAE has shape {tuple(shapes[name])}, its config.json makes it {shape}",
                "use config.json and tensors of one published vae folder",
            )
    return found


def parse_config(config: Mapping[str, Any]) -> VaeConfig:
    """The dimensions that vae/config.json states. Raises ValueError, KeyError or TypeError for another VAE."""
    if config.get("_class_name", VAE_CLASS) != VAE_CLASS:
        raise ValueError(f"it is a {config['_class_name']}, this family reads {VAE_CLASS}")
    if not config["is_residual"] or config.get("attn_scales"):
        raise ValueError("is_residual must be true and attn_scales empty, as Wan 2.2 has them")
    latents, patch, times = int(config["z_dim"]), int(config["patch_size"]), list(config["temperal_downsample"])
    if config["in_channels"] != _PIXEL_CHANNELS * patch**2 or config["out_channels"] != config["in_channels"]:
        raise ValueError(f"{config['in_channels']} input and {config['out_channels']} output channels, patch {patch}")
    factors, blocks = [int(factor) for factor in config["dim_mult"]], int(config["num_res_blocks"])
    if len(times) != len(factors) - 1:
        raise ValueError(f"{len(factors)} stages have {len(times)} temporal factors")
    mean, std = (tuple(float(value) for value in config[key]) for key in ("latents_mean", "latents_std"))
    if len(mean) != latents or len(std) != latents or not all(map(math.isfinite, mean + std)) or min(std) <= 0:
        raise ValueError(f"latents_mean and latents_std must be {latents} finite numbers, the latter positive")
    down = [int(config["base_dim"]) * factor for factor in (1, *factors)]
    up = [
        int(config.get("decoder_base_dim") or config["base_dim"]) * factor for factor in (factors[-1], *factors[::-1])
    ]
    return VaeConfig(
        latents=latents,
        patch=patch,
        encoder=_stages(down, blocks, times),
        decoder=_stages(up, blocks + 1, times[::-1]),
        mean=mean,
        std=std,
    )


def _stages(widths: list[int], blocks: int, times: list[bool]) -> tuple[StageConfig, ...]:
    """The last stage keeps its size."""
    factors = [(2, 2 if time else 1) for time in times] + [(1, 1)]
    return tuple(
        StageConfig(inputs, outputs, blocks, space, time)
        for (inputs, outputs), (space, time) in zip(pairwise(widths), factors, strict=True)
    )


def encoder_shapes(c: VaeConfig) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor that encoding reads."""
    width = c.encoder[-1].outputs
    shapes = _conv("encoder.conv_in", c.encoder[0].inputs, c.patch_channels)
    for index, stage in enumerate(c.encoder):
        shapes |= _stage(f"encoder.down_blocks.{index}", stage, "downsampler", stage.outputs)
    shapes |= _middle("encoder.mid_block", width) | _gamma("encoder.norm_out", width, 3)
    shapes |= _conv("encoder.conv_out", 2 * c.latents, width)
    return shapes | _conv("quant_conv", 2 * c.latents, 2 * c.latents, 1)


def decoder_shapes(c: VaeConfig) -> dict[str, tuple[int, ...]]:
    """Stored name -> shape of every tensor that decoding reads."""
    first, last = c.decoder[0].inputs, c.decoder[-1].outputs
    shapes = _conv("post_quant_conv", c.latents, c.latents, 1) | _conv("decoder.conv_in", first, c.latents)
    shapes |= _middle("decoder.mid_block", first)
    for index, stage in enumerate(c.decoder):
        shapes |= _stage(f"decoder.up_blocks.{index}", stage, "upsampler", 2 * stage.outputs)
    return shapes | _gamma("decoder.norm_out", last, 3) | _conv("decoder.conv_out", c.patch_channels, last)


def _stage(name: str, stage: StageConfig, sampler: str, time_outputs: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    width = stage.inputs
    for index in range(stage.blocks):
        shapes |= _residual(f"{name}.resnets.{index}", width, stage.outputs)
        width = stage.outputs
    if stage.space > 1:
        shapes |= {
            f"{name}.{sampler}.resample.1.weight": (width, width, 3, 3),
            f"{name}.{sampler}.resample.1.bias": (width,),
        }
    if stage.time > 1:
        shapes |= {
            f"{name}.{sampler}.time_conv.weight": (time_outputs, width, 3, 1, 1),
            f"{name}.{sampler}.time_conv.bias": (time_outputs,),
        }
    return shapes


def _middle(name: str, width: int) -> dict[str, tuple[int, ...]]:
    shapes = _residual(f"{name}.resnets.0", width, width) | _residual(f"{name}.resnets.1", width, width)
    attention = f"{name}.attentions.0"
    shapes |= _gamma(f"{attention}.norm", width, 2)
    for part, rows in (("to_qkv", 3 * width), ("proj", width)):
        flat = linear(f"{attention}.{part}", rows, width)
        shapes |= flat | {f"{attention}.{part}.weight": (rows, width, 1, 1)}
    return shapes


def _residual(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    shapes = _gamma(f"{name}.norm1", inputs, 3) | _conv(f"{name}.conv1", outputs, inputs)
    shapes |= _gamma(f"{name}.norm2", outputs, 3) | _conv(f"{name}.conv2", outputs, outputs)
    return shapes if inputs == outputs else shapes | _conv(f"{name}.conv_shortcut", outputs, inputs, 1)


def _gamma(name: str, width: int, axes: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.gamma": (width, *(1,) * axes)}


def _conv(name: str, outputs: int, inputs: int, kernel: int = 3) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs, kernel, kernel, kernel), f"{name}.bias": (outputs,)}
