"""π0 and π0.5 on a GPU in bf16: the computation of `modules` with what can be fused fused, over a runner's buffers.

Shapes: B rows, N images, T tokens an image, S prefix slots, C cache rows, H actions, W width, h query heads of size d.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace

import torch
from taktline_kernels import gpu, ops
from taktline_kernels.cuda.expert import ExpertChain
from taktline_kernels.fp8_rows import ByteWeight
from taktline_kernels.guidance import Guidance
from taktline_kernels.selector import Choice, default_selector
from taktline_protocol.deployment import QuantisationOptions
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from taktline_worker.graph_capture import Stage
from taktline_worker.models.pi.byte_expert import ByteLayer, quantise
from taktline_worker.models.pi.chain import make_chain
from taktline_worker.models.pi.config import LAYER_NORM_EPS, RMS_EPS, PiArchitecture
from taktline_worker.models.pi.weights import AdaptiveNorms, GemmaLayer, PiWeights, VisionWeights

logger = logging.getLogger(__name__)

EXACT_STREAM_TOKENS = 4096
"""Image tokens up to which the vision tower's residual stream is fp32."""


@dataclass(frozen=True, slots=True)
class FusedWeights:
    """Packed weights as the fused computation reads them.

    Attributes:
        packed: the policy's weights; gate and up rows of both Gemma towers are interleaved (`gpu.pack_gate_up`).
        norms: the expert's modulations. π0's norms are the case of a scale that no step changes, shift 0 and gate 1.
        chain: the expert's kernel chain for one row, where this GPU and these dimensions have one.
        no_chain: why there is none.
        stored: the expert's matrices in a byte a number; None without `quantisation`.
        quantisation: what `stored` is, and up to which batch it is read.
    """

    packed: PiWeights
    norms: AdaptiveNorms
    chain: ExpertChain | None
    no_chain: str = ""
    stored: tuple[ByteLayer, ...] | None = None
    quantisation: QuantisationOptions | None = None

    def expert(self, batch: int) -> Sequence[GemmaLayer | ByteLayer]:
        """The expert's matrices that a batch of so many rows reads."""
        if self.quantisation is not None and self.stored is not None and batch <= self.quantisation.max_batch:
            return self.stored
        return self.packed.expert


def fuse(
    weights: PiWeights,
    architecture: PiArchitecture,
    horizon: int,
    max_keys: int,
    quantisation: QuantisationOptions | None = None,
    max_batch: int = 0,
) -> FusedWeights:
    """Reorder bf16 weights on a CUDA device.

    Args:
        weights: from `pack_weights`.
        architecture: dimensions.
        horizon: action tokens.
        max_keys: most prefix slots plus suffix tokens of a row.
        quantisation: how the expert's matrices are stored for small batches; None keeps bf16 for all.
        max_batch: largest batch that there will be; where all batches read quantised matrices, those in bf16 are
            left out. 0 keeps them.
    """
    norms = _modulations(weights)
    stored = None if quantisation is None else quantise(weights.expert, quantisation.expert)
    alone = quantisation is not None and 0 < max_batch <= quantisation.max_batch
    packed = replace(
        weights,
        prefix=tuple(replace(layer, gate_up_weight=_interleaved(layer.gate_up_weight)) for layer in weights.prefix),
        expert=()
        if alone
        else tuple(replace(layer, gate_up_weight=_interleaved(layer.gate_up_weight)) for layer in weights.expert),
    )
    if quantisation is not None:
        reason = f"it reads bf16, and engine.quantisation keeps the expert's matrices in {quantisation.expert}"
        logger.warning("the expert's kernel chain is not used: %s", reason)
        return FusedWeights(packed, norms, None, reason, stored, quantisation)
    chain, reason = make_chain(packed, norms, architecture, horizon, max_keys)
    return FusedWeights(packed, norms, chain, reason)


# A policy with fewer solver steps shares its matrices with the one it comes from, and so shall their packed copies.
_PACKED: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def _interleaved(gate_up: Tensor) -> Tensor:
    packed = _PACKED.get(gate_up)
    if packed is None:
        packed = _PACKED[gate_up] = gpu.pack_gate_up(gate_up)
    return packed


def _modulations(weights: PiWeights) -> AdaptiveNorms:
    if weights.adaptive is not None:
        return weights.adaptive
    rows = [given(norm) for layer in weights.expert for norm in (layer.norm1_weight, layer.norm2_weight)]
    scale = torch.stack([*rows, given(weights.expert_norm)]).float()
    steps = int(weights.times.shape[0])
    tables = (scale, torch.zeros_like(scale), torch.ones_like(scale))
    return AdaptiveNorms(*(table.expand(steps, -1, -1) for table in tables))


def embed_patches(weights: VisionWeights, patches: Tensor) -> Tensor:
    """Patches (N, T, 3 * patch * patch) fp32 -> (N, T, W), positions added, as the residual stream of the tower.

    The stream of a few images is fp32: its rounding is most of a bf16 tower's error, and its bytes cost nothing there.
    """
    x = functional.linear(patches, weights.patch_weight, weights.patch_bias) + weights.position
    few = x.shape[0] * x.shape[1] <= EXACT_STREAM_TOKENS
    return x if few else x.to(weights.projector_weight.dtype)


def image_features(weights: VisionWeights, patches: Tensor, heads: int) -> Tensor:
    """SigLIP and the projector, all images as one batch.

    Args:
        patches: (N, T, 3 * patch * patch) fp32 of pixels in [-1, 1], (channel, row, column) inside.
        heads: vision heads.

    Returns:
        (N, T, prefix W) bf16.
    """
    x = embed_patches(weights, patches)
    dtype = weights.projector_weight.dtype
    images, tokens, width = x.shape
    first = weights.layers[0]
    _, hidden = gpu.layer_norm(x, None, first.norm1_weight, first.norm1_bias, LAYER_NORM_EPS, dtype)
    for index, layer in enumerate(weights.layers):
        qkv = gpu.linear(hidden, layer.qkv_weight, layer.qkv_bias).view(images, tokens, 3, heads, -1)
        attended = ops.attention_vision(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]).reshape(images, tokens, width)
        x, hidden = gpu.linear_add_layer_norm(
            attended, layer.out_weight, layer.out_bias, x, layer.norm2_weight, layer.norm2_bias, LAYER_NORM_EPS
        )
        hidden = gpu.linear_gelu(hidden, layer.fc1_weight, layer.fc1_bias)
        if index + 1 < len(weights.layers):
            following = weights.layers[index + 1]
            scale, shift = following.norm1_weight, following.norm1_bias
        else:
            scale, shift = weights.norm_weight, weights.norm_bias
        x, hidden = gpu.linear_add_layer_norm(hidden, layer.fc2_weight, layer.fc2_bias, x, scale, shift, LAYER_NORM_EPS)
    return functional.linear(hidden, weights.projector_weight, weights.projector_bias)


def assemble(weights: PiWeights, images: Tensor, tokens: Tensor, source: Tensor) -> Tensor:
    """Image tokens (N, T, W) and prompt tokens (B, P) -> prefix (B, S, W), by `source` (`modules.assemble_prefix`)."""
    return gpu.assemble(images.view(-1, images.shape[-1]), weights.embedding, tokens, source)


def prefix_pass(
    weights: PiWeights,
    images: Tensor,
    tokens: Tensor,
    source: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    written: Stage | None = None,
) -> None:
    """Run the prefix and write its rotated keys and its values; the last layer stops there.

    Args:
        images: (N, T, W) bf16.
        tokens: (B, P) int64 prompt tokens.
        source: (B, S) int64, which image or text token each slot holds (`modules.assemble_prefix`).
        lengths: (B,) int32.
        keys: (depth, B, C, d) bf16, written up to S.
        values: likewise.
        cos: (positions, d / 2) fp32.
        sin: likewise.
        heads: query heads.
        written: called with each layer once its keys and values are on their way.
    """
    layers, d = weights.prefix, keys.shape[-1]
    x = assemble(weights, images, tokens, source)
    hidden = ops.rms_norm(x, given(layers[0].norm1_weight), RMS_EPS)
    for index, layer in enumerate(layers):
        if index + 1 == len(layers):
            key_value = gpu.linear(hidden, layer.qkv_weight[heads * d :])
            gpu.rope_cache(key_value, keys[index], values[index], cos, sin, lengths, heads=0, suffix=False)
            tell(written, index)
            return
        qkv = gpu.linear(hidden, layer.qkv_weight)
        gpu.rope_cache(qkv, keys[index], values[index], cos, sin, lengths, heads=heads, suffix=False)
        tell(written, index)
        query = qkv[:, :, : heads * d].view(*qkv.shape[:2], heads, d)
        attended = gpu.attention_cached(query, keys[index], values[index], lengths, 0).flatten(2)
        x, hidden = gpu.linear_add_rms_norm(attended, layer.out_weight, x, given(layer.norm2_weight), RMS_EPS)
        gated = gpu.linear_geglu(hidden, layer.gate_up_weight)
        following = given(layers[index + 1].norm1_weight)
        x, hidden = gpu.linear_add_rms_norm(gated, layer.down_weight, x, following, RMS_EPS)


def solve(
    fused: FusedWeights,
    actions: Tensor,
    state: Tensor | None,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    guidance: Sequence[Guidance] | None = None,
    before_layer: Stage | None = None,
) -> None:
    """The Euler loop, in place on `actions`.

    π0's state token goes through the expert once, as one more token of the first step: it sees the prefix and itself,
    and its keys and values serve all steps.

    Args:
        actions: (B, H, action width) fp32: noise in, actions out.
        state: π0: (B, action width) fp32; None for π0.5.
        lengths: (B,) int32, valid prefix slots.
        keys: (depth, B, C, d): the prefix; rows from lengths on are overwritten by the suffix.
        values: likewise.
        cos: (positions, d / 2) fp32.
        sin: likewise.
        heads: query heads.
        guidance: the correction of each step's velocity, rows B * H; None for none.
        before_layer: called before each layer of the first step, which reads that layer's keys and values.
    """
    weights, chain = fused.packed, fused.chain
    batch, horizon, dim = actions.shape
    layers = fused.expert(batch)
    _note_expert(fused, batch, horizon)
    if batch == 1 and chain is not None:
        chain.solve(actions[0], state, lengths, keys[:, 0], values[:, 0], cos, sin, guidance, before_layer)
        return
    norms, steps = fused.norms, int(weights.times.shape[0])
    flat, before = actions.view(batch * horizon, dim), 0
    x = _suffix(weights, flat, None, None, None, None, step=-1, steps=steps, before=0).view(batch, horizon, -1)
    if state is not None:
        token = functional.linear(state, given(weights.heads.state_weight), weights.heads.state_bias)
        x, before = torch.cat((token.to(x.dtype)[:, None], x), dim=1), 1
    for step in range(steps):
        hidden, update, gate, final = _step(
            layers,
            norms,
            step,
            x,
            lengths,
            keys,
            values,
            cos,
            sin,
            heads,
            first_alone=before > 0,
            before_layer=before_layer if step == 0 else None,
        )
        correction = None if guidance is None else guidance[step]
        x = _suffix(
            weights, flat, hidden, update, final, gate, step=step, steps=steps, before=before, guidance=correction
        )
        x = x.view(batch, horizon, -1)
        if before:
            lengths, before = lengths + 1, 0


def _note_expert(fused: FusedWeights, batch: int, horizon: int) -> None:
    """Say for `kernels explain` what computes the expert, and why."""
    device, dtype = fused.packed.embedding.device, fused.packed.embedding.dtype
    quantised = fused.expert(batch) is fused.stored
    if batch == 1 and fused.chain is not None:
        choice = Choice("chain", "one row, bf16 matrices")
    elif batch == 1 or quantised:
        choice = Choice("products", f"no kernel chain: {fused.no_chain}")
    else:
        choice = Choice("products", "the kernel chain is for one row")
    shape = {"batch": batch, "tokens": horizon, "bytes": 1 if quantised else 2}
    default_selector().note("expert", shape, dtype, device, choice)


def _suffix(
    weights: PiWeights,
    actions: Tensor,
    hidden: Tensor | None,
    update: Tensor | None,
    final: tuple[Tensor, Tensor] | None,
    gate: Tensor | None,
    *,
    step: int,
    steps: int,
    before: int,
    guidance: Guidance | None = None,
) -> Tensor:
    """Finish `step` (none for -1) on actions (B * H, action width), and embed them for the next step."""
    heads, last = weights.heads, step + 1 == steps
    width, timed = heads.in_weight.shape[0], heads.time_out_weight is not None
    bias = heads.in_bias[0 if last else step + 1] if timed else heads.in_bias
    dtype = torch.float32 if timed else weights.embedding.dtype
    embedded = torch.empty((actions.shape[0], width), dtype=dtype, device=actions.device)
    gpu.action_head(
        actions,
        embedded,
        (heads.in_weight, bias, heads.out_weight, heads.out_bias),
        hidden,
        update,
        final,
        gate,
        dt=-1.0 / steps,
        last=last,
        before=before,
        silu=timed,
        guidance=guidance,
    )
    if not timed or last:
        return embedded
    return functional.linear(embedded, given(heads.time_out_weight), heads.time_out_bias).to(weights.embedding.dtype)


def _step(
    layers: Sequence[GemmaLayer | ByteLayer],
    norms: AdaptiveNorms,
    step: int,
    x: Tensor,
    lengths: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    *,
    first_alone: bool,
    before_layer: Stage | None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """All layers of one step; returns stream, last update, its gate, and the final norm's scale and shift."""
    scale, shift, gate = norms.scale[step], norms.shift[step], norms.gate[step]
    tokens, d = x.shape[1], keys.shape[-1]
    hidden = ops.ada_rms_norm(x, scale[0], shift[0], RMS_EPS)
    for index, layer in enumerate(layers):
        first, second, following = 2 * index, 2 * index + 1, 2 * index + 2
        tell(before_layer, index)
        qkv = _product(hidden, layer.qkv_weight)
        gpu.rope_cache(qkv, keys[index], values[index], cos, sin, lengths, heads=heads, suffix=True)
        query = qkv[:, :, : heads * d].view(*qkv.shape[:2], heads, d)
        attended = gpu.attention_cached(
            query, keys[index], values[index], lengths, tokens, first_alone=first_alone
        ).flatten(2)
        attended = _product(attended, layer.out_weight)
        x, hidden = ops.gated_add_ada_rms_norm(x, attended, gate[first], scale[second], shift[second], RMS_EPS)
        update = _product(_gated(hidden, layer.gate_up_weight), layer.down_weight)
        if index + 1 == len(layers):
            break
        x, hidden = ops.gated_add_ada_rms_norm(x, update, gate[second], scale[following], shift[following], RMS_EPS)
    return x, update, gate[2 * len(layers) - 1], (scale[-1], shift[-1])


def _product(x: Tensor, weight: Tensor | ByteWeight) -> Tensor:
    return gpu.linear_bytes(x, weight) if isinstance(weight, ByteWeight) else gpu.linear(x, weight)


def _gated(x: Tensor, gate_up: Tensor | ByteWeight) -> Tensor:
    """The gated feed-forward's first half; bf16 gates and ups alternate by eights, stored ones lie apart."""
    return gpu.linear_geglu_bytes(x, gate_up) if isinstance(gate_up, ByteWeight) else gpu.linear_geglu(x, gate_up)


def tell(hook: Stage | None, layer: int) -> None:
    """Call `hook`, if there is one."""
    if hook is not None:
        hook(layer)


def given(tensor: Tensor | None) -> Tensor:
    """A tensor that the family at hand always has."""
    if tensor is None:
        raise ValueError("this family has no such weight")
    return tensor
