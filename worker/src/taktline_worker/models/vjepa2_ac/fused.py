"""The predictor as fused operations over static buffers: one unit of candidates from actions to energies.

Same computation as `modules.predictor_frame`, laid out for a GPU: rows of a frame lie patches first (`ops.frames`),
keys and values stay where the projection wrote them (a frame's q | k | v of a layer is its cache), biases ride on the
pass that reads a product anyway, and the residual stream is summed in fp32 by the norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from taktline_kernels.ops import frame_products as products
from taktline_kernels.ops import frames as ops
from taktline_kernels.ops.frame_products import Rows, Weights
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
    def of(cls, weight: Tensor, quantised: bool, unit: float = 1.0) -> Matrix:
        """The matrix of `weight` (n, k) times `unit`, which a matrix that is not quantised does not take."""
        if not quantised:
            return cls(weight)
        values, scales = ops.quantise_rows(weight)
        return cls(values, (unit * scales.t()).contiguous())

    @property
    def input_dtype(self) -> torch.dtype:
        """What its input must be."""
        return self.weight.dtype

    def times(self, x: Tensor, scales: Tensor | None, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x @ weight.T (rows, n): bf16 for quantised operands, else their dtype.

        Args:
            x: (rows, k) in `input_dtype`.
            scales: (rows, 1) of a quantised x.
            bias: (n,) of the weight's dtype, bf16 for quantised operands; added before rounding.
            out: written and returned if given.
        """
        if self.scales is None or scales is None:
            if bias is None:
                return torch.mm(x, self.weight.t(), out=out)
            return torch.addmm(bias, x, self.weight.t(), out=out)
        if x.device.type == "cuda":
            return torch._scaled_mm(
                x,
                self.weight.t(),
                scales,
                self.scales,
                bias=bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
                out=out,
            )
        product = (x.float() * scales) @ (self.weight.float() * self.scales.t()).t()
        product = (product if bias is None else product + bias.float()).bfloat16()
        return product if out is None else out.copy_(product)


@dataclass(frozen=True, slots=True)
class _Layer:
    block: Block
    qkv: Matrix
    out: Matrix
    fc1: Matrix
    fc2: Matrix
    out_bias: Tensor
    both_biases: Tensor
    """Of the two sub-layers together, fp32 (W,)."""
    unit: float | None
    """What the attention's output is counted in where it is quantised: no value is larger than 448 of it."""
    turned: Weights | None
    """qkv where the rotation is part of its product."""
    active: Weights | None
    """fc1 where GELU is."""
    active_unit: float | None
    """What that result is counted in where it is quantised."""

    def hidden(self, x: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """gelu(fc1 x) (rows, F) and its scales by rows, ready for fc2; in the product's epilogue where there is one."""
        if self.active is not None:
            return products.frame_gelu_product(Rows(x, scales), self.active, self.active_unit), None
        if x.dtype == torch.bfloat16 and x.device.type == "cuda":
            from taktline_kernels import gpu  # needs Triton

            return gpu.linear_gelu(x, self.fc1.weight, self.block.fc1_bias), None
        return ops.frame_gelu(self.fc1.times(x, scales), self.block.fc1_bias, self.fc2.input_dtype)


def _layer(block: Block, quantised: bool, turns: bool, gelu: bool) -> _Layer:
    """One block with its norms apart; `turns` and `gelu` have the rotation and GELU in their products."""
    weights = Weights.quantised if quantised else Weights.of
    width = block.norm1_weight.numel()
    unit: float | None = None
    active_unit: float | None = None
    if quantised:
        value, bias = block.qkv_weight[-width:], block.qkv_bias[-width:]
        unit = largest_output(value, bias, block.norm1_weight, block.norm1_bias) / ops.FP8_MAX
        if gelu:
            largest = largest_output(block.fc1_weight, block.fc1_bias, block.norm2_weight, block.norm2_bias)
            active_unit = largest / ops.FP8_MAX
    return _Layer(
        block,
        Matrix.of(block.qkv_weight, quantised),
        Matrix.of(block.out_weight, quantised, unit or 1.0),
        Matrix.of(block.fc1_weight, quantised),
        Matrix.of(block.fc2_weight, quantised, active_unit or 1.0),
        block.out_bias.float(),
        block.out_bias.float() + block.fc2_bias.float(),
        unit,
        weights(block.qkv_weight, block.qkv_bias).in_pairs() if turns else None,
        weights(block.fc1_weight, block.fc1_bias).in_fours() if gelu else None,
        active_unit,
    )


def largest_output(weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> float:
    """No output of a projection (n, W) of normed rows is larger than this.

    A normed row has the length sqrt(W), so that an output is at most |row of the weight times the norm's weight|
    sqrt(W) and a constant. What the attention puts out is a mean of such values, and GELU makes none larger. The bound
    is ten to a hundred times what occurs; e4m3 has its full precision over four decades.
    """
    constant = weight.float() @ norm_bias.float() + bias.float()
    reach = (weight.float() * norm_weight.float()).norm(dim=1) * norm_weight.numel() ** 0.5
    return float((reach + constant.abs()).max())


class FusedPredictor:
    """Scores one unit; owns the caches of all layers and frames. One call at a time.

    Args:
        candidates: m of a unit.
        max_horizon: longest rollout, at most `MAX_FRAMES`.
        quantised: e4m3 weights (a scale an output channel) and activations in the four projections of each block: a
            scale a row, and one scale for what is written by kernels that have parts of rows: the attention's output,
            and the GELU's where it is part of its product.
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
        operands = (ops.FP8 if quantised else dtype, device, rows)
        turns = products.turns_in_one(*operands, 3 * a.width, a.tokens, a.head_dim)
        gelu = products.gelu_in_one(*operands, a.mlp, a.width)
        self._layers = tuple(_layer(block, quantised, turns, gelu) for block in weights.blocks)
        self._ones = torch.ones(rows, 1, device=device) if quantised else None
        self._frames = torch.zeros(a.depth, max_horizon, rows, 3 * a.width, device=device, dtype=dtype)
        self._stream = torch.zeros(rows, a.width, device=device, dtype=torch.float32)
        # Where the stream goes from the second block on: beside bf16 updates, 24 bits of it are as good as 32.
        self._kept: ops.Stream = self._stream
        if dtype == torch.bfloat16:
            self._kept = ops.split(self._stream)
        self._tables = []
        order = torch.arange(a.frame_tokens).roll(-modules.CONDITIONING)
        for frame in range(max_horizon):
            cos, sin = rope.tables(rope.frame_positions(a.grid, frame, modules.CONDITIONING), a.head_dim)
            self._tables.append((cos[order, 0].contiguous().to(device), sin[order, 0].contiguous().to(device)))
        self._angles = torch.stack([torch.stack((cos[: a.tokens], sin[: a.tokens])) for cos, sin in self._tables])

    def energies(self, actions: Tensor, patches: Tensor, goal: Tensor, pose: Tensor) -> Tensor:
        """Energies (m,) fp32 of one unit.

        Args:
            actions: (m, horizon, 7) fp32.
            patches: (T, W) fp32, the present, embedded.
            goal: (T, D) fp32.
            pose: (7,) fp32 before the first action.
        """
        w, m = self._weights, self._candidates
        patch_stream = self._stream[: self._patch_rows]
        conditioning = self._stream[self._patch_rows :].view(m, modules.CONDITIONING, -1)
        patch_stream.view(m, *patches.shape).copy_(patches)
        pose = pose.expand(m, -1)
        horizon = actions.shape[1]
        for step in range(horizon):
            action = actions[:, step]
            conditioning[:, 0] = torch.nn.functional.linear(action, w.action_weight, w.action_bias)
            conditioning[:, 1] = torch.nn.functional.linear(pose, w.state_weight, w.state_bias)
            last, updates, offset = self._blocks(step)
            normed, _ = ops.frame_norm(
                _top(last, self._patch_rows),
                tuple(update[: self._patch_rows] for update in updates),
                offset,
                w.norm_weight,
                w.norm_bias,
                BLOCK_NORM_EPS,
                w.out_weight.dtype,
            )
            latents = modules.wide_product(normed, w.out_weight)
            if step + 1 < horizon:
                rounded, _ = ops.frame_norm(
                    latents, (), w.out_bias.float(), None, None, LATENT_NORM_EPS, w.embed_weight.dtype
                )
                torch.add(modules.wide_product(rounded, w.embed_weight), w.embed_bias.float(), out=patch_stream)
                pose = poses.integrate(pose, action)
        return ops.frame_energy(latents, w.out_bias.float(), goal, m, LATENT_NORM_EPS)

    def _blocks(self, step: int) -> tuple[ops.Stream, tuple[Tensor, ...], Tensor | None]:
        """All blocks on the frame in the buffer: its stream, and the outputs and biases that are still to be added.

        The stream is written once a block: its second norm adds the attention's output for itself alone.
        """
        m, heads = self._candidates, self.architecture.heads
        stream: ops.Stream = self._stream
        updates: tuple[Tensor, ...] = ()
        offset: Tensor | None = None
        for index, layer in enumerate(self._layers):
            block = layer.block
            frames = self._frames[index, : step + 1]
            if step == 0 and index == 0:
                self._project_present(layer, frames[0])
            else:
                keep = self._kept if updates else None
                self._project(layer, stream, updates, offset, keep, step, m, frames[step])
                stream = self._kept if updates else stream
            attended = ops.frame_attention(frames, m, heads, layer.unit)
            attended = layer.out.times(attended, self._ones)
            x, scales = ops.frame_norm(
                stream,
                (attended,),
                layer.out_bias,
                block.norm2_weight,
                block.norm2_bias,
                BLOCK_NORM_EPS,
                layer.fc1.input_dtype,
            )
            hidden, scales = layer.hidden(x, scales)
            update = layer.fc2.times(hidden, self._ones if scales is None else scales)
            updates, offset = (attended, update), layer.both_biases
        return stream, updates, offset

    def _project(
        self,
        layer: _Layer,
        stream: ops.Stream,
        updates: tuple[Tensor, ...],
        offset: Tensor | None,
        keep: ops.Stream | None,
        step: int,
        candidates: int,
        out: Tensor,
    ) -> None:
        """Writes q, k and v of a frame's rows to `out`, after the block's first norm.

        Args:
            candidates: whose patches are among the rows; all other rows are conditioning tokens.
        """
        block = layer.block
        weight, bias = block.norm1_weight, block.norm1_bias
        x, scales = ops.frame_norm(
            stream, updates, offset, weight, bias, BLOCK_NORM_EPS, layer.qkv.input_dtype, keep=keep
        )
        if layer.turned is not None:
            products.frame_turned_product(Rows(x, scales), layer.turned, self._angles[step], candidates, out)
        else:
            layer.qkv.times(x, scales, bias=block.qkv_bias, out=out)
            ops.frame_rotate(out, *self._tables[step], candidates)

    def _project_present(self, layer: _Layer, out: Tensor) -> None:
        """The first block's q, k and v of the present, whose patches all candidates share: once for all of them."""
        patches, boundary = self.architecture.tokens, self._patch_rows
        stream = torch.cat((self._stream[:patches], self._stream[boundary:]))
        own = torch.empty(len(stream), out.shape[1], device=out.device, dtype=out.dtype)
        self._project(layer, stream, (), None, None, 0, 1, own)
        out[:boundary].view(self._candidates, patches, -1).copy_(own[:patches])
        out[boundary:].copy_(own[patches:])


def _top(stream: ops.Stream, rows: int) -> ops.Stream:
    """The first rows of a stream."""
    return stream[:rows] if isinstance(stream, Tensor) else (stream[0][:rows], stream[1][:rows])
