"""Layers that several families are made of: linear and norm weights, attention, rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from taktline_kernels import ops
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight (n, k) and its bias (n,), or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., n)."""
        return ops.linear(x, self.weight, self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        """The same, and the tanh form of GELU behind it."""
        return ops.linear(x, self.weight, self.bias, activation="gelu")

    def relu(self, x: Tensor) -> Tensor:
        """The same, and what is below zero made zero."""
        return ops.linear(x, self.weight, self.bias, activation="relu")


@dataclass(frozen=True, slots=True)
class Norm:
    """An affine layer norm; computed in fp32."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """(..., width) in the dtype of x."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def after(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y in the dtype of x, and its norm in that of y; no y is zero, and the norm has the dtype of x then."""
        if y is None:
            return x, self(x)
        return ops.add_layer_norm(x, y, self.weight, self.bias, self.eps)

    def after_layer(self, x: Tensor, layer: Linear, given: Tensor) -> tuple[Tensor, Tensor]:
        """x + layer(given), and its norm."""
        return ops.linear_add_layer_norm(given, layer.weight, layer.bias, x, self.weight, self.bias, self.eps)


class Packer:
    """Reads a checkpoint's tensors into layers on one device.

    Args:
        tensors: by stored name.
        dtype: of matrices and biases, unless said otherwise; norms are fp32.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.tensors, self.dtype, self.device = tensors, dtype, device

    def place(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous copy on the device."""
        return tensor.to(device=self.device, dtype=dtype or self.dtype, copy=True).contiguous()

    def wide(self, name: str) -> Tensor:
        """The tensor called `name`, fp32."""
        return self.place(self.tensors[name], torch.float32)

    def linear(self, *names: str, dtype: torch.dtype | None = None) -> Linear:
        """The layers called `names`, one behind the other in one matrix."""
        weight = torch.cat([self.tensors[f"{name}.weight"] for name in names])
        biases = [self.tensors[f"{name}.bias"] for name in names if f"{name}.bias" in self.tensors]
        return Linear(self.place(weight, dtype), self.place(torch.cat(biases), dtype) if biases else None)

    def norm(self, name: str, eps: float) -> Norm:
        """The layer norm called `name`."""
        return Norm(self.wide(f"{name}.weight"), self.wide(f"{name}.bias"), eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation in fp32, rounded once. x (..., d); cos and sin (..., d) broadcast against it."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """q (B, S, heads, d), k and v (B, T, kv heads, d), mask (B, 1, 1, T) of what is seen -> (B, S, heads * d)."""
    return ops.attention(q, k, v, None if mask is None else mask[:, 0, 0], causal=causal).flatten(2)
