"""Poses of nine numbers, xyz and the first two rows of a rotation, and how a relative one is composed with another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def matrices(rot6d: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotations (..., 3, 3) of two rows (..., 6), made orthonormal by Gram and Schmidt in float64."""
    first, second = rot6d[..., :3], rot6d[..., 3:]
    first = first / np.linalg.norm(first, axis=-1, keepdims=True)
    second = second - (first * second).sum(axis=-1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack((first, second, np.cross(first, second)), axis=-2)


def compose_poses(reference: NDArray[np.float64], relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """T_reference @ T_relative: reference (9,), relative (T, 9) -> (T, 9)."""
    start = matrices(reference[3:])
    turned = start @ matrices(relative[:, 3:])
    position = relative[:, :3] @ start.T + reference[:3]
    return np.concatenate((position, turned[:, 0], turned[:, 1]), axis=1)


def relative_poses(reference: NDArray[np.float64], absolute: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse: T_reference^-1 @ T_absolute, absolute (T, 9) -> (T, 9)."""
    start = matrices(reference[3:])
    turned = start.T @ matrices(absolute[:, 3:])
    position = (absolute[:, :3] - reference[:3]) @ start
    return np.concatenate((position, turned[:, 0], turned[:, 1]), axis=1)
