"""A π engine as what is measured: its phases, one call each, with the work that each must do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from taktline_protocol.deployment import QuantisationOptions

from taktline_worker.adapter import Phase
from taktline_worker.models.pi import byte_expert
from taktline_worker.models.pi.config import PiArchitecture
from taktline_worker.models.pi.runner import PiBatch, PiRow, PiRunner, collate
from taktline_worker.models.pi.work import PHASES, expert_byte_size, phase_work
from taktline_worker.profiling.work import Work

_WEIGHT_BYTES = {
    "fp32": dict.fromkeys(PHASES, 4.0),
    "bf16": dict.fromkeys(PHASES, 2.0),
    "fp8": {"vision": 1.0, "prefix": 1.0, "expert": 2.0},
}


class PiProfile:
    """Random observations on the device: pixels decoded, prompt tokenised, as the published measurements have it.

    Args:
        runner: eager, or of captured graphs.
        views: cameras a row.
        prompt_tokens: prompt tokens a row.
        precision: fp32, bf16 or fp8.
        quantisation: how the runner stores the expert's matrices for small batches.
    """

    def __init__(
        self,
        runner: Any,
        architecture: PiArchitecture,
        horizon: int,
        steps: int,
        views: int,
        prompt_tokens: int,
        precision: str,
        quantisation: QuantisationOptions | None = None,
    ) -> None:
        self._runner, self._architecture = runner, architecture
        self.policy: str = architecture.family
        self._sizes, self._quantisation = _WEIGHT_BYTES[precision], quantisation
        self.precision = byte_expert.label(precision, quantisation)
        self.device = str(runner.device)
        self.captured = not isinstance(runner, PiRunner)
        self.shape = {"views": views, "prompt_tokens": prompt_tokens, "horizon": horizon, "steps": steps}

    def work(self, batch: int) -> dict[str, Work]:
        """Operations and bytes of each phase."""
        sizes = dict(self._sizes)
        if self._quantisation is not None and batch <= self._quantisation.max_batch:
            sizes["expert"] = expert_byte_size(self._architecture)
        if self.precision == "bf16" and torch.device(self.device).type == "cpu":
            sizes["vision"] = 4.0
        return phase_work(
            self._architecture,
            batch=batch,
            views=self.shape["views"],
            prompt=self.shape["prompt_tokens"],
            horizon=self.shape["horizon"],
            steps=self.shape["steps"],
            weight_bytes=sizes,
            cache_bytes=4.0 if self.precision == "fp32" else 2.0,
        )

    def phases(self, batch: int) -> Sequence[Phase]:
        """Vision, prefix and expert in order; each leaves what the next one reads."""
        calls = self._captured_calls(batch) if self.captured else self._eager_calls(batch)
        work = self.work(batch)
        return [Phase(name, calls[name], work[name].flops, work[name].bytes) for name in PHASES]

    def whole(self, batch: int) -> Callable[[], object]:
        """One request of `batch` rows over data that lies on the device."""
        if not self.captured:
            calls = self._eager_calls(batch)
            return lambda: [calls[name]() for name in PHASES]
        rows = self._batch(batch)
        bucket = self._runner.bucket_for(rows)
        self._runner.load(rows, bucket)
        replay: Callable[[], object] = self._runner.captured[bucket].graph.replay
        return replay

    def _eager_calls(self, batch: int) -> dict[str, Callable[[], object]]:
        rows, runner = self._batch(batch).to(self._runner.device), self._runner
        images = runner.encode_images(rows)
        return {
            "vision": lambda: runner.encode_images(rows),
            "prefix": lambda: runner.encode_prefix(rows, images),
            "expert": lambda: runner.solve(rows),
        }

    def _captured_calls(self, batch: int) -> dict[str, Callable[[], object]]:
        rows, runner = self._batch(batch), self._runner
        bucket = runner.bucket_for(rows)
        runner.load(rows, bucket)
        with torch.inference_mode():
            runner.encode_images(bucket)
        images = runner._images

        def prefix() -> None:
            runner._images = images  # a graph of vision alone has left its own
            runner.encode_prefix(bucket)

        return {
            "vision": lambda: runner.encode_images(bucket),
            "prefix": prefix,
            "expert": lambda: runner.solve(bucket),
        }

    def _batch(self, batch: int) -> PiBatch:
        a, generator = self._architecture, torch.Generator().manual_seed(1)
        horizon = self.shape["horizon"]
        tokens = np.random.default_rng(1).integers(3, a.vocabulary, (batch, self.shape["prompt_tokens"]))
        rows = [
            PiRow(
                pixels=torch.rand(self.shape["views"], 3, a.image_size, a.image_size, generator=generator) * 2 - 1,
                tokens=tokens[index],
                noise=torch.randn(horizon, a.action_width, generator=generator),
                state=torch.randn(a.action_width, generator=generator) if a.family == "pi0" else None,
            )
            for index in range(batch)
        ]
        return collate(rows, a.tokens_per_image)
