"""Checkpoint tensors packed as the engine reads them: fused projections, and tables of what depends on the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.pi.config import PiArchitecture, PiConventions, expert_norms


@dataclass(frozen=True, slots=True)
class DTypePolicy:
    """Storage and matmul dtype of each part; norms, heads, tables, x_t and RoPE are fp32 in every policy."""

    vision: torch.dtype
    language: torch.dtype


FP32 = DTypePolicy(vision=torch.float32, language=torch.float32)
BF16 = DTypePolicy(vision=torch.float32, language=torch.bfloat16)
"""LeRobot's own bf16 mode. Its error is what ours is held to; rounding the vision weights alone can exceed it."""
BF16_VISION = DTypePolicy(vision=torch.bfloat16, language=torch.bfloat16)
"""openpi's bf16 mode, where the vision tower is bf16 too: for GPUs, where an fp32 tower is too slow."""


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """One SigLIP block of width W and MLP width F."""

    norm1_weight: Tensor  # (W,) fp32
    norm1_bias: Tensor
    qkv_weight: Tensor  # (3W, W): query, key, value rows
    qkv_bias: Tensor  # (3W,)
    out_weight: Tensor  # (W, W)
    out_bias: Tensor
    norm2_weight: Tensor
    norm2_bias: Tensor
    fc1_weight: Tensor  # (F, W)
    fc1_bias: Tensor
    fc2_weight: Tensor  # (W, F)
    fc2_bias: Tensor


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower and the projector into the prefix."""

    patch_weight: Tensor  # (W, 3 * patch * patch) fp32, columns in (channel, row, column) order
    patch_bias: Tensor  # (W,) fp32
    position: Tensor  # (tokens, W) fp32
    layers: tuple[VisionLayer, ...]
    norm_weight: Tensor  # (W,) fp32
    norm_bias: Tensor
    projector_weight: Tensor  # (prefix width, W)
    projector_bias: Tensor


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """One Gemma block of width W, MLP width F, with h query heads of size d and one key/value head.

    The two norm weights are w of the multiplier 1 + w; the π0.5 expert has none, its norms are in `AdaptiveNorms`.
    """

    qkv_weight: Tensor  # ((h + 2) * d, W): query, key, value rows
    out_weight: Tensor  # (W, h * d)
    gate_up_weight: Tensor  # (2F, W): gate rows, then up rows
    down_weight: Tensor  # (W, F)
    norm1_weight: Tensor | None  # (W,) fp32
    norm2_weight: Tensor | None


@dataclass(frozen=True, slots=True)
class AdaptiveNorms:
    """AdaRMS rows of every solver step: norms 2i and 2i+1 are layer i's two, the last one is the final norm."""

    scale: Tensor  # (steps, 2 * depth + 1, W) fp32
    shift: Tensor
    gate: Tensor
    clean: Tensor | None = None  # (3, 2 * depth + 1, W) fp32: the three at t = 0, for actions fixed by trained RTC


@dataclass(frozen=True, slots=True)
class ActionHeads:
    """The fp32 layers between actions and the expert, with everything that depends on the step folded in.

    π0.5: suffix = in_weight x + in_bias. π0: suffix = mlp_out(silu(in_weight x + in_bias[step])): the action half of
    action_time_mlp_in is merged with action_in_proj, its time half is part of the bias.
    """

    in_weight: Tensor  # (W, action width)
    in_bias: Tensor  # (W,), or (steps, W) for π0
    out_weight: Tensor  # (action width, W)
    out_bias: Tensor
    time_out_weight: Tensor | None  # π0: (W, W)
    time_out_bias: Tensor | None
    state_weight: Tensor | None  # π0: (W, action width)
    state_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PiWeights:
    """All that inference reads, on one device."""

    vision: VisionWeights
    embedding: Tensor  # (vocabulary, prefix width)
    prefix: tuple[GemmaLayer, ...]
    prefix_norm: Tensor  # (prefix width,) fp32; no output of a policy depends on it
    expert: tuple[GemmaLayer, ...]
    expert_norm: Tensor | None  # π0: (expert width,) fp32
    adaptive: AdaptiveNorms | None  # π0.5
    heads: ActionHeads
    times: Tensor  # (steps,) fp32: t of each solver step, from 1 (noise) towards 0 (action)

    @property
    def bytes(self) -> int:
        """Memory of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self))


_Packed = TypeVar("_Packed")


def on_device(weights: _Packed, device: torch.device) -> _Packed:
    """The same tree of packed tensors on `device`."""
    if not is_dataclass(weights) or isinstance(weights, type):
        raise TypeError(f"{type(weights).__name__} is no packed tree")
    return replace(weights, **{item.name: _moved(getattr(weights, item.name), device) for item in fields(weights)})


def fewer_steps(weights: PiWeights, steps: int) -> PiWeights:
    """The same policy with fewer Euler steps: every n-th row of the step tables, all other tensors shared.

    With N steps t runs through 1 - i / N, so a divisor of N meets a part of the same instants.

    Raises:
        ValueError: `steps` is no proper divisor of the weights' own number.
    """
    own = int(weights.times.shape[0])
    if not 0 < steps < own or own % steps:
        raise ValueError(f"{steps} solver steps are no proper divisor of the policy's {own}")
    stride = own // steps
    adaptive, heads = weights.adaptive, weights.heads
    if adaptive is not None:
        tables = (adaptive.scale, adaptive.shift, adaptive.gate)
        scale, shift, gate = (table[::stride].contiguous() for table in tables)
        adaptive = replace(adaptive, scale=scale, shift=shift, gate=gate)
    if heads.in_bias.dim() == 2:
        heads = replace(heads, in_bias=heads.in_bias[::stride].contiguous())
    return replace(weights, adaptive=adaptive, heads=heads, times=weights.times[::stride].contiguous())


def solver_times(steps: int, *, accumulate: bool) -> Tensor:
    """t of each Euler step as fp32 (steps,): 1 - i/N rounded once, or openpi's running fp32 sum of -1/N."""
    if not accumulate:
        return torch.tensor([1.0 + i * (-1.0 / steps) for i in range(steps)], dtype=torch.float64).float()
    dt, t, times = torch.tensor(-1.0 / steps, dtype=torch.float32), torch.tensor(1.0, dtype=torch.float32), []
    for _ in range(steps):
        times.append(t)
        t = t + dt
    return torch.stack(times)


def time_embedding(times: Tensor, width: int, *, min_period: float, max_period: float) -> Tensor:
    """Sinusoidal embedding of t (steps,) -> fp32 (steps, width): sines, then cosines.

    Computed in float64 and rounded once: the fastest sinusoid turns by 1571 rad per unit of t, so an fp32 table is
    already off by up to 1e-4.
    """
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
    period = min_period * (max_period / min_period) ** fraction
    angle = (2.0 * torch.pi / period)[None, :] * times.to(torch.float64)[:, None]
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()


class Packer:
    """Collects canonical tensors one by one, so that a 14 GB file needs no second copy, then packs them.

    Args:
        architecture: dimensions, already checked against the shapes.
        conventions: solver steps and time periods, which the step tables are made from.
        policy: dtypes of the packed weights.
        device: where matrices go as soon as they are read.
    """

    def __init__(
        self, architecture: PiArchitecture, conventions: PiConventions, policy: DTypePolicy, device: torch.device
    ) -> None:
        self._architecture = architecture
        self._conventions = conventions
        self._policy = policy
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one canonical tensor, in any float dtype."""
        # Statistics-like vectors and heads stay fp32; towers get their policy's dtype at once.
        if name.startswith(("vision.embeddings.", "expert.norm.", "prefix.norm.")) or "norm" in name:
            dtype = torch.float32
        elif name.startswith(("vision.", "projector.")):
            dtype = self._policy.vision
        elif name.startswith(("prefix.", "expert.", "lm_head.")):
            dtype = self._policy.language
        else:
            dtype = torch.float32
        # A copy even where nothing changes: a tensor mapped from its file starts at any address, and the order in which
        # a CPU sums depends on that.
        self._tensors[name] = tensor.to(device=self._device, dtype=dtype, copy=True)

    def pack(self) -> PiWeights:
        """Everything added so far, fused and tabulated.

        Raises:
            KeyError: a tensor was not added; `read_architecture` has checked that the file has them all.
        """
        a, c = self._architecture, self._conventions
        times = solver_times(c.solver_steps, accumulate=c.accumulate_time)
        embedded = time_embedding(times, a.expert_width, min_period=c.min_period, max_period=c.max_period)
        adaptive = heads = None
        if a.family == "pi05":
            clean = None
            if c.rtc_max_delay:
                clean = time_embedding(torch.zeros(1), a.expert_width, min_period=c.min_period, max_period=c.max_period)
            adaptive = self._adaptive(embedded, clean)
            heads = self._heads_pi05()
        else:
            heads = self._heads_pi0(embedded)
        vision = VisionWeights(
            patch_weight=self._take("vision.embeddings.patch_embedding.weight").flatten(1).contiguous(),
            patch_bias=self._take("vision.embeddings.patch_embedding.bias"),
            position=self._take("vision.embeddings.position_embedding.weight"),
            layers=tuple(self._vision_layer(i) for i in range(a.vision_layers)),
            norm_weight=self._take("vision.post_layernorm.weight"),
            norm_bias=self._take("vision.post_layernorm.bias"),
            projector_weight=self._take("projector.weight"),
            projector_bias=self._take("projector.bias"),
        )
        # LeRobot stores a copy under lm_head; openpi stores only lm_head, to which the embedding is tied.
        stored = "prefix.embed_tokens.weight"
        embedding = self._take(stored if stored in self._tensors else "lm_head.weight")
        return PiWeights(
            vision=vision,
            embedding=embedding,
            prefix=tuple(self._gemma_layer("prefix", i) for i in range(a.depth)),
            prefix_norm=self._take("prefix.norm.weight"),
            expert=tuple(self._gemma_layer("expert", i) for i in range(a.depth)),
            expert_norm=None if a.family == "pi05" else self._take("expert.norm.weight"),
            adaptive=adaptive,
            heads=heads,
            times=times,
        )

    def _take(self, name: str) -> Tensor:
        return self._tensors.pop(name)

    def _fused(self, names: list[str]) -> Tensor:
        return torch.cat([self._take(name) for name in names]).contiguous()

    def _vision_layer(self, index: int) -> VisionLayer:
        base = f"vision.encoder.layers.{index}"
        attention = f"{base}.self_attn"
        return VisionLayer(
            norm1_weight=self._take(f"{base}.layer_norm1.weight"),
            norm1_bias=self._take(f"{base}.layer_norm1.bias"),
            qkv_weight=self._fused([f"{attention}.{part}_proj.weight" for part in "qkv"]),
            qkv_bias=self._fused([f"{attention}.{part}_proj.bias" for part in "qkv"]),
            out_weight=self._take(f"{attention}.out_proj.weight"),
            out_bias=self._take(f"{attention}.out_proj.bias"),
            norm2_weight=self._take(f"{base}.layer_norm2.weight"),
            norm2_bias=self._take(f"{base}.layer_norm2.bias"),
            fc1_weight=self._take(f"{base}.mlp.fc1.weight"),
            fc1_bias=self._take(f"{base}.mlp.fc1.bias"),
            fc2_weight=self._take(f"{base}.mlp.fc2.weight"),
            fc2_bias=self._take(f"{base}.mlp.fc2.bias"),
        )

    def _gemma_layer(self, tower: str, index: int) -> GemmaLayer:
        base = f"{tower}.layers.{index}"
        plain = tower == "prefix" or self._architecture.family == "pi0"
        return GemmaLayer(
            qkv_weight=self._fused([f"{base}.self_attn.{part}_proj.weight" for part in "qkv"]),
            out_weight=self._take(f"{base}.self_attn.o_proj.weight"),
            gate_up_weight=self._fused([f"{base}.mlp.gate_proj.weight", f"{base}.mlp.up_proj.weight"]),
            down_weight=self._take(f"{base}.mlp.down_proj.weight"),
            norm1_weight=self._take(f"{base}.input_layernorm.weight") if plain else None,
            norm2_weight=self._take(f"{base}.post_attention_layernorm.weight") if plain else None,
        )

    def _adaptive(self, embedded: Tensor, clean: Tensor | None) -> AdaptiveNorms:
        """The 2 * depth + 1 modulations of each step; they depend on t alone, so requests never compute them."""
        steps = embedded.shape[0]
        cond = (embedded if clean is None else torch.cat((embedded, clean))).to(self._device)
        for name in ("time_mlp_in", "time_mlp_out"):
            cond = functional.silu(functional.linear(cond, self._take(f"{name}.weight"), self._take(f"{name}.bias")))
        rows = [
            functional.linear(cond, self._take(f"{name}.dense.weight"), self._take(f"{name}.dense.bias"))
            for name in expert_norms(self._architecture.depth)
        ]
        scale, shift, gate = torch.stack(rows, dim=1).chunk(3, dim=-1)
        finished = None if clean is None else torch.stack((scale[steps], shift[steps], gate[steps]))
        return AdaptiveNorms(
            scale[:steps].contiguous(), shift[:steps].contiguous(), gate[:steps].contiguous(), finished
        )

    def _heads_pi05(self) -> ActionHeads:
        return ActionHeads(
            in_weight=self._take("action_in_proj.weight"),
            in_bias=self._take("action_in_proj.bias"),
            out_weight=self._take("action_out_proj.weight"),
            out_bias=self._take("action_out_proj.bias"),
            time_out_weight=None,
            time_out_bias=None,
            state_weight=None,
            state_bias=None,
        )

    def _heads_pi0(self, embedded: Tensor) -> ActionHeads:
        # float64, so that merging two linear layers rounds no more than running them one after the other.
        actions, times = self._take("action_time_mlp_in.weight").double().chunk(2, dim=1)
        weight, bias = self._take("action_in_proj.weight").double(), self._take("action_in_proj.bias").double()
        per_step = embedded.to(self._device).double() @ times.T + actions @ bias
        per_step = per_step + self._take("action_time_mlp_in.bias").double()
        return ActionHeads(
            in_weight=(actions @ weight).float(),
            in_bias=per_step.float(),
            out_weight=self._take("action_out_proj.weight"),
            out_bias=self._take("action_out_proj.bias"),
            time_out_weight=self._take("action_time_mlp_out.weight"),
            time_out_bias=self._take("action_time_mlp_out.bias"),
            state_weight=self._take("state_proj.weight"),
            state_bias=self._take("state_proj.bias"),
        )


def pack_weights(
    tensors: Mapping[str, Tensor] | Iterator[tuple[str, Tensor]],
    architecture: PiArchitecture,
    conventions: PiConventions,
    policy: DTypePolicy,
    device: torch.device,
) -> PiWeights:
    """Packs canonical tensors, given at once or one by one. Shapes: `config.expected_shapes`."""
    packer = Packer(architecture, conventions, policy, device)
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        packer.add(name, tensor)
    return packer.pack()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _tensors(getattr(value, item.name))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return on_device(value, device) if is_dataclass(value) and not isinstance(value, type) else value
