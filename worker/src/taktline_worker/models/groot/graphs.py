"""The GPU runner of GR00T: for each bucket the whole request, from patches to actions, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from taktline_worker.bucket_graphs import BucketGraphs
from taktline_worker.models.groot.batch import Grid, GrootBatch, GrootRow, lay_out
from taktline_worker.models.groot.runner import GrootRunner


class GrootGraphs(BucketGraphs[GrootRow, GrootBatch]):
    """Graphs for images of the template's grids and for its embodiment; see `BucketGraphs`."""

    def __init__(self, eager: GrootRunner, template: GrootRow, buckets: Sequence[int]) -> None:
        self.eager = eager
        head, merge = eager.architecture.head, eager.architecture.vision.merge
        images = sum(height * width // merge**2 for height, width in template.grids)
        super().__init__(eager, template, buckets, images, (head.horizon, head.action_width))

    def lay_out(self, rows: Sequence[GrootRow], slots: int, device: torch.device) -> GrootBatch:
        """See `BucketGraphs.lay_out`."""
        return lay_out(rows, self.eager.architecture, slots).to(device, self.eager.weights.dtype)

    def layout(self, row: GrootRow) -> tuple[tuple[Grid, ...], int]:
        """The grids of its images, and its embodiment."""
        return row.grids, row.embodiment

    def length(self, row: GrootRow) -> int:
        """Tokens."""
        return len(row.tokens)
