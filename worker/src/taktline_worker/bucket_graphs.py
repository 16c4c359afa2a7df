"""Whole requests as CUDA graphs: one for each batch size and prompt length, and eagerly whatever fits none."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from taktline_worker.graph_capture import Captured, GraphPool

logger = logging.getLogger(__name__)

TEXT_ROOM = (32, 64, 128)
"""Slots of a bucket beside its image tokens, for the chat's frame and the instruction."""
MAX_NAMED = 8


class Laid(Protocol):
    """Rows as the tensors that the network reads."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in a fixed order; their shapes follow from rows, slots and the rows' layout."""


RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT", bound=Laid)


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one graph: requests in a batch, and slots a row, S."""

    rows: int
    slots: int


class BucketGraphs(ABC, Generic[RowT, BatchT]):
    """Replays one graph a batch, and allocates nothing on the device after `capture`.

    One call at a time, as the engine's turn sees to: buffers are shared, and a request's graphs launched one by one.

    A batch is padded to the smallest bucket that holds it, by copies of its first row. Graphs are for one layout, the
    template's; rows of another, longer prompts and larger batches run eagerly, which takes several times as long and is
    said in the log once for each.

    Args:
        eager: what is captured: `compute(batch)` of tensors on the device, `run(rows)` of rows.
        template: a row with the policy's usual images.
        buckets: batch sizes.
        image_tokens: of the template.
        actions: horizon and width of a row's answer.
    """

    def __init__(
        self, eager: Any, template: RowT, buckets: Sequence[int], image_tokens: int, actions: tuple[int, int]
    ) -> None:
        self.device: torch.device = eager.device
        self.captured: dict[Bucket, Captured] = {}
        self._eager, self._template = eager, template
        # Symbols around many images can fill the smallest room; what is left holds the policy's usual row.
        slots = [image_tokens + room for room in TEXT_ROOM if image_tokens + room >= self.length(template)]
        slots = slots or [-(-self.length(template) // TEXT_ROOM[0]) * TEXT_ROOM[0]]
        self.buckets = tuple(Bucket(rows, each) for rows in sorted(set(buckets)) for each in slots)
        self._batches = {bucket: self._laid_out([template], bucket, self.device) for bucket in self.buckets}
        self._actions = torch.zeros(self.buckets[-1].rows, *actions, device=self.device)
        self._named: set[tuple[str, Hashable]] = set()

    @abstractmethod
    def lay_out(self, rows: Sequence[RowT], slots: int, device: torch.device) -> BatchT:
        """The rows in so many slots each, on `device`, in the dtypes that the network reads."""

    @abstractmethod
    def layout(self, row: RowT) -> Hashable:
        """What must be the same in all rows of a graph."""

    @abstractmethod
    def length(self, row: RowT) -> int:
        """Slots that a row needs."""

    def capture(self) -> None:
        """Captures every bucket, the largest first."""
        pool = GraphPool(self.device)
        pool.compile(partial(self.compute, bucket) for bucket in self.buckets)
        # What the eager code keeps by length or layout must have its last place before a graph reads it.
        self.compute(self.buckets[-1])
        for bucket in sorted(self.buckets, key=lambda b: b.rows * b.slots, reverse=True):
            compute = partial(self.compute, bucket)
            self.captured[bucket] = pool.capture(compute, rows=bucket.rows, slots=bucket.slots)

    def compute(self, bucket: Bucket) -> None:
        """The request that lies in the buffers of `bucket`, eagerly."""
        self._actions[: bucket.rows].copy_(self._eager.compute(self._batches[bucket]))

    def bucket_for(self, rows: Sequence[RowT]) -> Bucket | None:
        """The smallest bucket that holds the rows; None where none does."""
        layout = self.layout(self._template)
        if any(self.layout(row) != layout for row in rows):
            return None
        slots = max(self.length(row) for row in rows)
        return next((b for b in self.buckets if b.rows >= len(rows) and b.slots >= slots), None)

    @torch.inference_mode()
    def run(self, rows: Sequence[RowT]) -> Tensor:
        """fp32 (B, H, action width) on the CPU."""
        bucket = self.bucket_for(rows)
        if bucket is None:
            self._name(rows)
            actions: Tensor = self._eager.run(rows)
            return actions
        self._load(rows, bucket)()
        return self._actions[: len(rows)].cpu()

    def loaded(self, rows: Sequence[RowT]) -> Callable[[], None]:
        """Lays the rows into their bucket's buffers; what runs them there, again and again.

        Raises:
            ValueError: no bucket holds them.
        """
        bucket = self.bucket_for(rows)
        if bucket is None:
            raise ValueError(f"no bucket holds {len(rows)} rows like these")
        return self._load(rows, bucket)

    def _load(self, rows: Sequence[RowT], bucket: Bucket) -> Callable[[], None]:
        given = self._laid_out(rows, bucket, torch.device("cpu"))
        for buffer, tensor in zip(self._batches[bucket].tensors(), given.tensors(), strict=True):
            buffer.copy_(tensor)
        captured = self.captured.get(bucket)
        return partial(self.compute, bucket) if captured is None else captured.graph.replay

    def _laid_out(self, rows: Sequence[RowT], bucket: Bucket, device: torch.device) -> BatchT:
        return self.lay_out([*rows, *[rows[0]] * (bucket.rows - len(rows))], bucket.slots, device)

    def _name(self, rows: Sequence[RowT]) -> None:
        """One log line for each reason why a request has no graph, up to a few."""
        own, largest = self.layout(self._template), self.buckets[-1]
        found: list[tuple[str, Hashable, Hashable]] = [
            ("layout", str(self.layout(row)), str(own)) for row in rows if self.layout(row) != own
        ]
        tokens = max(self.length(row) for row in rows)
        if tokens > largest.slots:
            found.append(("tokens", tokens, largest.slots))
        if len(rows) > largest.rows:
            found.append(("rows", len(rows), largest.rows))
        for what, given, captured in found:
            if (what, given) not in self._named and len(self._named) < MAX_NAMED:
                self._named.add((what, given))
                logger.warning(
                    "a request has no captured graph and runs several times slower",
                    extra={"reason": what, "given": given, "captured": captured},
                )
