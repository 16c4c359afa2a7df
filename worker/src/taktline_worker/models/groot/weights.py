"""GR00T N1.7 weights on the device, in the layout of `modules`; what only the solver step decides is tabulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from taktline_worker.checkpoint import TensorFiles
from taktline_worker.layers import Linear, Norm, Packer
from taktline_worker.models.groot.config import (
    HEAD,
    HEAD_NORM_EPS,
    TAIL_NORM_EPS,
    TEXT,
    TIME_CHANNELS,
    VISION_NORM_EPS,
    VISUAL,
    GrootArchitecture,
    HeadConfig,
    expected_shapes,
)


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """One pre-norm block of the vision tower."""

    norm1: Norm
    qkv: Linear
    out: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class Merger:
    """Four neighbouring patches -> one text token. The last tower's norms come before the regrouping, others after."""

    norm: Norm
    norm_first: bool
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower; `deepstack` maps a block's index to its merger."""

    patch: Linear
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    merger: Merger
    deepstack: Mapping[int, Merger]

    def __post_init__(self) -> None:
        """Checks where norms are: the tower gives its last merger what its norm made, and the others the stream."""
        if not self.merger.norm_first or any(one.norm_first for one in self.deepstack.values()):
            raise ValueError("the last merger alone norms before its patches are regrouped")


@dataclass(frozen=True, slots=True)
class TextLayer:
    """One text layer; q, k and v of all heads in one matrix, gate and up in another.

    `norm1` and `norm2` hold the multiplier less 1, as `ops.rms_norm` reads it; `q_norm` and `k_norm` the multiplier.
    """

    norm1: Tensor
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    out: Linear
    norm2: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class TextWeights:
    """The text layers that are kept."""

    embedding: Tensor
    layers: tuple[TextLayer, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections of one attention: all three in one matrix, or the query alone, where its keys are another input's."""

    qkv: Linear
    out: Linear
    crosses: bool


@dataclass(frozen=True, slots=True)
class RefinementBlock:
    """One block of the vision-language self-attention."""

    norm1: Norm
    attention: Attention
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class ActionBlock:
    """One block of the diffusion transformer.

    Attributes:
        norms: its adaptive norm at each solver step: 1 + scale and shift, each (width,).
        attention: to the vision-language features where it crosses.
    """

    norms: tuple[Norm, ...]
    attention: Attention
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class Projector:
    """The state and action projections of one embodiment; neighbours without a nonlinearity between them are one.

    Attributes:
        action1: the action encoder up to its nonlinearity: its first layer, and of the second what reads that.
        action_time: (steps, width) fp32, what the biases of both and the time of each solver step add.
        action2: its last layer.
        offset: (horizon, width) fp32, that one's bias and the position embedding.
        decode1: the projection behind the transformer, and the decoder's first layer.
    """

    state1: Linear
    state2: Linear
    action1: Linear
    action_time: Tensor
    action2: Linear
    offset: Tensor
    decode1: Linear
    decode2: Linear


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The action head.

    Attributes:
        memories: by what `reads_text` says, keys and values of all such blocks, one behind the other in one matrix.
        plain: the norm without affine.
        tail_norms: the last one at each solver step.
    """

    vl_norm: Norm | None
    refinement: tuple[RefinementBlock, ...]
    blocks: tuple[ActionBlock, ...]
    memories: Mapping[bool | None, Linear]
    plain: Norm
    tail_norms: tuple[Norm, ...]
    projectors: Mapping[int, Projector]


@dataclass(frozen=True, slots=True)
class GrootWeights:
    """All that inference reads, on one device."""

    vision: VisionWeights
    text: TextWeights
    head: HeadWeights
    dtype: torch.dtype


def reads_text(h: HeadConfig, index: int) -> bool | None:
    """Whether a cross-attention block reads the text tokens, or else the image tokens; None: it reads both."""
    return index % (2 * h.text_every) == 0 if h.text_every else None


def load_weights(
    files: TensorFiles, a: GrootArchitecture, embodiments: list[int], dtype: torch.dtype, device: torch.device
) -> GrootWeights:
    """Reads, converts and packs the tensors; of the per-embodiment projections only the slots in `embodiments`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID for a tensor that is corrupt or not finite.
    """
    names = {name: name for name in expected_shapes(a)}
    return pack_weights(dict(files.read(names)), a, embodiments, dtype, device)


def pack_weights(
    tensors: Mapping[str, Tensor],
    a: GrootArchitecture,
    embodiments: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> GrootWeights:
    """As `load_weights`, from tensors in memory. Norms stay fp32; tables are made in fp32 and rounded once."""
    return _Packer(tensors, a, dtype, device).pack(embodiments)


class _Packer(Packer):
    def __init__(
        self, tensors: Mapping[str, Tensor], a: GrootArchitecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(tensors, dtype, device)
        self._a = a

    def pack(self, embodiments: list[int]) -> GrootWeights:
        return GrootWeights(self._vision(), self._text(), self._head(embodiments), self.dtype)

    def _vision(self) -> VisionWeights:
        v = self._a.vision
        eps = VISION_NORM_EPS
        conv = self.tensors[f"{VISUAL}patch_embed.proj.weight"]
        bias = self.tensors[f"{VISUAL}patch_embed.proj.bias"]

        def merger(name: str, first: bool) -> Merger:
            prefix = f"{VISUAL}{name}"
            norm = self.norm(f"{prefix}.norm", eps)
            return Merger(norm, first, self.linear(f"{prefix}.linear_fc1"), self.linear(f"{prefix}.linear_fc2"))

        def block(index: int) -> VisionBlock:
            prefix = f"{VISUAL}blocks.{index}"
            return VisionBlock(
                self.norm(f"{prefix}.norm1", eps),
                self.linear(f"{prefix}.attn.qkv"),
                self.linear(f"{prefix}.attn.proj"),
                self.norm(f"{prefix}.norm2", eps),
                self.linear(f"{prefix}.mlp.linear_fc1"),
                self.linear(f"{prefix}.mlp.linear_fc2"),
            )

        return VisionWeights(
            patch=Linear(self.place(conv.flatten(1)), self.place(bias)),
            positions=self.place(self.tensors[f"{VISUAL}pos_embed.weight"], torch.float32),
            blocks=tuple(block(index) for index in range(v.depth)),
            merger=merger("merger", True),
            deepstack={at: merger(f"deepstack_merger_list.{i}", False) for i, at in enumerate(v.deepstack)},
        )

    def _text(self) -> TextWeights:
        def layer(index: int) -> TextLayer:
            prefix = f"{TEXT}layers.{index}"

            def scale(name: str) -> Tensor:
                return self.place(self.tensors[f"{prefix}.{name}.weight"], torch.float32)

            return TextLayer(
                norm1=scale("input_layernorm") - 1.0,
                qkv=self.linear(*(f"{prefix}.self_attn.{name}_proj" for name in "qkv")),
                q_norm=scale("self_attn.q_norm"),
                k_norm=scale("self_attn.k_norm"),
                out=self.linear(f"{prefix}.self_attn.o_proj"),
                norm2=scale("post_attention_layernorm") - 1.0,
                gate_up=self.linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
                down=self.linear(f"{prefix}.mlp.down_proj"),
            )

        embedding = self.place(self.tensors[f"{TEXT}embed_tokens.weight"])
        return TextWeights(embedding, tuple(layer(index) for index in range(self._a.text.layers)))

    def _attention(self, prefix: str, *, crosses: bool) -> Attention:
        names = (f"{prefix}.to_{name}" for name in ("q" if crosses else "qkv"))
        return Attention(self.linear(*names), self.linear(f"{prefix}.to_out.0"), crosses)

    def _head(self, embodiments: list[int]) -> HeadWeights:
        h = self._a.head
        eps = HEAD_NORM_EPS
        times = self._time_embeddings()

        def modulation(name: str, scale: int, eps: float) -> tuple[Norm, ...]:
            """The norm at each step, from the two halves of a linear layer of silu(time); `scale` is the scale's."""
            weight, bias = (self.tensors[f"{HEAD}{name}.{part}"].float() for part in ("weight", "bias"))
            halves = functional.linear(functional.silu(times), weight, bias).chunk(2, dim=1)
            return tuple(
                Norm(self.place(1.0 + one, torch.float32), self.place(shift, torch.float32), eps)
                for one, shift in zip(halves[scale], halves[1 - scale], strict=True)
            )

        def refinement(index: int) -> RefinementBlock:
            prefix = f"{HEAD}vl_self_attention.transformer_blocks.{index}"
            return RefinementBlock(
                self.norm(f"{prefix}.norm1", eps),
                self._attention(f"{prefix}.attn1", crosses=False),
                self.norm(f"{prefix}.norm3", eps),
                self.linear(f"{prefix}.ff.net.0.proj"),
                self.linear(f"{prefix}.ff.net.2"),
            )

        def block(index: int) -> ActionBlock:
            prefix = f"model.transformer_blocks.{index}"
            crosses = not (h.interleaved and index % 2)
            return ActionBlock(
                modulation(f"{prefix}.norm1.linear", 0, eps),  # scale first here, shift first in the tail
                self._attention(f"{HEAD}{prefix}.attn1", crosses=crosses),
                self.linear(f"{HEAD}{prefix}.ff.net.0.proj"),
                self.linear(f"{HEAD}{prefix}.ff.net.2"),
            )

        blocks = tuple(block(index) for index in range(h.layers))
        read: dict[bool | None, list[str]] = {}
        for index, one in enumerate(blocks):
            if one.attention.crosses:
                names = (f"{HEAD}model.transformer_blocks.{index}.attn1.to_{name}" for name in "kv")
                read.setdefault(reads_text(h, index), []).extend(names)
        ones = self.place(torch.ones(h.width), torch.float32)
        return HeadWeights(
            vl_norm=self.norm(f"{HEAD}vlln", eps) if h.vl_norm else None,
            refinement=tuple(refinement(index) for index in range(h.vl_layers)),
            blocks=blocks,
            memories={place: self.linear(*names) for place, names in read.items()},
            plain=Norm(ones, torch.zeros_like(ones), eps),
            tail_norms=modulation("model.proj_out_1", 1, TAIL_NORM_EPS),
            projectors={slot: self._projector(slot) for slot in embodiments},
        )

    def _time_embeddings(self) -> Tensor:
        """(steps, width) fp32: sinusoids of the integer times, cosines first, through the two-layer embedder."""
        half = TIME_CHANNELS // 2
        frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float64) / (half - 1))
        angles = self.times().double()[:, None] * frequencies
        waves = torch.cat((angles.cos(), angles.sin()), dim=1).float()
        prefix = f"{HEAD}model.timestep_encoder.timestep_embedder."
        parts: list[Callable[[Tensor], Tensor]] = []
        for name in ("linear_1", "linear_2"):
            weight, bias = (self.tensors[f"{prefix}{name}.{part}"].float() for part in ("weight", "bias"))
            parts.append(lambda x, weight=weight, bias=bias: functional.linear(x, weight, bias))  # type: ignore[misc]
        return parts[1](functional.silu(parts[0](waves.to(weight.device))))

    def times(self) -> Tensor:
        """The integer time of each solver step (steps,)."""
        h = self._a.head
        return torch.tensor([int(h.time_buckets * step / h.solver_steps) for step in range(h.solver_steps)])

    def _projector(self, slot: int) -> Projector:
        h = self._a.head

        def bank(name: str) -> tuple[Tensor, Tensor]:
            """Weight (n, k) and bias (n,) of this embodiment, fp32."""
            weight, bias = (self.tensors[f"{HEAD}{name}.{part}"][slot].float() for part in ("W", "b"))
            return weight.t(), bias

        def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
            return Linear(self.place(weight), None if bias is None else self.place(bias))

        half = h.width // 2
        frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float64) / half)
        angles = self.times().double()[:, None] * frequencies
        waves = torch.cat((angles.sin(), angles.cos()), dim=1).float()
        (first, first_bias), (second, bias) = bank("action_encoder.W1"), bank("action_encoder.W2")
        of_actions, of_time = second[:, : h.width], second[:, h.width :]
        third, last = bank("action_encoder.W3")
        last = last.expand(h.horizon, -1)
        if h.position_embedding:
            last = last + self.tensors[f"{HEAD}position_embedding.weight"][: h.horizon].float()
        tail, tail_bias = (self.tensors[f"{HEAD}model.proj_out_2.{part}"].float() for part in ("weight", "bias"))
        decode, decode_bias = bank("action_decoder.layer1")
        return Projector(
            state1=linear(*bank("state_encoder.layer1")),
            state2=linear(*bank("state_encoder.layer2")),
            action1=linear(of_actions @ first),
            action_time=self.place(
                waves.to(second.device) @ of_time.t() + (of_actions @ first_bias + bias), torch.float32
            ),
            action2=linear(third),
            offset=self.place(last, torch.float32),
            decode1=linear(decode @ tail, decode @ tail_bias + decode_bias),
            decode2=linear(*bank("action_decoder.layer2")),
        )
