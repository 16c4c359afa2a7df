"""The GPU runner of GR00T: a CUDA graph a bucket with the whole request in it, from patches to actions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from taktline_worker.graph_capture import Captured, GraphPool
from taktline_worker.models.groot.batch import Grid, GrootBatch, GrootRow, lay_out
from taktline_worker.models.groot.runner import GrootRunner

logger = logging.getLogger(__name__)

TEXT_ROOM = (32, 64, 128)
"""Slots of a bucket beside its image tokens, for the chat's frame and the instruction."""
MAX_LAYOUTS_NAMED = 8


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one graph: requests in a batch, and slots a row, S."""

    rows: int
    slots: int


class GrootGraphs:
    """Replays one graph a batch, and allocates nothing on the device after `capture`.

    A batch is padded to the smallest bucket that holds it, by copies of its first row. Graphs hold the images of one
    layout, the template's: frames of other proportions, longer instructions and other embodiments run eagerly, which
    takes several times as long and is said in the log.

    Args:
        eager: what is captured.
        template: a row with the usual images.
        buckets: batch sizes.
    """

    def __init__(self, eager: GrootRunner, template: GrootRow, buckets: Sequence[int]) -> None:
        self.eager, self.device = eager, eager.device
        self.captured: dict[Bucket, Captured] = {}
        self._template = template
        merge = eager.architecture.vision.merge
        images = sum(height * width // merge**2 for height, width in template.grids)
        self.buckets = tuple(Bucket(rows, images + room) for rows in sorted(set(buckets)) for room in TEXT_ROOM)
        self._batches: dict[Bucket, GrootBatch] = {}
        for bucket in self.buckets:
            self._batches[bucket] = self._laid_out([template], bucket).to(self.device)
        head = eager.architecture.head
        self._actions = torch.zeros(self.buckets[-1].rows, head.horizon, head.action_width, device=self.device)
        self._named: set[tuple[Grid, ...]] = set()

    def capture(self) -> None:
        """Captures every bucket, the largest first."""
        pool = GraphPool(self.device)
        for bucket in sorted(self.buckets, key=lambda b: b.rows * b.slots, reverse=True):
            self.captured[bucket] = pool.capture(
                lambda bucket=bucket: self.compute(bucket),  # type: ignore[misc]
                rows=bucket.rows,
                slots=bucket.slots,
            )

    def compute(self, bucket: Bucket) -> None:
        """The request that lies in the buffers of `bucket`, eagerly."""
        self._actions[: bucket.rows].copy_(self.eager.compute(self._batches[bucket]))

    def bucket_for(self, rows: Sequence[GrootRow]) -> Bucket | None:
        """The smallest bucket that holds the rows; None where none does."""
        template = self._template
        if any(row.grids != template.grids or row.embodiment != template.embodiment for row in rows):
            return None
        slots = max(len(row.tokens) for row in rows)
        return next((b for b in self.buckets if b.rows >= len(rows) and b.slots >= slots), None)

    @torch.inference_mode()
    def run(self, rows: Sequence[GrootRow]) -> Tensor:
        """fp32 (B, H, action width) on the CPU, normalised units."""
        bucket = self.bucket_for(rows)
        if bucket is None:
            self._name(rows)
            return self.eager.run(rows)
        self._load(rows, bucket)()
        return self._actions[: len(rows)].cpu()

    def loaded(self, rows: Sequence[GrootRow]) -> Callable[[], None]:
        """Lays the rows into their bucket's buffers; what runs them there, again and again.

        Raises:
            ValueError: no bucket holds them.
        """
        bucket = self.bucket_for(rows)
        if bucket is None:
            raise ValueError(f"no bucket holds {len(rows)} rows like these")
        return self._load(rows, bucket)

    def _load(self, rows: Sequence[GrootRow], bucket: Bucket) -> Callable[[], None]:
        buffers, given = self._batches[bucket].tensors(), self._laid_out(rows, bucket).tensors()
        for buffer, tensor in zip(buffers, given, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        captured = self.captured.get(bucket)
        return partial(self.compute, bucket) if captured is None else captured.graph.replay

    def _laid_out(self, rows: Sequence[GrootRow], bucket: Bucket) -> GrootBatch:
        padding = [rows[0]] * (bucket.rows - len(rows))
        return lay_out([*rows, *padding], self.eager.architecture, bucket.slots)

    def _name(self, rows: Sequence[GrootRow]) -> None:
        """One log line for each layout that has no graph, up to a few."""
        for row in rows:
            if row.grids not in self._named and len(self._named) < MAX_LAYOUTS_NAMED:
                self._named.add(row.grids)
                logger.warning(
                    "a request has no captured graph and runs several times slower",
                    extra={
                        "grids": str(row.grids),
                        "captured_grids": str(self._template.grids),
                        "tokens": len(row.tokens),
                        "captured_tokens": self.buckets[-1].slots,
                        "rows": len(rows),
                    },
                )
