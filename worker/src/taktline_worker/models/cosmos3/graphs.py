"""The GPU runner of Cosmos3: a CUDA graph a bucket with the whole denoising loop in it, and one that encodes frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from taktline_worker.graph_capture import Captured, GraphPool
from taktline_worker.models.cosmos3 import modules
from taktline_worker.models.cosmos3.buffers import Bucket, Buffers
from taktline_worker.models.cosmos3.config import Cosmos3Architecture
from taktline_worker.models.cosmos3.mesh import Mesh
from taktline_worker.models.cosmos3.request import RequestSettings
from taktline_worker.models.cosmos3.runner import Cosmos3Runner, Encoder, StepObserver
from taktline_worker.models.cosmos3.weights import Cosmos3Weights

logger = logging.getLogger(__name__)

TEXT_ROOM = (256, 512)
"""Text slots of a bucket; the published prompt has about 200 tokens."""


class TextRoom:
    """What a graph that encodes one text of up to `room` tokens reads and writes."""

    def __init__(self, room: int, runner: Cosmos3Runner) -> None:
        a, weights, device = runner.architecture, runner.weights, runner.device
        self.tokens = torch.zeros(room, dtype=torch.int64, device=device)
        cos, sin = modules.rope_table(a, modules.text_positions(room))
        self.cos, self.sin = cos.to(device), sin.to(device)
        shape = (a.layers, room, a.kv_heads // runner.mesh.place.shards, a.head_dim)
        self.keys = torch.zeros(shape, dtype=weights.dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def compute(self, runner: Cosmos3Runner) -> None:
        """Token ids in, keys and values of every layer out."""
        found = modules.encode_text(runner.weights, runner.architecture, self.tokens, self.cos, self.sin, runner.mesh)
        self.keys.copy_(found[0])
        self.values.copy_(found[1])


class GraphRunner(Cosmos3Runner):
    """As `Cosmos3Runner`, padding each batch to the smallest bucket that holds it and replaying that bucket's graph.

    A text is encoded by a graph of its own, once an instruction; what fills it up comes after it, where no token of it
    looks. A longer prompt or a larger batch than any bucket runs eagerly, and the log says so once for each shape.
    Without `capture`, as on a CPU, buckets are used in the same way and computed eagerly.

    Args:
        rows: batch sizes of the buckets.
        texts: text slots of the buckets.
        imagine: also make buckets that finish the video.
    """

    def __init__(
        self,
        weights: Cosmos3Weights,
        architecture: Cosmos3Architecture,
        settings: RequestSettings,
        encoder: Encoder | None = None,
        mesh: Mesh | None = None,
        *,
        rows: Sequence[int] = (1,),
        texts: Sequence[int] = TEXT_ROOM,
        imagine: bool = False,
    ) -> None:
        super().__init__(weights, architecture, settings, encoder, mesh)
        self.captured: dict[Bucket, Captured] = {}
        self.encoders: dict[int, Captured] = {}
        self.text_encoders: dict[int, tuple[TextRoom, Captured]] = {}
        self.buckets = tuple(
            Bucket(count, text, wanted)
            for count in sorted(set(rows))
            for text in sorted(set(texts))
            for wanted in ((False, True) if imagine else (False,))
        )
        self._fixed = {bucket: self.make_buffers(bucket) for bucket in self.buckets}
        self._frames: Tensor | None = None
        self._latents: dict[int, Tensor] = {}
        self._named: set[Bucket] = set()

    def capture(self) -> None:
        """Captures every bucket, texts and, where frames come in, the encoder for each batch size; the largest first.

        On a mesh every rank calls this, as the graphs hold the exchanges between them.
        """
        pool = GraphPool(self.device)
        pool.compile(partial(self.compute, self._fixed[bucket]) for bucket in self.buckets)
        for bucket in sorted(self.buckets, key=lambda b: b.rows * (self.tokens + b.text), reverse=True):
            buffers = self._fixed[bucket]
            self.captured[bucket] = pool.capture(
                lambda buffers=buffers: self.compute(buffers),  # type: ignore[misc]
                rows=bucket.rows,
                text=bucket.text,
            )
        for size in sorted({bucket.text for bucket in self.buckets}, reverse=True):
            room = TextRoom(size, self)
            graph = pool.capture(lambda room=room: room.compute(self), text=size)  # type: ignore[misc]
            self.text_encoders[size] = room, graph
        if self.encoder is None:
            return
        counts = sorted({bucket.rows for bucket in self.buckets}, reverse=True)
        shape = (counts[0], 3, self.settings.encoded_frames, *self.settings.padded)
        self._frames = torch.zeros(shape, device=self.device)
        for count in counts:
            self.encoders[count] = pool.capture(lambda count=count: self._encode(count), rows=count)  # type: ignore[misc]

    def encode(self, frames: Tensor) -> Tensor:
        """See `Cosmos3Runner`; padded rows hold whatever the last batch left."""
        count = next((count for count in sorted(self.encoders) if count >= len(frames)), None)
        if count is None or self._frames is None:
            return super().encode(frames)
        self._frames[: len(frames)].copy_(frames, non_blocking=True)
        self.encoders[count].graph.replay()
        return self._latents[count][: len(frames)]

    def encode_text(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `Cosmos3Runner`; through the smallest graph that holds the text."""
        size = next((size for size in sorted(self.text_encoders) if size >= len(tokens)), None)
        if size is None:
            return super().encode_text(tokens)
        room, captured = self.text_encoders[size]
        room.tokens.zero_()
        room.tokens[: len(tokens)].copy_(torch.tensor(tokens, dtype=torch.int64))
        captured.graph.replay()
        return room.keys[:, : len(tokens)].clone(), room.values[:, : len(tokens)].clone()

    def bucket_for(self, rows: int, text: int, imagine: bool) -> Bucket:
        """The smallest bucket that holds the batch; one of its own size, computed eagerly, where none does."""
        fitting = [b for b in self.buckets if b.rows >= rows and b.text >= text and b.imagine == imagine]
        if fitting:
            return min(fitting)
        own = super().bucket_for(rows, text, imagine)
        if own not in self._named:
            self._named.add(own)
            logger.warning(
                "a batch has no captured graph and runs several times slower",
                extra={"rows": rows, "tokens": text, "imagine": imagine, "captured": str(self.buckets)},
            )
        return own

    def buffers(self, bucket: Bucket) -> Buffers:
        """The bucket's buffers; those of graphs stay where they are."""
        return self._fixed[bucket] if bucket in self._fixed else super().buffers(bucket)

    def compute(self, buffers: Buffers, observer: StepObserver | None = None) -> None:
        """Replays the bucket's graph; eagerly where there is none, or somebody looks on."""
        captured = self.captured.get(buffers.bucket) if observer is None else None
        if captured is not None:
            captured.graph.replay()
        else:
            super().compute(buffers, observer)

    def _encode(self, count: int) -> None:
        assert self._frames is not None
        assert self.encoder is not None
        latents = self.encoder(self._frames[:count]).float()
        if count not in self._latents:  # outside the pool, at the first warm-up run
            self._latents[count] = torch.empty_like(latents)
        self._latents[count].copy_(latents)
