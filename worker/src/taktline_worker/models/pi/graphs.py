"""The GPU runner of π0 and π0.5: a CUDA graph a bucket with the whole request in it, over buffers that all share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from taktline_kernels import gpu, ops
from taktline_kernels.guidance import Guidance
from taktline_protocol.deployment import QuantisationOptions
from torch import Tensor

from taktline_worker.devices import Letter, Running, Staged
from taktline_worker.graph_capture import Beside, Captured, GraphPool, Stage
from taktline_worker.models.pi import fp8, fused
from taktline_worker.models.pi.camera import CameraBuffers
from taktline_worker.models.pi.config import PiArchitecture
from taktline_worker.models.pi.frame_memory import PINNED_FRAME_BYTES
from taktline_worker.models.pi.native_rows import NativeRows
from taktline_worker.models.pi.resize import Resize
from taktline_worker.models.pi.rtc import guidance_steps
from taktline_worker.models.pi.runner import PiBatch
from taktline_worker.models.pi.single_row import SingleRows
from taktline_worker.models.pi.unnormalise import Unnormaliser
from taktline_worker.models.pi.weights import PiWeights


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one graph.

    Attributes:
        rows: requests in a batch, B.
        views: cameras a row; a row with fewer leaves its last image slots unread.
        prompt: prompt slots a row, P; a row's prefix has views * tokens_per_image + prompt slots.
    """

    rows: int
    views: int
    prompt: int


class GraphRunner:
    """Replays one graph a batch, from patches to robot units, with no allocation after `capture`.

    One call at a time, and batches run in the order of their calls: every bucket uses the same buffers, sized for the
    largest. A batch is padded to the smallest captured bucket that holds it; padded rows have one valid slot and no
    influence on the others.

    Args:
        weights: packed bf16 weights, on a CUDA device.
        architecture: dimensions.
        horizon: actions of a chunk.
        buckets: the shapes to serve.
        precision: `fp8` quantises the products of the vision tower and the prefix.
        resize: how raw camera frames become pixels.
        guidance: bound of the weight by which rows with an RTC tail are drawn to it, in the same graph as all others;
            None where no row may have one.
        quantisation: how the expert's matrices are stored for small buckets; None keeps them bf16.
        unnormalise: what makes robot units of the actions at the end of each graph; None leaves them as they are.

    Attributes:
        unnormalises: whether `run` answers in robot units.
        single: a shorter way for a row that is alone; None where there is none.
    """

    def __init__(
        self,
        weights: PiWeights,
        architecture: PiArchitecture,
        horizon: int,
        buckets: Sequence[Bucket],
        precision: Literal["bf16", "fp8"] = "bf16",
        resize: Resize = "bilinear",
        guidance: float | None = None,
        quantisation: QuantisationOptions | None = None,
        unnormalise: Unnormaliser | None = None,
    ) -> None:
        a, device = architecture, weights.embedding.device
        self.architecture, self.horizon, self.device = a, horizon, device
        self.buckets = tuple(sorted(buckets))
        self.captured: dict[Bucket, Captured] = {}
        images = max(b.rows * b.views for b in buckets)
        rows = max(b.rows for b in buckets)
        slots = max(self.slots(b) for b in buckets)
        has_state = a.family == "pi0"
        self._suffix = horizon + int(has_state)
        cache = max(b.rows * (self.slots(b) + self._suffix) for b in buckets)
        self.camera = CameraBuffers(images, PINNED_FRAME_BYTES, a.image_size, a.patch_size, resize, device)
        chunk = (rows, horizon, a.action_width)
        self._staged = Staged(
            {
                "lengths": ((rows,), torch.int32),
                "tokens": ((max(b.rows * b.prompt for b in buckets),), torch.int64),
                "actions": (chunk, torch.float32),
                "source": ((rows * slots,), torch.int64),
                **({"state": ((rows, a.action_width), torch.float32)} if has_state else {}),
                **({} if guidance is None else {"target": (chunk, torch.float32)}),
                **({} if guidance is None else {"influence": (chunk[:2], torch.float32)}),
            },
            device,
        )
        staged = self._staged.tensors
        self._tokens, self._source, self._lengths = staged["tokens"], staged["source"], staged["lengths"]
        self._actions = staged["actions"]
        self._lengths.fill_(1)
        self._unnormalise, self.unnormalises = unnormalise, unnormalise is not None
        self._answers = self._actions
        if unnormalise is not None:
            self._answers = torch.zeros(rows, horizon, unnormalise.width, dtype=unnormalise.dtype, device=device)
        self._state = staged.get("state")
        self._bound, self._times = guidance, weights.times.tolist()
        shape = (a.depth * cache + gpu.CACHE_MARGIN) * a.head_dim
        self._keys = torch.zeros(shape, dtype=weights.embedding.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self.towers = fp8.quantise(weights) if precision == "fp8" else None
        if self.towers is not None:
            weights = fp8.without_matrices(weights)
        self.fused = fused.fuse(weights, a, horizon, slots + self._suffix, quantisation, rows)
        self.weights = self.fused.packed
        self._cos, self._sin = ops.rope_table(torch.arange(slots + self._suffix, device=device), a.head_dim)
        self._pool = GraphPool(device)
        self.beside: Beside | None = Beside(device)
        self._images = torch.empty(0, device=device)
        self.single: SingleRows | None = None

    def slots(self, bucket: Bucket) -> int:
        """Prefix slots of a row, S."""
        return bucket.views * self.architecture.tokens_per_image + bucket.prompt

    def capture(self) -> None:
        """Capture every bucket, the largest first, so that the shared pool grows once."""
        self._clear()
        with _tf32():
            self._pool.compile(partial(self.compute, bucket) for bucket in self.buckets)
        for bucket in sorted(self.buckets, key=lambda b: b.rows * self.slots(b), reverse=True):
            self._capture(bucket)

    def shorten(self, rows: NativeRows) -> None:
        """Lets `single` launch the captured buckets of one row."""
        graphs = {bucket: captured.graph for bucket, captured in self.captured.items() if bucket.rows == 1}
        tokens = self.architecture.tokens_per_image
        self.single = SingleRows(rows, self._staged, self.camera, graphs, tokens, self._answers[:1])

    def _clear(self) -> None:
        # Indices that another bucket left may lie outside this one, and what none has filled outside everything.
        self._source.zero_()
        self._tokens.zero_()
        self._lengths.fill_(1)

    def _capture(self, bucket: Bucket) -> None:
        self._clear()
        with _tf32():
            self.captured[bucket] = self._pool.capture(
                lambda: self.compute(bucket), rows=bucket.rows, views=bucket.views, prompt=bucket.prompt
            )

    def compute(self, bucket: Bucket) -> None:
        """The whole request over the static buffers, noise in and actions out."""
        self.encode_images(bucket)
        if self.beside is not None and bucket.rows == 1:
            # A layer of the first step needs that layer's cache, not the whole prefix. More rows leave nothing idle.
            self.beside.run(partial(self.encode_prefix, bucket), partial(self.solve, bucket))
        else:
            self.encode_prefix(bucket)
            self.solve(bucket)
        if self._unnormalise is not None:
            self._answers[: bucket.rows].copy_(self._unnormalise(self._actions[: bucket.rows]))

    def encode_images(self, bucket: Bucket) -> None:
        """Vision tower and projector."""
        heads, vision = self.architecture.vision_heads, self.weights.vision
        patches = self.camera.patches(bucket.rows * bucket.views)
        if self.towers is None:
            self._images = fused.image_features(vision, patches, heads)
        else:
            self._images = fp8.image_features(self.towers, vision, patches, heads)

    def encode_prefix(self, bucket: Bucket, written: Stage | None = None) -> None:
        """Prefix of the images that `encode_images` left and of the prompt; `written` as `fused.prefix_pass` has it."""
        tokens = self._tokens[: bucket.rows * bucket.prompt].view(bucket.rows, bucket.prompt)
        slots = self.slots(bucket)
        source = self._source[: bucket.rows * slots].view(bucket.rows, slots)
        lengths, heads = self._lengths[: bucket.rows], self.architecture.heads
        rest = (self.weights, self._images, tokens, source, lengths, *self.caches(bucket), self._cos, self._sin, heads)
        if self.towers is None:
            fused.prefix_pass(*rest, written)
        else:
            fp8.prefix_pass(self.towers, *rest, written)

    def solve(self, bucket: Bucket, before: Stage | None = None) -> None:
        """All solver steps; `before` as `fused.solve` has it."""
        keys, values = self.caches(bucket)
        fused.solve(
            self.fused,
            self._actions[: bucket.rows],
            None if self._state is None else self._state[: bucket.rows],
            self._lengths[: bucket.rows],
            keys,
            values,
            self._cos,
            self._sin,
            self.architecture.heads,
            self._guidance(bucket),
            before,
        )

    def _guidance(self, bucket: Bucket) -> list[Guidance] | None:
        if self._bound is None:
            return None
        rows, staged = bucket.rows, self._staged.tensors
        return guidance_steps(staged["target"][:rows], staged["influence"][:rows], self._times, self._bound)

    def caches(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Keys and values as (depth, B, C, d)."""
        a = self.architecture
        shape = (a.depth, bucket.rows, self.slots(bucket) + self._suffix, a.head_dim)
        count = shape[0] * shape[1] * shape[2] * shape[3]
        return self._keys[:count].view(shape), self._values[:count].view(shape)

    def bucket_for(self, batch: PiBatch) -> Bucket:
        """The smallest captured bucket that holds the batch.

        Raises:
            ValueError: none does.
        """
        rows, prompt = batch.tokens.shape
        tokens = self.architecture.tokens_per_image
        slots = int(batch.lengths.numpy().max())
        for bucket in self.buckets:
            fits = bucket.rows >= rows and bucket.prompt >= prompt and self.slots(bucket) >= slots
            if fits and bucket.rows * bucket.views >= batch.pixels.shape[0] and bucket.views * tokens + prompt >= slots:
                return bucket
        raise ValueError(f"no bucket for {rows} rows of {slots} slots with {prompt} prompt tokens")

    def load(self, batch: PiBatch, bucket: Bucket, written: Letter | None = None) -> None:
        """Copy a batch into the buffers of `bucket`; `written` is what `write` gave for it."""
        if batch.raw is None:
            self.camera.load_pixels(batch.pixels)
        else:
            self.camera.load_frames(batch.raw)
        (self.write(batch, bucket) if written is None else written).send()

    def write(self, batch: PiBatch, bucket: Bucket) -> Letter:
        """All of a batch but its images, for the buffers of `bucket`; touches nothing that a batch needs that runs."""
        rows, prompt = batch.tokens.shape
        images, slots = batch.pixels.shape[0], self.slots(bucket)
        letter = self._staged.letter()
        arrays = letter.arrays
        for name, held in (("tokens", bucket.prompt), ("source", slots)):
            arrays[name][: bucket.rows * held] = 0
        for name in ("actions", "state", "target", "influence"):
            if name in arrays:
                arrays[name][: bucket.rows] = 0
        arrays["lengths"][: bucket.rows] = 1
        arrays["lengths"][:rows] = batch.lengths.numpy()
        tokens = arrays["tokens"][: bucket.rows * bucket.prompt].reshape(-1, bucket.prompt)
        tokens[:rows, :prompt] = batch.tokens.numpy()
        arrays["actions"][:rows] = batch.noise.numpy()
        # The batch numbers its sources for its own image and prompt counts; the bucket has more of both.
        text = images * self.architecture.tokens_per_image
        index = batch.source.numpy()[:, :slots]
        moved = index - text
        moved = moved // prompt * bucket.prompt + moved % prompt
        moved += bucket.rows * bucket.views * self.architecture.tokens_per_image
        source = arrays["source"][: bucket.rows * slots].reshape(-1, slots)
        source[:rows, : index.shape[1]] = np.where(index < text, index, moved)
        if batch.state is not None and "state" in arrays:
            arrays["state"][:rows] = batch.state.numpy()
        if batch.rtc is not None and "target" in arrays:
            arrays["target"][:rows] = batch.rtc.target.numpy()
            arrays["influence"][:rows] = batch.rtc.weights[..., 0].numpy()
        return letter

    def run(self, batch: PiBatch) -> Tensor:
        """Actions of each row on the CPU: fp32 (B, H, action width), or (B, H, D) where it `unnormalises`.

        Raises:
            ValueError: the batch fits no bucket.
        """
        return self.launch(batch).wait()

    def draft(self, batch: PiBatch) -> tuple[Bucket, Letter]:
        """What `launch` can be spared of a batch whose images are not there yet. Raises ValueError as `launch`."""
        bucket = self.bucket_for(batch)
        return bucket, self.write(batch, bucket)

    @torch.inference_mode()
    def launch(self, batch: PiBatch, draft: tuple[Bucket, Letter] | None = None) -> Running:
        """As `run`, without waiting: the GPU begins when it has ended what was launched before.

        Raises:
            ValueError: the batch fits no bucket.
        """
        bucket, written = (self.bucket_for(batch), None) if draft is None else draft
        self.load(batch, bucket, written)
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        self.captured[bucket].graph.replay()
        return Running(began, self._answers[: batch.tokens.shape[0]])


class _tf32:
    """Allow TF32 in fp32 products, as the official code does: here only the patch embedding is one."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before
