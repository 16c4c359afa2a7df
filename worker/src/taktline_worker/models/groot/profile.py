"""GR00T as what is measured: its phases, one call each, with the work that each must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from taktline_worker.adapter import Phase
from taktline_worker.models.groot.batch import GrootBatch, GrootRow, lay_out
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.work import PHASES, phase_work

_WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 2.0}
_BLOCK_BYTES = {"fp8": 1.0}
"""Of vision blocks and text layers, where those are others."""


class GrootProfile:
    """Observations on the device, frames cut into patches and the prompt tokenised.

    Args:
        runner: eager, or of captured graphs.
        row: what every row of a batch is like.
    """

    policy = "gr00t-n1.7"

    def __init__(self, runner: GrootRunner | GrootGraphs, row: GrootRow, precision: str) -> None:
        self._runner, self._row = runner, row
        self._eager = runner.eager if isinstance(runner, GrootGraphs) else runner
        self.precision = precision
        self.device = str(runner.device)
        self.captured = isinstance(runner, GrootGraphs) and bool(runner.captured)
        a = self._eager.architecture
        images = sum(rows * columns for rows, columns in row.grids) // a.vision.merge**2
        self._text = len(row.tokens) - images
        self.shape = {
            "images": len(row.grids),
            "tokens": len(row.tokens),
            "horizon": a.head.horizon,
            "steps": a.head.solver_steps,
        }

    def phases(self, batch: int) -> Sequence[Phase]:
        """Vision, text and head in order; each leaves what the next one reads."""
        eager, given = self._eager, self._batch(batch)
        images, deep = eager.encode_images(given)
        refined = eager.encode_text(given, images, deep).refined
        calls: dict[str, Callable[[], object]] = {
            "vision": lambda: eager.encode_images(given),
            "text": lambda: eager.encode_text(given, images, deep),
            "head": lambda: eager.solve(given, refined),
        }
        work = phase_work(
            eager.architecture,
            batch=batch,
            grids=self._row.grids,
            text=self._text,
            weight_bytes=_WEIGHT_BYTES[self.precision],
            block_bytes=_BLOCK_BYTES.get(self.precision),
        )
        return [Phase(name, calls[name], work[name].flops, work[name].bytes) for name in PHASES]

    def whole(self, batch: int) -> Callable[[], object]:
        """One request of `batch` rows over data that lies on the device."""
        if self.captured and isinstance(self._runner, GrootGraphs):
            return self._runner.loaded(self._rows(batch))
        given = self._batch(batch)
        return lambda: self._eager.compute(given)

    def _rows(self, batch: int) -> list[GrootRow]:
        row, generator = self._row, torch.Generator().manual_seed(1)
        return [
            replace(
                row,
                patches=tuple(torch.rand(one.shape, generator=generator) * 2 - 1 for one in row.patches),
                noise=torch.randn(row.noise.shape, generator=generator),
                state=torch.rand(row.state.shape, generator=generator) * 2 - 1,
            )
            for _ in range(batch)
        ]

    def _batch(self, batch: int) -> GrootBatch:
        rows = self._rows(batch)
        # As a graph has it, so that phases add up to the whole.
        bucket = self._runner.bucket_for(rows) if isinstance(self._runner, GrootGraphs) else None
        slots = 0 if bucket is None else bucket.slots
        return lay_out(rows, self._eager.architecture, slots).to(self._eager.device, self._eager.weights.dtype)
