"""End-effector poses: xyz in metres, extrinsic xyz Euler angles in radians, gripper closedness; deltas integrated."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this cosine of the pitch, roll and yaw are one angle and the yaw is set to zero.
_GIMBAL = 1e-7


def integrate(pose: Tensor, action: Tensor) -> Tensor:
    """The pose after one action: xyz + d, R(d) R(theta) as canonical Euler angles, gripper + g clipped to [0, 1].

    Angles go through fp64, so that their round trip costs no precision. Angles outside the canonical range come back
    re-wrapped, also for a rotation of zero.

    Args:
        pose: (..., 7) fp32 or fp64.
        action: (..., 7), same dtype.

    Returns:
        (..., 7) in the dtype of `pose`.
    """
    position = pose[..., :3] + action[..., :3]
    turned = matrix(action[..., 3:6].double()) @ matrix(pose[..., 3:6].double())
    gripper = (pose[..., 6:] + action[..., 6:]).clamp(0.0, 1.0)
    return torch.cat((position, euler(turned).to(pose.dtype), gripper), dim=-1)


def matrix(angles: Tensor) -> Tensor:
    """Rz(c) Ry(b) Rx(a) of angles (..., 3) = (a, b, c): (..., 3, 3)."""
    (ca, cb, cc), (sa, sb, sc) = angles.cos().unbind(-1), angles.sin().unbind(-1)
    entries = (
        cc * cb, cc * sb * sa - sc * ca, cc * sb * ca + sc * sa,
        sc * cb, sc * sb * sa + cc * ca, sc * sb * ca - cc * sa,
        -sb, cb * sa, cb * ca,
    )  # fmt: skip
    return torch.stack(entries, dim=-1).reshape(*angles.shape[:-1], 3, 3)


def euler(rotation: Tensor) -> Tensor:
    """Canonical angles (..., 3) of rotations (..., 3, 3): pitch in +-pi/2, the others in +-pi."""
    cos_pitch = torch.hypot(rotation[..., 0, 0], rotation[..., 1, 0])
    pitch = torch.atan2(-rotation[..., 2, 0], cos_pitch)
    locked = cos_pitch < _GIMBAL
    roll = torch.where(
        locked,
        torch.atan2(-rotation[..., 1, 2], rotation[..., 1, 1]),
        torch.atan2(rotation[..., 2, 1], rotation[..., 2, 2]),
    )
    yaw = torch.where(locked, torch.zeros_like(roll), torch.atan2(rotation[..., 1, 0], rotation[..., 0, 0]))
    return torch.stack((roll, pitch, yaw), dim=-1)
