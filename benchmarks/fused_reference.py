"""The computation that the GPU's graphs capture, over reference operations: bf16 and FP8 policies without a GPU.

Slow, and exact about what is rounded where; not a way to serve.
"""

from __future__ import annotations

from typing import Literal
from unittest.mock import patch

import torch
from taktline_kernels import gpu_reference, ops
from taktline_protocol.deployment import QuantisationOptions
from taktline_worker.models.pi import fp8, fused
from taktline_worker.models.pi.config import PiArchitecture
from taktline_worker.models.pi.rtc import guidance_steps
from taktline_worker.models.pi.runner import PiBatch
from taktline_worker.models.pi.weights import PiWeights


class FusedReference:
    """A runner like `PiRunner` and `GraphRunner`.

    Args:
        weights: packed, on the CPU; for bf16 and fp8 with `BF16_VISION`.
        architecture: dimensions.
        precision: `fp8` quantises the products of vision tower and prefix.
        quantisation: how the expert's matrices are stored for small batches.
    """

    def __init__(
        self,
        weights: PiWeights,
        architecture: PiArchitecture,
        precision: Literal["fp32", "bf16", "fp8"],
        quantisation: QuantisationOptions | None = None,
    ) -> None:
        self.device = weights.embedding.device
        self._architecture, self._dtype = architecture, weights.embedding.dtype
        with patch.object(fused, "gpu", gpu_reference), patch.object(fp8, "gpu", gpu_reference):
            self._towers = fp8.quantise(weights) if precision == "fp8" else None
            # The two numbers say which kernels a GPU would use; there is none.
            rest = fp8.without_matrices(weights) if self._towers else weights
            self._weights = fused.fuse(rest, architecture, 0, 0, quantisation)

    @torch.inference_mode()
    def run(self, batch: PiBatch) -> torch.Tensor:
        """fp32 (B, H, action width), normalised units."""
        a, (rows, slots), horizon = self._architecture, batch.source.shape, batch.noise.shape[1]
        room = slots + horizon + int(batch.state is not None)
        keys, values = (torch.zeros(a.depth, rows, room, a.head_dim, dtype=self._dtype) for _ in "kv")
        cos, sin = ops.rope_table(torch.arange(room), a.head_dim)
        side = a.image_size // a.patch_size
        grid = batch.pixels.view(-1, 3, side, a.patch_size, side, a.patch_size)
        patches = grid.permute(0, 2, 4, 1, 3, 5).reshape(-1, side * side, 3 * a.patch_size**2)
        rest = (batch.tokens, batch.source, batch.lengths, keys, values, cos, sin, a.heads)
        packed, actions = self._weights.packed, batch.noise.clone()
        with patch.object(fused, "gpu", gpu_reference), patch.object(fp8, "gpu", gpu_reference):
            if self._towers is None:
                images = fused.image_features(packed.vision, patches, a.vision_heads)
                fused.prefix_pass(packed, images, *rest)
            else:
                images = fp8.image_features(self._towers, packed.vision, patches, a.vision_heads)
                fp8.prefix_pass(self._towers, packed, images, *rest)
            guidance = None
            if batch.rtc is not None:
                influence, bound = batch.rtc.weights[..., 0], batch.rtc.settings.max_guidance_weight
                guidance = guidance_steps(batch.rtc.target, influence, packed.times.tolist(), bound)
            fused.solve(self._weights, actions, batch.state, batch.lengths, keys, values, cos, sin, a.heads, guidance)
        return actions
