"""The flow-matching solver's update."""

from __future__ import annotations

from torch import Tensor

from taktline_kernels.ops.dispatch import register


def _euler_reference(x: Tensor, velocity: Tensor, dt: float) -> Tensor:
    return x + dt * velocity


_EULER = register("euler_update", _euler_reference, {})


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
