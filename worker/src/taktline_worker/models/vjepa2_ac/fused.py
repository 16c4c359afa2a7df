"""The predictor as fused operations over static buffers: one unit of candidates from actions to energies.

Same computation as `modules.predictor_frame`, laid out for a GPU: rows of a frame lie patches first (`ops.frames`),
keys and values stay where the projection wrote them (a frame's q | k | v of a layer is its cache), biases ride on the
pass that reads a product anyway, and the residual stream is summed in fp32 by the norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from taktline_kernels.ops import frames as ops
from torch import Tensor

from taktline_worker.models.vjepa2_ac import modules, poses, rope
from taktline_worker.models.vjepa2_ac.config import BLOCK_NORM_EPS, LATENT_NORM_EPS, VJepa2Architecture
from taktline_worker.models.vjepa2_ac.weights import Block, PredictorWeights

MAX_FRAMES = 8
"""Longest rollout: the attention kernel keeps the conditioning tokens of all frames in one tile of sixteen."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One projection's weight, as stored or quantised.

    Attributes:
        weight: (n, k) bf16 or fp32, or e4m3.
        scales: (1, n) fp32 of an e4m3 weight, one an output channel; None otherwise.
    """

    weight: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor, quantised: bool) -> Matrix:
        """The matrix of `weight` (n, k)."""
        if not quantised:
            return cls(weight)
        values, scales = ops.quantise_rows(weight)
        return cls(values, scales.t().contiguous())

    @property
    def input_dtype(self) -> torch.dtype:
        """What its input must be."""
        return self.weight.dtype

    def times(self, x: Tensor, scales: Tensor | None, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x @ weight.T (rows, n): bf16 for quantised operands, else their dtype.

        Args:
            x: (rows, k) in `input_dtype`.
            scales: (rows, 1) of a quantised x.
            bias: (n,) added before rounding; not for quantised operands, whose next pass adds it.
            out: written and returned if given.
        """
        if self.scales is None or scales is None:
            if bias is None:
                return torch.mm(x, self.weight.t(), out=out)
            return torch.addmm(bias, x, self.weight.t(), out=out)
        assert bias is None
        if x.device.type == "cuda":
            return torch._scaled_mm(
                x, self.weight.t(), scales, self.scales, out_dtype=torch.bfloat16, use_fast_accum=True, out=out
            )
        product = ((x.float() * scales) @ (self.weight.float() * self.scales.t()).t()).bfloat16()
        return product if out is None else out.copy_(product)


@dataclass(frozen=True, slots=True)
class _Layer:
    block: Block
    qkv: Matrix
    out: Matrix
    fc1: Matrix
    fc2: Matrix

    def hidden(self, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """gelu(fc1 x) (rows, F), ready for fc2; in the product's epilogue where there is one."""
        if x.dtype == torch.bfloat16 and x.device.type == "cuda":
            from taktline_kernels import gpu  # needs Triton

            return gpu.linear_gelu(x, self.fc1.weight, self.block.fc1_bias), None
        return ops.frame_gelu(self.fc1.times(x, scales), self.block.fc1_bias, self.fc2.input_dtype)


class FusedPredictor:
    """Scores one unit; owns the caches of all layers and frames. One call at a time.

    Args:
        candidates: m of a unit.
        max_horizon: longest rollout, at most `MAX_FRAMES`.
        quantised: e4m3 weights (a scale an output channel) and activations (a scale a row) in the three wide
            projections of each block; the attention's own output projection stays as it is.
    """

    def __init__(
        self,
        weights: PredictorWeights,
        architecture: VJepa2Architecture,
        candidates: int,
        max_horizon: int,
        quantised: bool,
    ) -> None:
        a = self.architecture = architecture
        self._weights = weights
        self._candidates = m = candidates
        self._patch_rows = m * a.tokens
        rows = m * a.frame_tokens
        device, dtype = weights.out_weight.device, weights.out_weight.dtype
        self._layers = tuple(
            _Layer(
                block,
                Matrix.of(block.qkv_weight, quantised),
                Matrix.of(block.out_weight, False),
                Matrix.of(block.fc1_weight, quantised),
                Matrix.of(block.fc2_weight, quantised),
            )
            for block in weights.blocks
        )
        self._frames = torch.zeros(a.depth, max_horizon, rows, 3 * a.width, device=device, dtype=dtype)
        self._stream = torch.zeros(rows, a.width, device=device, dtype=torch.float32)
        self._tables = []
        order = torch.arange(a.frame_tokens).roll(-modules.CONDITIONING)
        for frame in range(max_horizon):
            cos, sin = rope.tables(rope.frame_positions(a.grid, frame, modules.CONDITIONING), a.head_dim)
            self._tables.append((cos[order, 0].contiguous().to(device), sin[order, 0].contiguous().to(device)))

    def energies(self, actions: Tensor, patches: Tensor, goal: Tensor, pose: Tensor) -> Tensor:
        """Energies (m,) fp32 of one unit.

        Args:
            actions: (m, horizon, 7) fp32.
            patches: (T, W) fp32, the present, embedded.
            goal: (T, D) fp32.
            pose: (7,) fp32 before the first action.
        """
        w, m = self._weights, self._candidates
        stream, patch_stream = self._stream, self._stream[: self._patch_rows]
        conditioning = self._stream[self._patch_rows :].view(m, modules.CONDITIONING, -1)
        patch_stream.view(m, *patches.shape).copy_(patches)
        pose = pose.expand(m, -1)
        horizon = actions.shape[1]
        for step in range(horizon):
            action = actions[:, step]
            conditioning[:, 0] = torch.nn.functional.linear(action, w.action_weight, w.action_bias)
            conditioning[:, 1] = torch.nn.functional.linear(pose, w.state_weight, w.state_bias)
            update, offset = self._blocks(stream, step)
            normed, _ = ops.frame_norm(
                patch_stream,
                update[: self._patch_rows],
                offset,
                w.norm_weight,
                w.norm_bias,
                BLOCK_NORM_EPS,
                w.out_weight.dtype,
            )
            latents = modules.wide_product(normed, w.out_weight)
            if step + 1 < horizon:
                rounded, _ = ops.frame_norm(
                    latents, None, w.out_bias.float(), None, None, LATENT_NORM_EPS, w.embed_weight.dtype
                )
                torch.add(modules.wide_product(rounded, w.embed_weight), w.embed_bias.float(), out=patch_stream)
                pose = poses.integrate(pose, action)
        return ops.frame_energy(latents, w.out_bias.float(), goal, m, LATENT_NORM_EPS)

    def _blocks(self, stream: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """All blocks on the frame in `stream`; the last sub-layer's output and bias are still to be added."""
        m, heads = self._candidates, self.architecture.heads
        cos, sin = self._tables[step]
        update: Tensor | None = None
        offset: Tensor | None = None
        for index, layer in enumerate(self._layers):
            block = layer.block
            x, scales = ops.frame_norm(
                stream, update, offset, block.norm1_weight, block.norm1_bias, BLOCK_NORM_EPS, layer.qkv.input_dtype
            )
            frames = self._frames[index, : step + 1]
            # A quantised product has no bias: the rotation adds it.
            late = None if scales is None else block.qkv_bias
            layer.qkv.times(x, scales, bias=block.qkv_bias if late is None else None, out=frames[step])
            ops.frame_rotate(frames[step], late, cos, sin, m)
            attended = layer.out.times(ops.frame_attention(frames, m, heads), None)
            x, scales = ops.frame_norm(
                stream,
                attended,
                block.out_bias.float(),
                block.norm2_weight,
                block.norm2_bias,
                BLOCK_NORM_EPS,
                layer.fc1.input_dtype,
            )
            hidden, scales = layer.hidden(x, scales)
            update, offset = layer.fc2.times(hidden, scales), block.fc2_bias.float()
        assert update is not None
        assert offset is not None
        return update, offset
