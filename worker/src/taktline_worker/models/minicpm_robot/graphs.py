"""The GPU runner of MiniCPM-Robot: a CUDA graph a bucket with the whole request in it, from patches to actions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from taktline_worker.graph_capture import Captured, GraphPool
from taktline_worker.models.minicpm_robot.batch import MiniCpmBatch, MiniCpmRow, lay_out
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner

logger = logging.getLogger(__name__)

TEXT_ROOM = (32, 64, 128)
"""Slots of a bucket beside its image tokens: the template, the image symbols and the instruction."""


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one graph: requests in a batch, and slots a row, S."""

    rows: int
    slots: int


class MiniCpmGraphs:
    """Replays one graph a batch, and allocates nothing on the device after `capture`.

    A batch is padded to the smallest bucket that holds it, by copies of its first row. Every row has the policy's
    images and embodiment; longer instructions and larger batches run eagerly, which takes several times as long and is
    said in the log once for each number of tokens.

    Args:
        eager: what is captured.
        template: a row with the policy's images.
        buckets: batch sizes.
    """

    def __init__(self, eager: MiniCpmRunner, template: MiniCpmRow, buckets: Sequence[int]) -> None:
        self.eager, self.device = eager, eager.device
        self.captured: dict[Bucket, Captured] = {}
        self._template = template
        images = len(template.patches) * eager.architecture.vision.image_tokens
        self.buckets = tuple(Bucket(rows, images + room) for rows in sorted(set(buckets)) for room in TEXT_ROOM)
        self._batches = {bucket: self._laid_out([template], bucket) for bucket in self.buckets}
        head = eager.architecture.head
        self._actions = torch.zeros(self.buckets[-1].rows, head.horizon, head.action_width, device=self.device)
        self._named: set[int] = set()

    def capture(self) -> None:
        """Captures every bucket, the largest first."""
        pool = GraphPool(self.device)
        # The rotation's tables grow with the longest sequence: before any graph reads them.
        self.compute(self.buckets[-1])
        for bucket in sorted(self.buckets, key=lambda b: b.rows * b.slots, reverse=True):
            self.captured[bucket] = pool.capture(
                lambda bucket=bucket: self.compute(bucket),  # type: ignore[misc]
                rows=bucket.rows,
                slots=bucket.slots,
            )

    def compute(self, bucket: Bucket) -> None:
        """The request that lies in the buffers of `bucket`, eagerly."""
        self._actions[: bucket.rows].copy_(self.eager.compute(self._batches[bucket]))

    def bucket_for(self, rows: Sequence[MiniCpmRow]) -> Bucket | None:
        """The smallest bucket that holds the rows; None where none does."""
        template = self._template
        if any(len(r.patches) != len(template.patches) or r.embodiment != template.embodiment for r in rows):
            return None
        slots = max(len(row.tokens) for row in rows)
        return next((b for b in self.buckets if b.rows >= len(rows) and b.slots >= slots), None)

    @torch.inference_mode()
    def run(self, rows: Sequence[MiniCpmRow]) -> Tensor:
        """fp32 (B, H, action width) on the CPU."""
        bucket = self.bucket_for(rows)
        if bucket is None:
            self._name(rows)
            return self.eager.run(rows)
        self._load(rows, bucket)()
        return self._actions[: len(rows)].cpu()

    def loaded(self, rows: Sequence[MiniCpmRow]) -> Callable[[], None]:
        """Lays the rows into their bucket's buffers; what runs them there, again and again.

        Raises:
            ValueError: no bucket holds them.
        """
        bucket = self.bucket_for(rows)
        if bucket is None:
            raise ValueError(f"no bucket holds {len(rows)} rows like these")
        return self._load(rows, bucket)

    def _load(self, rows: Sequence[MiniCpmRow], bucket: Bucket) -> Callable[[], None]:
        buffers = self._batches[bucket].tensors()
        for buffer, tensor in zip(buffers, self._laid_out(rows, bucket).tensors(), strict=True):
            buffer.copy_(tensor)
        captured = self.captured.get(bucket)
        return partial(self.compute, bucket) if captured is None else captured.graph.replay

    def _laid_out(self, rows: Sequence[MiniCpmRow], bucket: Bucket) -> MiniCpmBatch:
        padding = [rows[0]] * (bucket.rows - len(rows))
        return lay_out([*rows, *padding], self.eager.image_token, self.device, bucket.slots)

    def _name(self, rows: Sequence[MiniCpmRow]) -> None:
        tokens = max(len(row.tokens) for row in rows)
        if tokens not in self._named and len(self._named) < 8:
            self._named.add(tokens)
            logger.warning(
                "a request has no captured graph and runs several times slower",
                extra={"tokens": tokens, "captured_tokens": self.buckets[-1].slots, "rows": len(rows)},
            )
