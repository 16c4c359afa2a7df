"""The GPU runner of MiniCPM-Robot: a CUDA graph a bucket with the whole request in it, from patches to actions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from taktline_worker.bucket_graphs import BucketGraphs
from taktline_worker.models.minicpm_robot.batch import MiniCpmBatch, MiniCpmRow, lay_out
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner


class MiniCpmGraphs(BucketGraphs[MiniCpmRow, MiniCpmBatch]):
    """Graphs for the policy's number of images and for its embodiment; see `BucketGraphs`."""

    def __init__(self, eager: MiniCpmRunner, template: MiniCpmRow, buckets: Sequence[int]) -> None:
        self.eager = eager
        head, images = eager.architecture.head, len(template.patches) * eager.architecture.vision.image_tokens
        super().__init__(eager, template, buckets, images, (head.horizon, head.action_width))

    def lay_out(self, rows: Sequence[MiniCpmRow], slots: int, device: torch.device) -> MiniCpmBatch:
        """See `BucketGraphs.lay_out`."""
        return lay_out(rows, self.eager.image_token, device, slots)

    def layout(self, row: MiniCpmRow) -> tuple[int, int]:
        """How many images, and its embodiment."""
        return len(row.patches), row.embodiment

    def length(self, row: MiniCpmRow) -> int:
        """Tokens."""
        return len(row.tokens)
