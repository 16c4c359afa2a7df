"""The VAE's weights on the device, in the layout of `vae`: each causal 3-D convolution as a 2-D one over its frames."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from taktline_worker.checkpoint import TensorFiles, read_json
from taktline_worker.models.cosmos3.vae_config import (
    VAE_FOLDER,
    VAE_STEM,
    StageConfig,
    VaeConfig,
    decoder_shapes,
    encoder_shapes,
    read_vae_config,
)


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution over `taps` frames, those before their own included.

    Attributes:
        weight: (outputs, taps * inputs, k, k), the oldest frame's channels first.
        bias: (outputs,).
        last: (outputs, inputs, k, k), what the youngest frame is multiplied by; all that counts where it is the first.
    """

    weight: Tensor
    bias: Tensor
    taps: int
    last: Tensor


@dataclass(frozen=True, slots=True)
class Residual:
    """Norm, SiLU and convolution twice; the norms' gammas are (channels,)."""

    norm1: Tensor
    conv1: Conv
    norm2: Tensor
    conv2: Conv
    shortcut: Conv | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Single-head self-attention over the cells of a frame; `qkv` and `out` are (weight, bias) of 1x1 convolutions."""

    norm: Tensor
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Middle:
    """What stands at the smallest size."""

    first: Residual
    attention: Attention
    last: Residual


@dataclass(frozen=True, slots=True)
class Stage:
    """Residual blocks, then the change of size: `resample` over each frame, `time` over frames."""

    config: StageConfig
    blocks: tuple[Residual, ...]
    resample: tuple[Tensor, Tensor] | None
    time: Conv | None


@dataclass(frozen=True, slots=True)
class Coder:
    """The encoder (`latent` after `conv_out`) or the decoder (`latent` before `conv_in`)."""

    latent: Conv
    conv_in: Conv
    middle: Middle
    stages: tuple[Stage, ...]
    norm_out: Tensor
    conv_out: Conv


@dataclass(frozen=True, slots=True)
class VaeWeights:
    """One VAE.

    Attributes:
        mean: fp32 (latents,) on the device; `std` likewise.
        decoder: None where no imagined video is served.
    """

    config: VaeConfig
    dtype: torch.dtype
    mean: Tensor
    std: Tensor
    encoder: Coder
    decoder: Coder | None

    @property
    def device(self) -> torch.device:
        """Where the VAE runs."""
        return self.mean.device


def load_vae(folder: Path, dtype: torch.dtype, device: torch.device, *, decoder: bool) -> VaeWeights:
    """Loads `folder`/vae.

    Args:
        folder: of the checkpoint.
        decoder: whether the decoder is wanted as well, about three times the encoder's memory.

    Raises:
        TaktlineError: CHECKPOINT_INVALID.
    """
    files = TensorFiles(folder / VAE_FOLDER, VAE_STEM)
    config = read_vae_config(read_json(folder / VAE_FOLDER / "config.json"), files.shapes)
    names = encoder_shapes(config) | (decoder_shapes(config) if decoder else {})
    return pack_vae(config, dict(files.read({name: name for name in names})), dtype, device)


def pack_vae(config: VaeConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> VaeWeights:
    """The VAE of published tensors; without those of the decoder it only encodes."""
    pack = _Packer(tensors, dtype, device)
    decodes = "decoder.conv_in.weight" in tensors
    return VaeWeights(
        config=config,
        dtype=dtype,
        mean=torch.tensor(config.mean, device=device),
        std=torch.tensor(config.std, device=device),
        encoder=pack.coder("encoder", "quant_conv", config.encoder),
        decoder=pack.coder("decoder", "post_quant_conv", config.decoder) if decodes else None,
    )


class _Packer:
    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self._device = device

    def coder(self, name: str, latent: str, stages: tuple[StageConfig, ...]) -> Coder:
        kind, sampler = ("down_blocks", "downsampler") if name == "encoder" else ("up_blocks", "upsampler")
        return Coder(
            latent=self._conv(latent),
            conv_in=self._conv(f"{name}.conv_in"),
            middle=self._middle(f"{name}.mid_block"),
            stages=tuple(self._stage(f"{name}.{kind}.{i}", stage, sampler) for i, stage in enumerate(stages)),
            norm_out=self._gamma(f"{name}.norm_out"),
            conv_out=self._conv(f"{name}.conv_out"),
        )

    def _stage(self, name: str, config: StageConfig, sampler: str) -> Stage:
        return Stage(
            config=config,
            blocks=tuple(self._residual(f"{name}.resnets.{index}") for index in range(config.blocks)),
            resample=self._pair(f"{name}.{sampler}.resample.1") if config.space > 1 else None,
            time=self._conv(f"{name}.{sampler}.time_conv") if config.time > 1 else None,
        )

    def _middle(self, name: str) -> Middle:
        attention = f"{name}.attentions.0"
        return Middle(
            first=self._residual(f"{name}.resnets.0"),
            attention=Attention(
                norm=self._gamma(f"{attention}.norm"),
                qkv=self._pair(f"{attention}.to_qkv"),
                out=self._pair(f"{attention}.proj"),
            ),
            last=self._residual(f"{name}.resnets.1"),
        )

    def _residual(self, name: str) -> Residual:
        return Residual(
            norm1=self._gamma(f"{name}.norm1"),
            conv1=self._conv(f"{name}.conv1"),
            norm2=self._gamma(f"{name}.norm2"),
            conv2=self._conv(f"{name}.conv2"),
            shortcut=self._conv(f"{name}.conv_shortcut") if f"{name}.conv_shortcut.weight" in self._tensors else None,
        )

    def _conv(self, name: str) -> Conv:
        weight = self._tensors[f"{name}.weight"]
        taps = weight.shape[2]
        whole = self._place(weight.transpose(1, 2).flatten(1, 2))
        last = whole if taps == 1 else self._place(weight[:, :, -1])
        return Conv(whole, self._place(self._tensors[f"{name}.bias"]), taps, last)

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self._place(self._tensors[f"{name}.weight"]), self._place(self._tensors[f"{name}.bias"])

    def _gamma(self, name: str) -> Tensor:
        return self._place(self._tensors[f"{name}.gamma"].flatten())

    def _place(self, tensor: Tensor) -> Tensor:
        matrix = tensor.dim() == 4 and self._device.type == "cuda"
        form = torch.channels_last if matrix else torch.contiguous_format
        return tensor.to(device=self._device, dtype=self._dtype).contiguous(memory_format=form)
