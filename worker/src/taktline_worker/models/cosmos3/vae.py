"""The Wan 2.2 VAE: frames to normalised latents and back, causal in time, one chunk of frames after the other.

Every causal 3-D convolution is computed as a 2-D one whose channels are those of the frames it sees. Frames that do
not exist (those before the first) are left out instead of multiplied as zeros, so that the first frame, all that a
policy observes, costs a third. The first latent frame depends on the first frame alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from taktline_kernels.ops.channels import channel_norm
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.cosmos3.vae_weights import Attention, Coder, Conv, Middle, Residual, Stage, VaeWeights

Region = tuple[slice, slice]
"""Rows and columns of latent cells."""


class History:
    """The last frames that each convolution has seen, for the next chunk; one for each video."""

    def __init__(self) -> None:
        self._frames: dict[int, Tensor] = {}

    def before(self, conv: Conv) -> Tensor | None:
        """Frames (B, n, C, H, W) before the chunk; None in the first chunk."""
        return self._frames.get(id(conv))

    def keep(self, conv: Conv, frames: Tensor, most: int) -> None:
        """Remembers the last `most` of `frames`."""
        self._frames[id(conv)] = frames[:, frames.shape[1] - most :] if most < frames.shape[1] else frames


def encode(weights: VaeWeights, frames: Tensor) -> Tensor:
    """The mean of the latents, normalised.

    Args:
        frames: (B, 3, T, H, W) in [-1, 1]; T is 1 + 4n, H and W whole latent cells.

    Returns:
        fp32 (B, latents, 1 + n, rows, columns) on the VAE's device.
    """
    c = weights.config
    patches = _laid_out(_to_patches(frames.to(weights.device, weights.dtype), c.patch))
    history = History()
    ends = range(1, patches.shape[1] + 1, c.time)
    found = [_encoder(weights.encoder, patches[:, max(0, end - c.time) : end], history) for end in ends]
    mean = torch.cat(found, dim=1)[:, :, : c.latents].transpose(1, 2).float()
    shape = (-1, 1, 1, 1)
    return (mean - weights.mean.view(shape)) / weights.std.view(shape)


def decode(weights: VaeWeights, latents: Tensor) -> Tensor:
    """Frames of normalised latents.

    Args:
        latents: (B, latents, n, rows, columns).

    Returns:
        (B, 3, 1 + 4 (n - 1), H, W) in [-1, 1], in the VAE's dtype.
    """
    return torch.cat(list(decode_frames(weights, latents)), dim=2)


def decode_frames(weights: VaeWeights, latents: Tensor, region: Region | None = None) -> Iterator[Tensor]:
    """The same, one latent frame after the other: (B, 3, 1 or 4, H, W).

    Args:
        region: rows and columns of latent cells, as slices, that are decoded; the part with the attention, 1.4 %
            of the published decoder's work, is computed for all cells in any case. None decodes all.
    """
    assert weights.decoder is not None, "the VAE was loaded without its decoder"
    shape = (-1, 1, 1, 1)
    raw = latents.to(weights.device).float() * weights.std.view(shape) + weights.mean.view(shape)
    cells = _laid_out(raw.to(weights.dtype).transpose(1, 2))
    history = History()
    for index in range(cells.shape[1]):
        found = _decoder(weights.decoder, cells[:, index : index + 1], history, region)
        yield _from_patches(found, weights.config.patch).clamp(-1.0, 1.0)


def _laid_out(x: Tensor) -> Tensor:
    """(B, T, C, H, W), on a GPU with a cell's channels side by side: its convolutions then copy nothing."""
    if not x.is_cuda:
        return x
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).view(x.shape)


def _encoder(coder: Coder, x: Tensor, history: History) -> Tensor:
    first = history.before(coder.conv_in) is None
    x = _causal(coder.conv_in, x, history)
    for stage in coder.stages:
        x = _down(stage, x, history, first)
    x = _middle(coder.middle, x, history)
    x = _causal(coder.conv_out, channel_norm(x, coder.norm_out, silu=True), history)
    return _pointwise(coder.latent, x)


def _decoder(coder: Coder, x: Tensor, history: History, region: Region | None) -> Tensor:
    first = history.before(coder.conv_in) is None
    x = _causal(coder.conv_in, _pointwise(coder.latent, x), history)
    x = _middle(coder.middle, x, history)
    if region is not None:
        x = x[..., region[0], region[1]]
    for stage in coder.stages:
        x = _up(stage, x, history, first)
    return _causal(coder.conv_out, channel_norm(x, coder.norm_out, silu=True), history)


def _down(stage: Stage, x: Tensor, history: History, first: bool) -> Tensor:
    """Blocks, then half the size; beside them the mean over groups of what they started from."""
    kept = _group_means(x, stage.config.outputs, stage.config.time, stage.config.space)
    for block in stage.blocks:
        x = _residual(block, x, history)
    if stage.resample is not None:
        x = _frames(lambda one: functional.conv2d(functional.pad(one, (0, 1, 0, 1)), *_sampler(stage), stride=2), x)
    if stage.time is not None:
        before = history.before(stage.time)
        history.keep(stage.time, x, 1)
        if not first:
            assert before is not None
            seen = _joined((before, x), 1)
            outputs = (seen.shape[1] - stage.time.taps) // 2 + 1
            x = _windows(stage.time, seen, outputs, stride=2)
    return x + kept


def _up(stage: Stage, x: Tensor, history: History, first: bool) -> Tensor:
    """Blocks, then twice the size; beside them copies of what they started from."""
    kept = _copies(x, stage.config.outputs, stage.config.time, stage.config.space, first) if stage.resample else None
    for block in stage.blocks:
        x = _residual(block, x, history)
    if stage.time is not None:
        if first:
            history.keep(stage.time, x[:, :0], 0)
        else:
            # Both frames that come of one lie in its channels.
            both = _causal(stage.time, x, history)
            batch, frames, channels, height, width = both.shape
            x = both.reshape(batch, 2 * frames, channels // 2, height, width)
    if stage.resample is not None:
        x = _frames(lambda one: functional.conv2d(_doubled(one), *_sampler(stage), padding=1), x)
    return x if kept is None else x + kept


def _sampler(stage: Stage) -> tuple[Tensor, Tensor]:
    assert stage.resample is not None
    return stage.resample


def _middle(middle: Middle, x: Tensor, history: History) -> Tensor:
    x = _residual(middle.first, x, history)
    x = _attention(middle.attention, x)
    return _residual(middle.last, x, history)


def _residual(block: Residual, x: Tensor, history: History) -> Tensor:
    shortcut = x if block.shortcut is None else _pointwise(block.shortcut, x)
    x = _causal(block.conv1, channel_norm(x, block.norm1, silu=True), history)
    return _causal(block.conv2, channel_norm(x, block.norm2, silu=True), history) + shortcut


def _attention(attention: Attention, x: Tensor) -> Tensor:
    batch, time, channels, height, width = x.shape
    frames = _images(channel_norm(x, attention.norm))
    qkv = functional.conv2d(frames, *attention.qkv).flatten(2).transpose(1, 2)
    q, k, v = (part[:, None] for part in qkv.chunk(3, dim=-1))
    seen = functional.scaled_dot_product_attention(q, k, v)[:, 0]
    cells = seen.transpose(1, 2).reshape(batch * time, channels, height, width)
    return x + functional.conv2d(cells, *attention.out).view(batch, time, channels, height, width)


def _causal(conv: Conv, x: Tensor, history: History) -> Tensor:
    """A convolution with the frames of earlier chunks before it; the first frames have fewer or none."""
    before = history.before(conv)
    seen = x if before is None or before.shape[1] == 0 else _joined((before, x), 1)
    history.keep(conv, seen, conv.taps - 1)
    return _windows(conv, seen, x.shape[1])


def _windows(conv: Conv, seen: Tensor, outputs: int, stride: int = 1) -> Tensor:
    """Each output frame from the `taps` frames of `seen` that end where it stands; the last `outputs` of them."""
    lacking = conv.taps + stride * (outputs - 1) - seen.shape[1]
    taps = conv.taps
    weight = conv.weight
    if lacking > 0 and outputs == 1:
        # Frames before the video are zeros: their part of the product is left out.
        taps -= lacking
        weight = conv.last if taps == 1 else weight[:, lacking * seen.shape[2] :]
    elif lacking > 0:
        seen = functional.pad(seen, (0, 0, 0, 0, 0, 0, lacking, 0))
    span = stride * (outputs - 1) + 1
    start = seen.shape[1] - span - taps + 1
    stacked = [seen[:, start + tap : start + tap + span : stride] for tap in range(taps)]
    frames = stacked[0] if taps == 1 else _joined(stacked, 2)
    padding = weight.shape[-1] // 2
    return _frames(lambda one: functional.conv2d(one, weight, conv.bias, padding=padding), frames)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """One behind the other, frames (dim 1) or channels (dim 2); channels that lie side by side go on doing so."""
    if any(part.stride(2) != 1 for part in parts):
        return torch.cat(tuple(parts), dim=dim)
    return torch.cat([part.movedim(2, -1) for part in parts], dim=1 if dim == 1 else -1).movedim(-1, 2)


def _images(x: Tensor) -> Tensor:
    """(B, T, C, H, W) -> (B * T, C, H, W).

    Where channels lie side by side, one image alone must show it in its stride as well, or PyTorch copies it.
    """
    if x.stride(2) != 1:
        return x.flatten(0, 1)
    cells = x.movedim(2, -1)
    return cells.reshape(-1, *cells.shape[2:]).movedim(-1, 1)


def _pointwise(conv: Conv, x: Tensor) -> Tensor:
    return _frames(lambda one: functional.conv2d(one, conv.weight, conv.bias), x)


def _frames(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of images (B * T, C, H, W), for x (B, T, C, H, W)."""
    images = function(_images(x))
    return images.view(*x.shape[:2], *images.shape[1:])


def _doubled(images: Tensor) -> Tensor:
    """Each pixel four times."""
    return functional.interpolate(images, scale_factor=2.0, mode="nearest-exact")


def _group_means(x: Tensor, outputs: int, time: int, space: int) -> Tensor:
    """Blocks of time x space x space cells as channels, averaged in groups down to `outputs` channels.

    Frames that the first block lacks count as zeros, as in the published network.
    """
    lacking = -x.shape[1] % time
    if lacking:
        missing = x.movedim(2, -1)[:, :1].expand(-1, lacking, -1, -1, -1)
        x = _joined((torch.zeros_like(missing, memory_format=torch.contiguous_format).movedim(-1, 2), x), 1)
    batch, frames, channels, height, width = x.shape
    together = channels * time * space * space // outputs
    if x.stride(2) == 1 and together % (space * space) == 0:
        # A group holds whole squares: their means first, over channels that lie side by side and go on doing so.
        cells = x.movedim(2, -1).reshape(-1, time, height // space, space, width // space, space, channels)
        means = cells.mean(dim=(3, 5)) if space > 1 else cells[:, :, :, 0, :, 0]
        means = means.permute(0, 2, 3, 4, 1).flatten(3)  # image, y, x, channel and time
        if together > space * space:
            means = means.reshape(*means.shape[:3], outputs, -1).mean(dim=4)
        return means.view(batch, frames // time, *means.shape[1:]).movedim(-1, 2)
    cells = x.reshape(batch, frames // time, time, channels, height // space, space, width // space, space)
    cells = cells.permute(0, 1, 3, 2, 5, 7, 4, 6)  # batch, frame, channel, time, y, x, row, column
    grouped = cells.reshape(batch, frames // time, outputs, -1, height // space, width // space)
    return grouped.mean(dim=3)


def _copies(x: Tensor, outputs: int, time: int, space: int, first: bool) -> Tensor:
    """Channels spread over time x space x space cells, each as often as that takes; one frame of the first chunk."""
    batch, frames, channels, height, width = x.shape
    spread = x.repeat_interleave(outputs * time * space * space // channels, dim=2)
    cells = spread.view(batch, frames, outputs, time, space, space, height, width)
    cells = cells.permute(0, 1, 3, 2, 6, 4, 7, 5)  # batch, frame, time, channel, row, y, column, x
    found = cells.reshape(batch, frames * time, outputs, height * space, width * space)
    return found[:, time - 1 :] if first else found


def _to_patches(frames: Tensor, patch: int) -> Tensor:
    """(B, 3, T, H, W) -> (B, T, 3 * patch^2, H / patch, W / patch), a patch's columns before its rows."""
    batch, channels, time, height, width = frames.shape
    cells = frames.reshape(batch, channels, time, height // patch, patch, width // patch, patch)
    cells = cells.permute(0, 2, 1, 6, 4, 3, 5)
    return cells.reshape(batch, time, channels * patch * patch, height // patch, width // patch)


def _from_patches(x: Tensor, patch: int) -> Tensor:
    """The inverse of `_to_patches`."""
    batch, time, channels, height, width = x.shape
    cells = x.reshape(batch, time, channels // patch**2, patch, patch, height, width)
    cells = cells.permute(0, 2, 1, 5, 4, 6, 3)
    return cells.reshape(batch, channels // patch**2, time, height * patch, width * patch)
