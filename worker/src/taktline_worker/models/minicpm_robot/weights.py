"""MiniCPM-RobotManip weights on the device, as `modules` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from taktline_worker.checkpoint import TensorFiles
from taktline_worker.layers import Linear, Norm, Packer
from taktline_worker.models.minicpm_robot.config import VISION_EPS, MiniCpmArchitecture, expected_shapes
from taktline_worker.models.minicpm_robot.head_weights import HeadWeights, pack_head
from taktline_worker.models.minicpm_robot.orders import nearest_positions, rotated_first, window_order


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """One pre-norm block of the vision tower; q, k and v in one matrix."""

    norm1: Norm
    qkv: Linear
    out: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class WindowMerger:
    """Attention inside each window of four patches, and the network that makes one token of them."""

    norm1: Norm
    qkv: Linear
    out: Linear
    norm2: Norm
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower up to text tokens.

    Attributes:
        patch: its depth is padded by zeros to a multiple of 8, without which no matrix unit takes whole words of it.
        order: int64 (P,), `orders.window_order`: both mergers find what they join side by side.
        positions: fp32 (P, width), those of this checkpoint's grid in that order.
    """

    patch: Linear
    order: Tensor
    positions: Tensor
    blocks: tuple[VisionBlock, ...]
    window: WindowMerger
    norm: Norm
    merge_norm: Norm
    merge1: Linear
    merge2: Linear


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Softmax attention: queries, keys, values, then the gates of all heads, in one matrix.

    Queries and keys are in the order of `orders.rotated_first`; their norms multiply by what stands here.
    """

    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    out: Linear


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net: q, k, v | z | a | b in one matrix.

    Attributes:
        rate: fp32 (heads,), -exp(A_log).
        dt_bias: fp32 (heads,).
    """

    inputs: Linear
    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Linear


@dataclass(frozen=True, slots=True)
class TextLayer:
    """One text layer; its norms multiply by 1 + weight."""

    norm1: Tensor
    mixer: FullAttention | DeltaNet
    norm2: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class TextWeights:
    """The hybrid text stack."""

    embedding: Tensor
    layers: tuple[TextLayer, ...]
    norm: Tensor


@dataclass(frozen=True, slots=True)
class MiniCpmWeights:
    """All that inference reads, on one device, in `dtype`; norms, gates and the head's last layer are fp32."""

    vision: VisionWeights
    text: TextWeights
    head: HeadWeights
    dtype: torch.dtype


def load_weights(
    files: TensorFiles, a: MiniCpmArchitecture, embodiments: list[int], dtype: torch.dtype, device: torch.device
) -> MiniCpmWeights:
    """Reads, converts and packs the tensors; of the embodiments' banks only those in `embodiments`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID for a tensor that is corrupt or not finite.
    """
    names = {name: name for name in expected_shapes(a)}
    return pack_weights(dict(files.read(names)), a, embodiments, dtype, device)


def pack_weights(
    tensors: Mapping[str, Tensor],
    a: MiniCpmArchitecture,
    embodiments: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> MiniCpmWeights:
    """As `load_weights`, from tensors in memory. Norms are fp32; tables are made in fp32."""
    return _Packer(tensors, a, dtype, device).pack(embodiments)


class _Packer(Packer):
    def __init__(
        self, tensors: Mapping[str, Tensor], a: MiniCpmArchitecture, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(tensors, dtype, device)
        self._a = a

    def pack(self, embodiments: list[int]) -> MiniCpmWeights:
        return MiniCpmWeights(
            self._vision(),
            self._text(),
            pack_head(self.tensors, self._a.head, embodiments, self.dtype, self.device),
            self.dtype,
        )

    def _vision(self) -> VisionWeights:
        v, tower = self._a.vision, f"{self._a.prefix}vision_tower."

        def attention(name: str) -> tuple[Linear, Linear]:
            return self.linear(*(f"{name}.{part}_proj" for part in "qkv")), self.linear(f"{name}.out_proj")

        def block(index: int) -> VisionBlock:
            prefix = f"{tower}encoder.layers.{index}"
            return VisionBlock(
                self.norm(f"{prefix}.layer_norm1", VISION_EPS),
                *attention(f"{prefix}.self_attn"),
                self.norm(f"{prefix}.layer_norm2", VISION_EPS),
                self.linear(f"{prefix}.mlp.fc1"),
                self.linear(f"{prefix}.mlp.fc2"),
            )

        conv = self.tensors[f"{tower}embeddings.patch_embedding.weight"].flatten(1)
        conv = functional.pad(conv, (0, -conv.shape[1] % 8))
        order = window_order(v.grid)
        places = nearest_positions(v.grid, round(v.positions**0.5))[order]
        table = self.tensors[f"{tower}embeddings.position_embedding.weight"]
        merger = f"{self._a.prefix}merger.mlp.0."
        return VisionWeights(
            patch=Linear(self.place(conv), self.place(self.tensors[f"{tower}embeddings.patch_embedding.bias"])),
            order=self.place(order, torch.int64),
            positions=self.place(table[places], torch.float32),
            blocks=tuple(block(index) for index in range(v.depth)),
            window=WindowMerger(
                self.norm(f"{tower}vit_merger.layer_norm1", VISION_EPS),
                *attention(f"{tower}vit_merger.self_attn"),
                self.norm(f"{tower}vit_merger.pre_norm", VISION_EPS),
                self.linear(f"{tower}vit_merger.linear_1"),
                self.linear(f"{tower}vit_merger.linear_2"),
            ),
            norm=self.norm(f"{tower}post_layernorm", VISION_EPS),
            merge_norm=self.norm(f"{merger}pre_norm", VISION_EPS),
            merge1=self.linear(f"{merger}linear_1"),
            merge2=self.linear(f"{merger}linear_2"),
        )

    def _text(self) -> TextWeights:
        t, text = self._a.text, f"{self._a.prefix}language_model."

        order = rotated_first(t.head_dim, t.rotary)

        def full(prefix: str) -> FullAttention:
            own = f"{prefix}.self_attn."
            query, key, value = (self.tensors[f"{own}{name}_proj.weight"] for name in "qkv")
            query, gate = query.view(t.heads, 2, t.head_dim, t.width).unbind(1)  # stored by head: its query, its gate
            key = key.view(t.kv_heads, t.head_dim, t.width)
            parts = (query[:, order], key[:, order], value.view_as(key), gate)
            q_norm, k_norm = (self.tensors[f"{own}{name}_norm.weight"][order].float() for name in "qk")
            return FullAttention(
                Linear(self.place(torch.cat([part.reshape(-1, t.width) for part in parts])), None),
                self.place(1.0 + q_norm, torch.float32),
                self.place(1.0 + k_norm, torch.float32),
                self.linear(f"{own}o_proj"),
            )

        def delta(prefix: str) -> DeltaNet:
            own = f"{prefix}.linear_attn."
            return DeltaNet(
                inputs=self.linear(*(f"{own}in_proj_{name}" for name in ("qkv", "z", "a", "b"))),
                conv=self.place(self.tensors[f"{own}conv1d.weight"][:, 0]),
                rate=-self.wide(f"{own}A_log").exp(),
                dt_bias=self.wide(f"{own}dt_bias"),
                norm=self.wide(f"{own}norm.weight"),
                out=self.linear(f"{own}out_proj"),
            )

        def layer(index: int) -> TextLayer:
            prefix = f"{text}layers.{index}"
            return TextLayer(
                norm1=self.wide(f"{prefix}.input_layernorm.weight"),
                mixer=full(prefix) if index in t.full else delta(prefix),
                norm2=self.wide(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=self.linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"),
                down=self.linear(f"{prefix}.mlp.down_proj"),
            )

        embedding = self.place(self.tensors[f"{text}embed_tokens.weight"])
        return TextWeights(embedding, tuple(layer(i) for i in range(t.layers)), self.wide(f"{text}norm.weight"))
