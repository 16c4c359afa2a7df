"""The action head's weights as `modules` reads them; what only the solver step decides is tabulated.

Nothing but layer norms reads the head's stream, and they take each token's mean away. So every layer that writes it has
the mean over its outputs taken away here: the stream's mean is zero, and a norm is a factor (`head_chain`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from taktline_worker.layers import Linear, Norm, Packer
from taktline_worker.models.minicpm_robot.config import (
    BLOCK_EPS,
    BUCKETS,
    HEAD,
    SOLVER_STEPS,
    TAIL_EPS,
    TIME_CHANNELS,
    HeadConfig,
)


@dataclass(frozen=True, slots=True)
class ActionBlock:
    """One block of the diffusion transformer.

    Attributes:
        norms: its adaptive norm at each solver step.
        q: of a block that attends to the backbone; where it attends to itself, q, k and v in one matrix.
    """

    norms: tuple[Norm, ...]
    q: Linear
    out: Linear
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True, slots=True)
class Bank:
    """The projections of one embodiment.

    Attributes:
        state: the state's half of the first matrix; its bias is `action`'s.
        time: (steps, width), what the time of each solver step adds before the nonlinearity.
        rows: (future + horizon, width), each token's constants: those for the future, then bias and position embedding.
    """

    action: Linear
    state: Linear
    second: Linear
    time: Tensor
    third: Linear
    rows: Tensor
    decode1: Linear
    decode2: Linear


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The action head.

    Attributes:
        memory: keys and values of every block that attends to the backbone, block by block, in one matrix.
        plain: the norm without affine.
        tail_norms: the last norm at each solver step.
    """

    memory: Linear
    blocks: tuple[ActionBlock, ...]
    plain: Norm
    tail_norms: tuple[Norm, ...]
    tail: Linear
    banks: Mapping[int, Bank]


def steps() -> tuple[tuple[float, int], ...]:
    """(share of noise, time bucket) of each solver step: 1, 3/4, 1/2, 1/4."""
    shares = [k / SOLVER_STEPS for k in range(SOLVER_STEPS, 0, -1)]
    return tuple((share, min(int(BUCKETS * share), BUCKETS - 1)) for share in shares)


def pack_head(
    tensors: Mapping[str, Tensor], h: HeadConfig, embodiments: list[int], dtype: torch.dtype, device: torch.device
) -> HeadWeights:
    """The head with the banks of `embodiments`, from stored tensors."""
    return _HeadPacker(tensors, h, dtype, device).pack(embodiments)


class _HeadPacker(Packer):
    def __init__(self, tensors: Mapping[str, Tensor], h: HeadConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(tensors, dtype, device)
        self._h = h

    def pack(self, embodiments: list[int]) -> HeadWeights:
        wide = torch.float32
        times = self._time_embeddings()

        def modulation(name: str) -> tuple[Tensor, Tensor]:
            """The two halves (steps, width) of a linear layer of silu(time)."""
            weight, bias = (self.tensors[f"{HEAD}{name}.{part}"].float() for part in ("weight", "bias"))
            first, second = functional.linear(functional.silu(times), weight, bias).chunk(2, dim=1)
            return first, second

        def norms(scale: Tensor, shift: Tensor, eps: float) -> tuple[Norm, ...]:
            rows = zip(scale, shift, strict=True)
            return tuple(Norm(self.place(1.0 + one, wide), self.place(other, wide), eps) for one, other in rows)

        def block(index: int) -> ActionBlock:
            prefix = f"model.transformer_blocks.{index}"
            scale, shift = modulation(f"{prefix}.norm1.linear")  # scale first here, shift first in the tail
            own = f"{HEAD}{prefix}"
            return ActionBlock(
                norms(scale, shift, BLOCK_EPS),
                self.linear(*(f"{own}.attn1.to_{part}" for part in ("qkv" if index % 2 else "q"))),
                self._centred(f"{own}.attn1.to_out.0"),
                self.linear(f"{own}.ff.net.0.proj"),
                self._centred(f"{own}.ff.net.2"),
            )

        tail_shift, tail_scale = modulation("model.proj_out_1")
        ones = torch.ones(self._h.width, dtype=wide, device=self.device)
        crossing = range(0, self._h.layers, 2)
        return HeadWeights(
            memory=self.linear(
                *(f"{HEAD}model.transformer_blocks.{index}.attn1.to_{part}" for index in crossing for part in "kv")
            ),
            blocks=tuple(block(index) for index in range(self._h.layers)),
            plain=Norm(ones, torch.zeros_like(ones), BLOCK_EPS),
            tail_norms=norms(tail_scale, tail_shift, TAIL_EPS),
            tail=self.linear(f"{HEAD}model.proj_out_2"),
            banks={slot: self._bank(slot) for slot in embodiments},
        )

    def _time_embeddings(self) -> Tensor:
        """(steps, width) fp32: sinusoids of the time buckets, cosines first, through the two-layer embedder."""
        half = TIME_CHANNELS // 2
        waves = _waves(half, half - 1)
        x = torch.cat((waves.cos(), waves.sin()), dim=1).float()
        for index, name in enumerate(("linear_1", "linear_2")):
            prefix = f"{HEAD}model.timestep_encoder.timestep_embedder.{name}"
            weight, bias = self._pair(prefix)
            x = functional.linear(functional.silu(x) if index else x.to(weight.device), weight, bias)
        return x

    def _centred(self, name: str) -> Linear:
        """A layer that writes the stream."""
        weight, bias = self._pair(name)
        return Linear(self.place(weight - weight.mean(dim=0)), self.place(bias - bias.mean()))

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        return self.tensors[f"{name}.weight"].float(), self.tensors[f"{name}.bias"].float()

    def _bank(self, slot: int) -> Bank:
        h, wide = self._h, torch.float32

        def own(name: str) -> tuple[Tensor, Tensor]:
            """The stored (in, out) matrix as (out, in), and its bias."""
            weight, bias = (self.tensors[f"{HEAD}{name}.{part}"][slot].float() for part in ("W", "b"))
            return weight.t(), bias

        def linear(name: str, dtype: torch.dtype | None = None) -> Linear:
            weight, bias = own(name)
            return Linear(self.place(weight, dtype), self.place(bias, dtype))

        first, first_bias = own("action_encoder.W1")
        second, second_bias = own("action_encoder.W2")
        third, third_bias = own("action_encoder.W3")
        half = h.width // 2
        waves = _waves(half, half)
        time = torch.cat((waves.sin(), waves.cos()), dim=1).float()  # sines first, unlike the embedder's
        positions = self.tensors[f"{HEAD}position_embedding.weight"][: h.horizon].float()
        future = self.tensors[f"{HEAD}future_tokens.weight"].float()
        rows = torch.cat((future, positions + third_bias))
        return Bank(
            action=Linear(self.place(first[:, : h.action_width]), self.place(first_bias)),
            state=Linear(self.place(first[:, h.action_width :], wide), None),
            second=Linear(self.place(second[:, : h.width]), None),
            time=self.place(time.to(second.device) @ second[:, h.width :].t() + second_bias, wide),
            third=Linear(self.place(third - third.mean(dim=0)), None),
            rows=self.place(rows - rows.mean(dim=1, keepdim=True), wide),
            decode1=linear("action_decoder.layer1"),
            decode2=linear("action_decoder.layer2", wide),
        )


def _waves(count: int, divisor: int) -> Tensor:
    """(steps, count) fp64 angles: each time bucket times 10000^(-i / divisor)."""
    frequencies = torch.exp(-math.log(10_000.0) * torch.arange(count, dtype=torch.float64) / divisor)
    return torch.tensor([float(bucket) for _, bucket in steps()], dtype=torch.float64)[:, None] * frequencies
