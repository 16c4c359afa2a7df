"""The predictor as fused operations over static buffers: one unit of candidates from actions to energies.

Same computation as `modules.predictor_frame`, laid out for a GPU: rows of a frame lie patches first (`ops.frames`),
keys and values stay where the projection wrote them (a frame's q | k | v of a layer is its cache), biases ride on the
pass that reads a product anyway, and the residual stream is summed in fp32 by the norms; with e4m3 operands it is in
bf16, and products add onto it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from taktline_kernels.ops import frame_products as products
from taktline_kernels.ops import frames as ops
from taktline_kernels.ops.frame_products import Weights
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
    def quantised(cls, weight: Tensor, unit: float) -> Matrix:
        """`weight` (n, k) in e4m3, for rows that are counted in `unit`."""
        values, scales = ops.quantise_rows(weight)
        return cls(values, (unit * scales.t()).contiguous())

    def times(self, x: Tensor, scales: Tensor | None, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x @ weight.T (rows, n): bf16 for quantised operands, else their dtype.

        Args:
            x: (rows, k) in the dtype of the weight.
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

    def add_to(
        self, stream: ops.Stream, x: Tensor, scales: Tensor | None, updates: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Adds x @ weight.T to a bf16 stream; to others it is one more of the updates that they wait for, returned."""
        if self.scales is None or scales is None or not isinstance(stream, Tensor) or stream.dtype != torch.bfloat16:
            return (*updates, self.times(x, scales))
        if stream.device.type == "cuda" and not products.sums_in_one(stream, x.shape[1]):
            stream += self.times(x, scales)
        else:
            products.frame_sum_product(x, scales, self.weight, self.scales, stream)
        return updates


@dataclass(frozen=True, slots=True)
class _Norm:
    """What a norm of a block multiplies by and adds, both fp32 (W,) or None.

    Attributes:
        offset: biases that the stream lacks there.
    """

    weight: Tensor | None
    bias: Tensor | None
    offset: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    norms: tuple[_Norm, _Norm]
    qkv: Matrix
    qkv_bias: Tensor
    out: Matrix
    fc1: Matrix
    fc1_bias: Tensor
    fc2: Matrix
    unit: float | None
    """What the attention's output is counted in where it is quantised: no value is larger than 448 of it."""
    turned: Weights | None
    """qkv where the rotation is part of its product."""
    active: Weights | None
    """fc1 where GELU is."""
    active_unit: float | None
    """What that result is counted in where it is quantised."""

    def hidden(self, x: Tensor, ones: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """gelu(fc1 x) (rows, F) and its scales by rows, ready for fc2; in the product's epilogue where there is one.

        Args:
            ones: (rows, 1), of a quantised x.
        """
        if self.active is not None:
            return products.frame_gelu_product(x, self.active, self.active_unit), ones
        if x.dtype == torch.bfloat16 and x.device.type == "cuda":
            from taktline_kernels import gpu  # needs Triton

            return gpu.linear_gelu(x, self.fc1.weight, self.fc1_bias), None
        return ops.frame_gelu(self.fc1.times(x, ones), self.fc1_bias, self.fc2.weight.dtype)


def _layer(block: Block, lacking: Tensor | None, turns: bool, gelu: bool) -> _Layer:
    """One block as stored; `turns` and `gelu` have the rotation and GELU in their products.

    Args:
        lacking: biases that the stream lacks before it, fp32 (W,).
    """
    return _Layer(
        (
            _Norm(block.norm1_weight, block.norm1_bias, lacking),
            _Norm(block.norm2_weight, block.norm2_bias, block.out_bias.float()),
        ),
        Matrix(block.qkv_weight),
        block.qkv_bias,
        Matrix(block.out_weight),
        Matrix(block.fc1_weight),
        block.fc1_bias,
        Matrix(block.fc2_weight),
        None,
        Weights.of(block.qkv_weight, block.qkv_bias).in_pairs() if turns else None,
        Weights.of(block.fc1_weight, block.fc1_bias).in_fours() if gelu else None,
        None,
    )


def _quantised_layer(block: Block, lacking: Tensor, turns: bool, gelu: bool) -> _Layer:
    """One block in e4m3. What its norms multiply by and add is part of the products behind them.

    Args:
        lacking: biases that the stream lacks before it, fp32 (W,).
    """
    qkv, qkv_bias = _with_norm(block.qkv_weight, block.qkv_bias, block.norm1_weight, block.norm1_bias)
    fc1, fc1_bias = _with_norm(block.fc1_weight, block.fc1_bias, block.norm2_weight, block.norm2_bias)
    unit = largest_output(qkv.chunk(3)[2], qkv_bias.chunk(3)[2]) / ops.FP8_MAX
    active_unit = largest_output(fc1, fc1_bias) / ops.FP8_MAX if gelu else None
    normed = largest_normed(block.norm1_weight.numel()) / ops.FP8_MAX
    return _Layer(
        (_Norm(None, None, lacking), _Norm(None, None, lacking + block.out_bias.float())),
        Matrix.quantised(qkv, normed),
        qkv_bias.bfloat16(),
        Matrix.quantised(block.out_weight, unit),
        Matrix.quantised(fc1, normed),
        fc1_bias,
        Matrix.quantised(block.fc2_weight, active_unit or 1.0),
        unit,
        Weights.quantised(qkv, qkv_bias, normed).in_pairs() if turns else None,
        Weights.quantised(fc1, fc1_bias, normed).in_fours() if gelu else None,
        active_unit,
    )


def _with_norm(weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 weight (n, W) and bias (n,) that do to a row what these do after the norm's own weight and bias (W,)."""
    wide = weight.float()
    return wide * norm_weight.float(), bias.float() + wide @ norm_bias.float()


def largest_normed(width: int) -> float:
    """No number of a row of mean 0 and variance 1 is larger than this."""
    return math.sqrt(width)


def largest_output(weight: Tensor, bias: Tensor) -> float:
    """No output of a projection (n, W) of rows of mean 0 and variance 1 is larger than this.

    Such a row has the length sqrt(W), so that an output is at most |row of the weight| sqrt(W) and a constant. What the
    attention puts out is a mean of such values, and GELU makes none larger. The bound is ten to a hundred times what
    occurs; e4m3 has its full precision over four decades.
    """
    return float((weight.norm(dim=1) * weight.shape[1] ** 0.5 + bias.abs()).max())


class FusedPredictor:
    """Scores one unit; owns the caches of all layers and frames. One call at a time.

    Args:
        candidates: m of a unit.
        max_horizon: longest rollout, at most `MAX_FRAMES`.
        quantised: e4m3 weights (a scale an output channel) and activations in the four projections of each block,
            counted in one unit a layer from a bound that the weights give: normed rows, the attention's output, and the
            GELU's where it is part of its product (else a scale a row).
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
        self._operand = ops.FP8 if quantised else dtype
        self._normed_unit = largest_normed(a.width) / ops.FP8_MAX
        operands = (self._operand, device, rows)
        turns = products.turns_in_one(*operands, 3 * a.width, a.tokens, a.head_dim)
        gelu = products.gelu_in_one(*operands, a.mlp, a.width)
        # A norm adds biases to what it reads: the stream keeps them where norms keep it, not where products add to it.
        self._last_offset: Tensor | None = None
        layers = []
        for block in weights.blocks:
            both = block.out_bias.float() + block.fc2_bias.float()
            if quantised:
                lacking = torch.zeros_like(both) if self._last_offset is None else self._last_offset
                layers.append(_quantised_layer(block, lacking, turns, gelu))
                both = lacking + both
            else:
                layers.append(_layer(block, self._last_offset, turns, gelu))
            self._last_offset = both
        self._layers = tuple(layers)
        self._ones = torch.ones(rows, 1, device=device) if quantised else None
        self._frames = torch.zeros(a.depth, max_horizon, rows, 3 * a.width, device=device, dtype=dtype)
        self._stream = torch.zeros(rows, a.width, device=device, dtype=torch.bfloat16 if quantised else torch.float32)
        # Where the stream goes from the second block on: beside bf16 updates, 24 bits of it are as good as 32.
        self._kept: ops.Stream = self._stream
        if dtype == torch.bfloat16 and not quantised:
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
            last, updates = self._blocks(step)
            normed = ops.frame_norm(
                _top(last, self._patch_rows),
                tuple(update[: self._patch_rows] for update in updates),
                self._last_offset,
                w.norm_weight,
                w.norm_bias,
                BLOCK_NORM_EPS,
                w.out_weight.dtype,
            )
            latents = modules.wide_product(normed, w.out_weight)
            if step + 1 < horizon:
                rounded = ops.frame_norm(
                    latents, (), w.out_bias.float(), None, None, LATENT_NORM_EPS, w.embed_weight.dtype
                )
                torch.add(modules.wide_product(rounded, w.embed_weight), w.embed_bias.float(), out=patch_stream)
                pose = poses.integrate(pose, action)
        return ops.frame_energy(latents, w.out_bias.float(), goal, m, LATENT_NORM_EPS)

    def _blocks(self, step: int) -> tuple[ops.Stream, tuple[Tensor, ...]]:
        """All blocks on the frame in the buffer: its stream, and the outputs that are still to be added.

        A stream that norms sum is written once a block: its second norm adds the attention's output for itself alone.
        """
        m, heads = self._candidates, self.architecture.heads
        stream: ops.Stream = self._stream
        updates: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self._layers):
            frames = self._frames[index, : step + 1]
            if step == 0 and index == 0:
                self._project_present(layer, frames[0])
            else:
                keep = self._kept if updates else None
                self._project(layer, stream, updates, keep, step, m, frames[step])
                stream = self._kept if updates else stream
            attended = ops.frame_attention(frames, m, heads, layer.unit)
            updates = layer.out.add_to(stream, attended, self._ones, ())
            hidden, scales = layer.hidden(self._normed(layer.norms[1], stream, updates), self._ones)
            updates = layer.fc2.add_to(stream, hidden, scales, updates)
        return stream, updates

    def _normed(
        self, norm: _Norm, stream: ops.Stream, updates: tuple[Tensor, ...], keep: ops.Stream | None = None
    ) -> Tensor:
        """The stream's rows ready for a projection."""
        dtype = self._operand
        offset, weight, bias = norm.offset, norm.weight, norm.bias
        return ops.frame_norm(
            stream, updates, offset, weight, bias, BLOCK_NORM_EPS, dtype, keep=keep, unit=self._normed_unit
        )

    def _project(
        self,
        layer: _Layer,
        stream: ops.Stream,
        updates: tuple[Tensor, ...],
        keep: ops.Stream | None,
        step: int,
        candidates: int,
        out: Tensor,
    ) -> None:
        """Writes q, k and v of a frame's rows to `out`, after the block's first norm.

        Args:
            candidates: whose patches are among the rows; all other rows are conditioning tokens.
        """
        x = self._normed(layer.norms[0], stream, updates, keep)
        if layer.turned is not None:
            products.frame_turned_product(x, layer.turned, self._angles[step], candidates, out)
        else:
            ones = None if self._ones is None else self._ones[: len(x)]
            layer.qkv.times(x, ones, bias=layer.qkv_bias, out=out)
            ops.frame_rotate(out, *self._tables[step], candidates)

    def _project_present(self, layer: _Layer, out: Tensor) -> None:
        """The first block's q, k and v of the present, whose patches all candidates share: once for all of them."""
        patches, boundary, m = self.architecture.tokens, self._patch_rows, self._candidates
        stream = torch.cat((self._stream[:patches], self._stream[boundary:]))
        own = torch.empty(len(stream), out.shape[1], device=out.device, dtype=out.dtype)
        self._project(layer, stream, (), None, 0, 1, own)
        out[:boundary].view(m, patches, -1).copy_(own[:patches])
        out[boundary:].copy_(own[patches:])


def _top(stream: ops.Stream, rows: int) -> ops.Stream:
    """The first rows of a stream."""
    return stream[:rows] if isinstance(stream, Tensor) else (stream[0][:rows], stream[1][:rows])
