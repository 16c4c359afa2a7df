"""The runner of π0 and π0.5: buckets, buffers, and the solver loop; eager here, over the same modules everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_kernels import ops
from torch import Tensor

from taktline_worker.frames import FrameCache
from taktline_worker.models.pi import modules
from taktline_worker.models.pi.config import PiArchitecture
from taktline_worker.models.pi.rtc import (
    RtcBatch,
    RtcRow,
    collate_rtc,
    fix_prefix,
    guide,
    guide_exactly,
    rows_with_tails,
)
from taktline_worker.models.pi.weights import PiWeights
from taktline_worker.rtc import RtcSettings

# Prefix lengths are rounded up to a multiple of this, so that nearly equal prompts share one shape.
SLOT_STEP = 16

StepObserver = Callable[[int, Tensor, Tensor], None]
"""Called with (step, x_t before the step, velocity), for tests that compare step by step."""


@dataclass(frozen=True, slots=True)
class PiRow:
    """One observation, ready for the network.

    Attributes:
        pixels: fp32 (cameras present, 3, size, size) in [-1, 1], in the checkpoint's camera order.
        tokens: int64 (prompt tokens,), BOS included, no padding.
        noise: fp32 (H, action width), the row's own x at t = 1.
        state: π0: fp32 (action width,), normalised and zero-padded; None for π0.5.
        rtc: the tail of the robot's last chunk; None without one.
        frames: the key of each camera's frame (`frames.frame_key`); empty where the pixels come from no frame.
        raw: each camera's frame, uint8 (H, W, 3), for a runner that resizes them itself; `pixels` is (cameras, 0) then.
    """

    pixels: Tensor
    tokens: NDArray[np.int64]
    noise: Tensor
    state: Tensor | None
    rtc: RtcRow | None = None
    frames: tuple[bytes, ...] = ()
    raw: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True)
class PiBatch:
    """Rows laid out for one call. Shapes: N images, P prompt slots, S prefix slots.

    Attributes:
        pixels: fp32 (N, 3, size, size), the cameras of row 0, then of row 1, and so on.
        tokens: int64 (B, P), zero beyond a row's prompt.
        source: int64 (B, S), where each prefix slot comes from (`modules.assemble_prefix`).
        lengths: int32 (B,), valid prefix slots.
        noise: fp32 (B, H, action width).
        state: fp32 (B, action width), or None.
        rtc: the tails of the rows that have one; None where no row has.
        frames: the key of each image's frame; None where a row has no keys.
        raw: each image's frame, uint8 (H, W, 3); `pixels` is (N, 0) then.
    """

    pixels: Tensor
    tokens: Tensor
    source: Tensor
    lengths: Tensor
    noise: Tensor
    state: Tensor | None
    rtc: RtcBatch | None = None
    frames: tuple[bytes, ...] | None = None
    raw: tuple[Tensor, ...] | None = None

    def to(self, device: torch.device) -> PiBatch:
        """The same batch on `device`."""
        return replace(
            self,
            pixels=self.pixels.to(device),
            tokens=self.tokens.to(device),
            source=self.source.to(device),
            lengths=self.lengths.to(device),
            noise=self.noise.to(device),
            state=None if self.state is None else self.state.to(device),
            rtc=None if self.rtc is None else self.rtc.to(device),
        )


def collate(
    rows: Sequence[PiRow], tokens_per_image: int, *, min_slots: int = 0, rtc: RtcSettings | None = None
) -> PiBatch:
    """Packs rows: each row's valid tokens first, padding only at the end of its slots.

    Args:
        rows: at least one.
        tokens_per_image: T.
        min_slots: lower bound of S, for callers that want one shape whatever the prompts.
        rtc: what to do with the rows' tails; None leaves them out.
    """
    prompt_slots = max(len(row.tokens) for row in rows)
    lengths = [row.pixels.shape[0] * tokens_per_image + len(row.tokens) for row in rows]
    slots = max(min_slots, -(-max(lengths) // SLOT_STEP) * SLOT_STEP)
    images = sum(row.pixels.shape[0] for row in rows)
    tokens = torch.zeros(len(rows), prompt_slots, dtype=torch.int64)
    source = torch.zeros(len(rows), slots, dtype=torch.int64)
    text_base, image, order = images * tokens_per_image, 0, np.arange(slots)
    words, places = tokens.numpy(), source.numpy()  # NumPy takes a third of PyTorch's time for so few numbers
    for index, row in enumerate(rows):
        count, visual = len(row.tokens), row.pixels.shape[0] * tokens_per_image
        words[index, :count] = row.tokens
        places[index, :visual] = order[:visual] + image * tokens_per_image
        places[index, visual : visual + count] = order[:count] + (text_base + index * prompt_slots)
        image += row.pixels.shape[0]
    return PiBatch(
        pixels=torch.cat([row.pixels for row in rows]) if len(rows) > 1 else rows[0].pixels,
        tokens=tokens,
        source=source,
        lengths=torch.from_numpy(np.array(lengths, np.int32)),
        noise=torch.stack([row.noise for row in rows]),
        state=None if rows[0].state is None else torch.stack([row.state for row in rows if row.state is not None]),
        rtc=None if rtc is None else collate_rtc([row.rtc for row in rows], rtc, *rows[0].noise.shape),
        frames=tuple(key for row in rows for key in row.frames) if all(row.frames for row in rows) else None,
        raw=None if rows[0].raw is None else tuple(frame for row in rows for frame in row.raw or ()),
    )


class _Context:
    """What the solver reads, of the rows with a tail only."""

    def __init__(self, rtc: RtcBatch, context: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
        keys, values, lengths, cos, sin = context
        self.rtc, self.index, self.everyone = rows_with_tails(rtc), rtc.index, rtc.everyone
        rows = rtc.index
        self.context = (keys[:, rows], values[:, rows], lengths[rows], cos[rows], sin[rows])


class PiRunner:
    """Runs batches eagerly on one device.

    One call at a time: the key and value buffers are reused. They grow to the largest (rows, slots) seen, so after a
    warm-up with the largest bucket and the longest prompt nothing is allocated for them any more. Their content is
    valid for one call (one observation of each row).

    Attributes:
        keys: (depth, B, S + 1, d) of the last call, after RoPE; π0's state token is at slot lengths[b].
        values: likewise.
        prefix: (B, S, W) of the last call, the input of the first prefix layer.
        seen: features of frames seen before, valid for these weights; None until `reuse_features` found it exact.
    """

    def __init__(self, weights: PiWeights, architecture: PiArchitecture) -> None:
        self.weights = weights
        self.architecture = architecture
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._steps = int(weights.times.shape[0])
        self.seen: FrameCache[Tensor] | None = None
        self._reuse_up_to = 0
        self._times: list[float] = weights.times.tolist()
        self._key_buffer = torch.empty(0, device=self.device, dtype=self.dtype)
        self._value_buffer = torch.empty(0, device=self.device, dtype=self.dtype)
        self.keys = self._key_buffer
        self.values = self._value_buffer
        self.prefix = self._key_buffer

    # Not inference mode: exact guidance differentiates with respect to x_t through the keys and values made here.
    @torch.no_grad()
    def run(self, batch: PiBatch, observer: StepObserver | None = None) -> Tensor:
        """Actions of each row.

        Returns:
            fp32 (B, H, action width) on the CPU, normalised units, all padded dimensions included.
        """
        batch = batch.to(self.device)
        self.encode(batch)
        return self.solve(batch, observer).cpu()

    @torch.no_grad()
    def encode(self, batch: PiBatch) -> None:
        """Fills `prefix`, `keys` and `values` from cameras, prompt and (π0) state."""
        self.encode_prefix(batch, self.encode_images(batch))

    @torch.no_grad()
    def encode_prefix(self, batch: PiBatch, images: Tensor) -> None:
        """Fills the same from image features (N, T, W) that `encode_images` returned."""
        a = self.architecture
        text = modules.text_features(self.weights.embedding, batch.tokens)
        self.prefix = modules.assemble_prefix(images, text, batch.source)
        self._reserve(batch.source.shape[0], batch.source.shape[1] + 1)
        modules.prefix_pass(self.weights.prefix, self.prefix, batch.lengths, self.keys, self.values, a.heads)
        if batch.state is not None:
            modules.state_pass(self.weights, batch.state, batch.lengths, self.keys, self.values, a.heads)

    @torch.no_grad()
    def solve(self, batch: PiBatch, observer: StepObserver | None = None) -> Tensor:
        """The Euler loop over the keys and values that `encode` left: x_t stays fp32 from noise to action.

        Rows with a tail are guided, or have their first actions fixed; what the other rows get is the same bit by bit
        as without them.
        """
        a = self.architecture
        lengths = batch.lengths if batch.state is None else batch.lengths + 1
        horizon = batch.noise.shape[1]
        positions = lengths[:, None] + torch.arange(horizon, device=self.device)
        cos, sin = ops.rope_table(positions, a.head_dim)
        x, rtc = batch.noise, batch.rtc
        context = (self.keys, self.values, lengths, cos, sin)
        exact = rtc is not None and rtc.settings.exact and rtc.settings.mode == "guided"
        tails = _Context(rtc, context) if rtc is not None and exact else None
        clean = rtc.frozen if rtc is not None and rtc.settings.mode == "trained" else None
        for step in range(self._steps):
            if rtc is not None and clean is not None:
                x = fix_prefix(rtc, x)
            if tails is None:
                v = modules.velocity(self.weights, step, x, *context, a.heads, clean)
                if rtc is not None and clean is None:
                    v = guide(rtc, x, v, self._times[step])
            else:
                v = x if tails.everyone else modules.velocity(self.weights, step, x, *context, a.heads)
                v = v.index_copy(0, tails.index, self._exact(tails, step, x[tails.index]))
            if observer is not None:
                observer(step, x, v)
            x = ops.euler_update(x, v, -1.0 / self._steps)
        return x if rtc is None or clean is None else fix_prefix(rtc, x)

    @torch.no_grad()
    def reuse_features(self, limit_bytes: int, most_images: int) -> bool:
        """Keeps what the vision tower makes of each frame, for frames that come again; false where that is not exact.

        The tower reads one image at a time, but a library may sum a product in another order for another number of
        rows. So one image is encoded alone and among others, and features are kept only where the bits agree.

        Args:
            limit_bytes: memory of the features on the device.
            most_images: images of the largest batch that may use it; larger ones are computed whole.
        """
        size = self.architecture.image_size
        generator = torch.Generator().manual_seed(0)
        pixels = torch.rand(max(2, most_images), 3, size, size, generator=generator).to(self.device) * 2 - 1

        def features(first: int, count: int) -> Tensor:
            return modules.image_features(
                self.weights.vision, pixels[first : first + count], self.architecture.vision_heads
            )

        alone = features(1, 1)[0]
        counts = sorted({2, (most_images + 1) // 2, most_images} - {0, 1})
        if limit_bytes and all(torch.equal(features(0, count)[1], alone) for count in counts):
            self.seen = FrameCache(limit_bytes)
            self._reuse_up_to = most_images
        return self.seen is not None

    @torch.no_grad()
    def encode_images(self, batch: PiBatch) -> Tensor:
        """(N, T, W) of the batch's images; those of frames seen before come from the cache."""
        heads, vision = self.architecture.vision_heads, self.weights.vision
        if self.seen is None or batch.frames is None or len(batch.frames) > self._reuse_up_to:
            return modules.image_features(vision, batch.pixels, heads)
        found = {key: self.seen.get(key) for key in dict.fromkeys(batch.frames)}
        fresh = {key: place for place, key in reversed(list(enumerate(batch.frames))) if found[key] is None}
        if len(fresh) == len(batch.frames):
            images = modules.image_features(vision, batch.pixels, heads)
            made = {key: images[place] for key, place in fresh.items()}
        else:
            made = {key: features for key, features in found.items() if features is not None}
            if fresh:
                computed = modules.image_features(vision, batch.pixels[list(fresh.values())], heads)
                made.update(zip(fresh, computed, strict=True))
            images = torch.stack([made[key] for key in batch.frames])
        for key in fresh:
            kept = made[key].clone()  # a view would keep the whole batch in memory
            self.seen.put(key, kept, kept.numel() * kept.element_size())
        return images

    def _exact(self, tails: _Context, step: int, x: Tensor) -> Tensor:
        """The guided velocity of the rows with a tail, by a backward pass; x: (rows with a tail, H, action width)."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            v = modules.velocity(self.weights, step, x, *tails.context, self.architecture.heads)
            return guide_exactly(tails.rtc, x, v, self._times[step])

    def _reserve(self, rows: int, slots: int) -> None:
        a = self.architecture
        needed = a.depth * rows * slots * a.head_dim
        if self._key_buffer.numel() < needed:
            self._key_buffer = torch.zeros(needed, device=self.device, dtype=self.dtype)
            self._value_buffer = torch.zeros(needed, device=self.device, dtype=self.dtype)
        shape = (a.depth, rows, slots, a.head_dim)
        self.keys = self._key_buffer[:needed].view(shape)
        self.values = self._value_buffer[:needed].view(shape)
