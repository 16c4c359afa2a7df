"""Cosmos3 weights on the device, in the layout of `modules`: one rank's share, filled tensor by tensor.

Nothing is held twice: the fused tensors are allocated first, and each stored tensor goes straight to its rows of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from taktline_kernels.fp8_rows import Fp8Rows, unpack_gate_up
from taktline_kernels.ops.fp8_products import linear_swiglu_fp8
from torch import Tensor
from torch.nn import functional

from taktline_worker.checkpoint import TensorFiles
from taktline_worker.fp8_layers import functions
from taktline_worker.models.cosmos3.config import PATCH_VALUES, TIME_CHANNELS, Cosmos3Architecture, expected_shapes
from taktline_worker.models.cosmos3.mesh import Place
from taktline_worker.models.cosmos3.request import RequestSettings
from taktline_worker.models.cosmos3.solver import make_schedule


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight (n, k) and its bias (n,), or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., n)."""
        return functional.linear(x, self.weight, self.bias)

    def split(self, rows: int) -> tuple[Linear, Linear]:
        """The first `rows` outputs, and the others; of one without a bias."""
        return Linear(self.weight[:rows]), Linear(self.weight[rows:])


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """silu(gate) * up in one product, for a GPU: rows of gate and up by eights in one weight (2n, k) bf16."""

    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., n)."""
        out: Tensor = functions().linear_swiglu(x, self.weight)
        return out

    def plain(self) -> Linear:
        """Gate rows before up rows, in a tensor of its own."""
        return Linear(unpack_gate_up(self.weight))


@dataclass(frozen=True, slots=True)
class Fp8GatedLinear:
    """The same with rows of gate and up (2n, k) in FP8; what comes out is bf16."""

    rows: Fp8Rows

    def __call__(self, x: Fp8Rows) -> Tensor:
        """(..., k) -> (..., n)."""
        return linear_swiglu_fp8(x, self.rows)


class Product(Protocol):
    """A matrix as a layer uses it: `Linear`, or one in FP8."""

    def __call__(self, x: Any) -> Tensor:
        """(..., k), or rows that were quantised before, -> (..., n)."""

    def split(self, rows: int) -> tuple[Product, Product]:
        """The first `rows` outputs, and the others."""


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """One layer of one tower, this rank's share of it.

    Attributes:
        norm1: (width,), the norm's weight less 1; `norm2` likewise. Those of the heads are whole.
        qkv: query, key and value rows of this rank's heads, one behind the other.
        q_norm: (head_dim,); None where the tower has no such norms.
        k_norm: likewise.
        shared_norm: (head_dim,) norm of the text's keys for the other tower; None where it reads the same keys.
        up: gate rows before up rows where the MLP is gated, else up rows; or both with their activation.
        multipliers: fp32 (3,) of queries, keys and values where attention multiplies in FP8; None where it does not.
    """

    norm1: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    shared_norm: Tensor | None
    out: Product
    norm2: Tensor
    up: Product | GatedLinear | Fp8GatedLinear
    down: Product
    multipliers: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cosmos3Weights:
    """All that inference reads, on one device.

    Attributes:
        embedding: (vocabulary, width).
        text: layers of the text tower ("understanding").
        joint: layers of the tower of video and actions ("generation").
        patch_in: latent patch -> width; `patch_out` back.
        action_in: an action's numbers -> width, for one domain, its bias with the modality embedding in it.
        action_out: back, only the numbers that mean something.
        times: (steps, width), what noised tokens get added at each solver step.
    """

    embedding: Tensor
    text: tuple[TowerLayer, ...]
    joint: tuple[TowerLayer, ...]
    joint_norm: Tensor
    patch_in: Linear
    patch_out: Linear
    action_in: Linear
    action_out: Linear
    times: Tensor
    dtype: torch.dtype


def load_weights(
    files: TensorFiles,
    a: Cosmos3Architecture,
    settings: RequestSettings,
    dtype: torch.dtype,
    device: torch.device,
    place: Place | None = None,
) -> Cosmos3Weights:
    """Reads one rank's share of the tensors; of the action projections only the domain of `settings`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID for a tensor that is corrupt or not finite.
    """
    names = {name: name for name in expected_shapes(a)}
    return _Packer(a, settings, dtype, device, place or Place()).fill(files.read(names))


def pack_weights(
    tensors: Iterable[tuple[str, Tensor]],
    a: Cosmos3Architecture,
    settings: RequestSettings,
    dtype: torch.dtype,
    device: torch.device,
    place: Place | None = None,
) -> Cosmos3Weights:
    """As `load_weights`, from pairs of name and tensor, each let go once it is placed; others may be among them.

    Raises:
        ValueError: a tensor is missing.
    """
    return _Packer(a, settings, dtype, device, place or Place()).fill(tensors)


class _Packer:
    """Allocates the tensors and says of each stored one where it goes."""

    def __init__(
        self, a: Cosmos3Architecture, settings: RequestSettings, dtype: torch.dtype, device: torch.device, place: Place
    ) -> None:
        self._a, self._settings, self._dtype, self._device = a, settings, dtype, device
        self._shard, self._shards = place.shard, place.shards
        self._stores: dict[str, Callable[[Tensor], None]] = {}
        self._kept: dict[str, Tensor] = {}

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> Cosmos3Weights:
        a, settings = self._a, self._settings
        embedding = self._whole("embed_tokens.weight", a.vocabulary, a.width)
        text = tuple(self._layer(index, joint=False) for index in range(a.layers))
        joint = tuple(self._layer(index, joint=True) for index in range(a.layers))
        patch_in = self._affine("proj_in", a.width, PATCH_VALUES)
        patch_out = self._affine("proj_out", PATCH_VALUES, a.width)
        joint_norm = self._offset("norm_moe_gen.weight", a.width)
        small = ("action_proj_in.fc", "action_proj_in.bias", "action_proj_out.fc", "action_proj_out.bias")
        for name in (*(f"{name}.weight" for name in small), "action_modality_embed"):
            self._keep(name)
        for name in ("linear_1", "linear_2"):
            self._keep(f"time_embedder.{name}.weight")
            self._keep(f"time_embedder.{name}.bias")
        missing = set(self._stores)
        for name, tensor in tensors:
            if name in self._stores:
                self._stores[name](tensor)
                missing.discard(name)
        if missing:
            raise ValueError(f"tensors are missing: {sorted(missing)[:4]}")
        domain, raw = settings.domain, settings.raw_dims
        bias = self._kept["action_proj_in.bias.weight"][domain] + self._kept["action_modality_embed"]
        inward = self._kept["action_proj_in.fc.weight"][domain].view(a.action_width, a.width)[:raw]
        outward = self._kept["action_proj_out.fc.weight"][domain].view(a.width, a.action_width)[:, :raw]
        outward_bias = self._kept["action_proj_out.bias.weight"][domain, :raw]
        return Cosmos3Weights(
            embedding=embedding,
            text=text,
            joint=joint,
            joint_norm=joint_norm,
            patch_in=patch_in,
            patch_out=patch_out,
            action_in=Linear(self._put(inward.t()), self._put(bias)),
            action_out=Linear(self._put(outward.t()), self._put(outward_bias)),
            times=self._put(self._times()),
            dtype=self._dtype,
        )

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def _put(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def _keep(self, name: str) -> None:
        def store(tensor: Tensor) -> None:
            self._kept[name] = tensor.float()

        self._stores[name] = store

    def _store(self, name: str, target: Tensor, axis: int | None = None) -> None:
        """`name` goes to `target`; of a sharded axis only this rank's piece."""

        def store(tensor: Tensor) -> None:
            if axis is not None:
                tensor = tensor.chunk(self._shards, dim=axis)[self._shard]
            target.copy_(tensor.reshape(target.shape))

        self._stores[name] = store

    def _whole(self, name: str, *shape: int) -> Tensor:
        target = self._empty(*shape)
        self._store(name, target)
        return target

    def _scale(self, name: str, width: int) -> Tensor:
        """A norm's weight stays fp32: rows are multiplied by it in that precision."""
        target = self._empty(width, dtype=torch.float32)
        self._store(name, target)
        return target

    def _offset(self, name: str, width: int) -> Tensor:
        """The weight of a norm over the stream less 1, as the fused operations take it."""
        target = self._empty(width, dtype=torch.float32)

        def store(tensor: Tensor) -> None:
            target.copy_(tensor.float() - 1.0)

        self._stores[name] = store
        return target

    def _affine(self, name: str, rows: int, columns: int) -> Linear:
        return Linear(self._whole(f"{name}.weight", rows, columns), self._whole(f"{name}.bias", rows))

    def _rows(self, names: tuple[str, ...], counts: tuple[int, ...], columns: int) -> Linear:
        """This rank's rows of several matrices, one behind the other."""
        counts = tuple(count // self._shards for count in counts)
        fused = self._empty(sum(counts), columns)
        for name, part in zip(names, torch.split(fused, list(counts)), strict=True):
            self._store(name, part, axis=0)
        return Linear(fused)

    @property
    def _fuses(self) -> bool:
        """Whether gated products have their activation inside: bf16 on a GPU, in tiles of 128 outputs and 64 inputs."""
        a = self._a
        whole = not (a.mlp // self._shards % 128 or a.width % 64)
        return a.gated and whole and self._dtype == torch.bfloat16 and self._device.type == "cuda"

    def _gated(self, gate: str, up: str) -> GatedLinear:
        """This rank's rows of both, which alternate by eights."""
        count = self._a.mlp // self._shards
        fused = self._empty(2 * count, self._a.width)
        for name, part in zip((gate, up), fused.view(count // 8, 2, 8, -1).unbind(1), strict=True):
            self._store(name, part, axis=0)
        return GatedLinear(fused)

    def _columns(self, name: str, rows: int, columns: int) -> Linear:
        target = self._empty(rows, columns // self._shards)
        self._store(name, target, axis=1)
        return Linear(target)

    def _layer(self, index: int, joint: bool) -> TowerLayer:
        a, prefix = self._a, f"layers.{index}."
        attention, suffix = f"{prefix}self_attn.", "_moe_gen" if joint else ""
        mlp = f"{prefix}mlp{suffix}."
        stem = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k")
        q, k, v, out, q_norm, k_norm = stem if joint else ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k")
        queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
        normed = joint or a.text_norms
        shared = a.text_norm_for_video and not joint
        ups = ("gate_proj", "up_proj") if a.gated else ("up_proj",)
        return TowerLayer(
            norm1=self._offset(f"{prefix}input_layernorm{suffix}.weight", a.width),
            qkv=self._rows(tuple(f"{attention}{name}.weight" for name in (q, k, v)), (queries, keys, keys), a.width),
            q_norm=self._scale(f"{attention}{q_norm}.weight", a.head_dim) if normed else None,
            k_norm=self._scale(f"{attention}{k_norm}.weight", a.head_dim) if normed else None,
            shared_norm=self._scale(f"{attention}k_norm_und_for_gen.weight", a.head_dim) if shared else None,
            out=self._columns(f"{attention}{out}.weight", a.width, queries),
            norm2=self._offset(f"{prefix}post_attention_layernorm{suffix}.weight", a.width),
            up=self._gated(*(f"{mlp}{name}.weight" for name in ups))
            if joint and self._fuses
            else self._rows(tuple(f"{mlp}{name}.weight" for name in ups), (a.mlp,) * len(ups), a.width),
            down=self._columns(f"{mlp}down_proj.weight", a.width, a.mlp),
        )

    def _times(self) -> Tensor:
        """(steps, width) fp32: sinusoids of the scaled integer times, cosines first, through the two-layer embedder."""
        schedule = make_schedule(self._settings.steps, self._settings.shift)
        scaled = torch.tensor([step.time for step in schedule]) * self._a.time_scale
        half = TIME_CHANNELS // 2
        frequencies = torch.exp(-math.log(10_000.0) * torch.arange(half, dtype=torch.float32) / half)
        angles = scaled[:, None] * frequencies
        waves = torch.cat((angles.cos(), angles.sin()), dim=1)
        first, second = (
            (self._kept[f"time_embedder.{name}.weight"], self._kept[f"time_embedder.{name}.bias"])
            for name in ("linear_1", "linear_2")
        )
        return functional.linear(functional.silu(functional.linear(waves.to(first[0].device), *first)), *second)
