"""What follows a prediction: the flow-matching solver's update, or the mix of clean actions with the noise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from taktline_kernels.ops.dispatch import register


def _euler_reference(x: Tensor, velocity: Tensor, dt: float) -> Tensor:
    return x + dt * velocity


def _clean_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, noise: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    clean = functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    return clean, torch.lerp(clean, noise, share).to(hidden.dtype)


_EULER = register("euler_update", _euler_reference, {})
_CLEAN = register(
    "clean_actions", _clean_reference, {"triton": "taktline_kernels.triton_impl.clean_actions:clean_actions"}
)


def euler_update(x: Tensor, velocity: Tensor, dt: float) -> Tensor:
    """One Euler step, x + dt * velocity, in fp32.

    Args:
        x: (batch, horizon, action_dim) fp32.
        velocity: likewise; the model predicts noise - action.
        dt: step, negative (t runs from 1, noise, to 0, action).

    Returns:
        Same shape, fp32.
    """
    shape = {"rows": x.numel() // x.shape[-1], "width": x.shape[-1]}
    result: Tensor = _EULER.run(shape, x, x, velocity.float(), dt)
    return result


def clean_actions(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, noise: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """The last layer of a head that predicts clean actions, and what its next step reads.

    Args:
        hidden: (..., k).
        weight: (n, k), fp32 for the full resolution of the actions.
        bias: (n,) or None.
        noise: (..., n) fp32.
        share: of the noise in the next step's input.

    Returns:
        the clean actions (..., n) fp32, and (1 - share) of them with share of the noise, in the dtype of hidden.
    """
    shape = {"rows": noise.numel() // noise.shape[-1], "width": weight.shape[0], "depth": weight.shape[1]}
    result: tuple[Tensor, Tensor] = _CLEAN.run(shape, hidden, hidden, weight, bias, noise, share)
    return result
