"""Observations to planner rows: camera frame and goal image as pixels, the end-effector pose, the search settings."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.images import jpeg_size, png_size
from torch import Tensor
from torch.nn import functional

from taktline_worker.models.vjepa2_ac.config import ACTION_WIDTH, POSE_WIDTH
from taktline_worker.observation import DEFAULT_MAX_PIXELS, EncodedImage, RobotInput, SearchInput, decode_image
from taktline_worker.planning.settings import (
    SearchChanges,
    SearchLimits,
    SearchSettings,
    resolve,
    search_error,
)

CAMERA = "camera"
GOAL = "goal"
_KEYS = (CAMERA, GOAL)
_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)
_FULL = 255.0
_MOST = 1e6
"""Metres, or radians: what no arm's pose is. The network's sums overflow far beyond it, and the search would fail."""


@dataclass(frozen=True, slots=True)
class PlannerRow:
    """One robot's search before encoding.

    Attributes:
        pixels: fp32 (2, 3, size, size), the frame and the goal, normalised.
        pose: fp32 (7,).
        previous: fp32 (n, 7) the plan to warm-start from, or None.
        pending: fp32 (n, 7) actions whose expected outcome the plan begins at, or None.
        budget_s: seconds that the search may take from the start of its run; None = all rounds.
        expires_at: monotonic instant of the hand-off deadline; None = none.
    """

    pixels: Tensor
    pose: Tensor
    settings: SearchSettings
    seed: int
    previous: Tensor | None = None
    pending: Tensor | None = None
    budget_s: float | None = None
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class PendingPlannerRow:
    """A checked observation whose two images are still being decoded; `finish` makes its row of their pixels."""

    images: tuple[Future[Tensor], ...]
    finish: Callable[[Tensor], PlannerRow]

    def result(self) -> PlannerRow:
        """The finished row. Raises TaktlineError where an image is corrupt or too large."""
        return self.finish(torch.stack([image.result() for image in self.images]))


class PlannerProcessor:
    """Stateless after construction; safe to share between threads.

    Args:
        image_size: side of the network's square input.
        settings: of the deployment; a request changes some of them within `limits`.
        cameras: robot camera name -> `camera` or `goal`; empty takes these two names.

    Raises:
        TaktlineError: CONFIG_INVALID where `cameras` does not name both, once each.
    """

    def __init__(
        self,
        image_size: int,
        settings: SearchSettings,
        limits: SearchLimits,
        cameras: Mapping[str, str],
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self.image_size = image_size
        self.settings = settings
        self.limits = limits
        self._max_pixels = max_pixels
        mapping = dict(cameras) or {key: key for key in _KEYS}
        if sorted(mapping.values()) != sorted(_KEYS):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"model.cameras is {mapping}; a planner reads one {CAMERA!r} and one {GOAL!r}",
                f"map one robot camera name to {CAMERA!r} and one to {GOAL!r}, or map nothing",
            )
        robot_name = {key: name for name, key in mapping.items()}
        self.cameras = tuple(robot_name[key] for key in _KEYS)

    def begin(self, observation: RobotInput, pool: Executor) -> PendingPlannerRow:
        """Checks an observation and hands its images to `pool`.

        Raises:
            TaktlineError: CAMERA_MISSING, CAMERA_UNKNOWN, IMAGE_CORRUPT, GOAL_INVALID, STATE_INVALID, SEARCH_INVALID
                or BUDGET_INVALID.
        """
        frame, goal = self._frames(observation.images)
        self._check_goal(frame, goal)
        pose = _pose(observation.state)
        asked = observation.search or SearchInput()
        changes = SearchChanges(asked.candidates, asked.rounds, asked.elites, asked.horizon, asked.anytime)
        settings = resolve(self.settings, changes, self.limits)
        finish = partial(
            PlannerRow,
            pose=pose,
            settings=settings,
            seed=secrets.randbits(63) if observation.seed is None else observation.seed,
            previous=_plan("previous plan", asked.previous, 1024),
            pending=_plan("plan under way", asked.pending, self.limits.horizon),
            budget_s=_budget(asked.budget_ms),
            expires_at=observation.expires_at,
        )
        images = zip(self.cameras, (frame, goal), strict=True)
        return PendingPlannerRow(tuple(pool.submit(self._pixels, name, image) for name, image in images), finish)

    def _pixels(self, name: str, image: EncodedImage) -> Tensor:
        return to_pixels(decode_image(name, image, self._max_pixels), self.image_size)

    def _frames(self, images: Mapping[str, EncodedImage]) -> tuple[EncodedImage, EncodedImage]:
        wanted = " and ".join(repr(name) for name in self.cameras)
        unknown = [name for name in images if name not in self.cameras]
        if unknown:
            raise TaktlineError(
                ErrorCode.CAMERA_UNKNOWN,
                f"the planner has no camera {', '.join(repr(name[:64]) for name in unknown[:4])}",
                f"send {wanted}; model.cameras maps names",
            )
        missing = [name for name in self.cameras if name not in images]
        if missing:
            raise TaktlineError(
                ErrorCode.CAMERA_MISSING,
                f"images are missing: {', '.join(missing)}",
                f"send {wanted}: what the camera sees, and what it shall see at the end",
            )
        return images[self.cameras[0]], images[self.cameras[1]]

    def _check_goal(self, frame: EncodedImage, goal: EncodedImage) -> None:
        """A goal of another size or colour than the frame is from another camera, and would be searched for in vain."""
        sizes = [_header(name, image) for name, image in zip(self.cameras, (frame, goal), strict=True)]
        if sizes[0] != sizes[1] or sizes[1][2] != 3:
            shown = [f"{width} x {height} with {channels} channels" for height, width, channels in sizes]
            raise TaktlineError(
                ErrorCode.GOAL_INVALID,
                f"the goal image is {shown[1]}, the camera frame {shown[0]}",
                "take the goal with the same camera as the frames, in RGB and at the same size",
            )


def to_pixels(frame: NDArray[np.uint8], size: int) -> Tensor:
    """The network's input fp32 (3, size, size) of a frame uint8 (H, W, 3): centre square, bilinear, ImageNet scale.

    The official transform draws random crops whose range is the whole picture; for any frame that is not square the
    draws cannot fit and it takes the centre, so this is its value for every seed. The resize does not antialias.
    """
    height, width, _ = frame.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = torch.from_numpy(frame[top : top + side, left : left + side].copy()).permute(2, 0, 1).float()
    if side != size:
        square = functional.interpolate(square[None], (size, size), mode="bilinear", align_corners=False)[0]
    mean = torch.tensor(_MEAN)[:, None, None] * _FULL
    std = torch.tensor(_STD)[:, None, None] * _FULL
    return (square - mean) / std


def _header(name: str, image: EncodedImage) -> tuple[int, int, int]:
    """Height, width and channels as the header declares them; the decoding checks them once more."""
    if image.encoding == "jpeg":
        return jpeg_size(bytes(image.data), name)
    if image.encoding == "png":
        return png_size(bytes(image.data), name)
    if image.encoding != "raw" or len(image.shape) != 3:
        raise TaktlineError(
            ErrorCode.IMAGE_CORRUPT,
            f"the image {name!r} has encoding {image.encoding[:32]!r} and shape {tuple(image.shape)}",
            "send jpeg, png, or raw uint8 RGB of shape (H, W, 3)",
        )
    return image.shape[0], image.shape[1], image.shape[2]


def _pose(state: NDArray[np.generic]) -> Tensor:
    if state.shape != (POSE_WIDTH,):
        raise _state_error(
            f"it has shape {state.shape}, the planner needs ({POSE_WIDTH},)",
            "send xyz in metres, extrinsic xyz Euler angles in radians, and gripper closedness",
        )
    values, good = _narrow(state)
    if not good.all():
        where = np.flatnonzero(~good).tolist()
        raise _state_error(f"entries {where} are NaN, infinite or beyond {_MOST:g}", "check the sensors and the units")
    return torch.from_numpy(values)


def _narrow(values: NDArray[np.generic]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Metres and radians in the network's own width, and which of them can be any."""
    with np.errstate(over="ignore"):  # what is beyond float32 is infinite in it
        narrow = values.astype(np.float32)
    return narrow, np.abs(narrow) <= _MOST


def _plan(name: str, plan: NDArray[np.generic] | None, most: int) -> Tensor | None:
    if plan is None:
        return None
    if plan.ndim != 2 or plan.shape[1] != ACTION_WIDTH or not 1 <= len(plan) <= most:
        raise search_error(
            f"the {name} has shape {plan.shape}, not (n, {ACTION_WIDTH}) with n from 1 to {most}",
            "send back actions of the last answer",
        )
    values, good = _narrow(plan)
    if not good.all():
        raise search_error(
            f"the {name} holds NaN, infinity or a number beyond {_MOST:g}", "send back actions of the last answer"
        )
    return torch.from_numpy(values)


def _budget(budget_ms: float | None) -> float | None:
    if budget_ms is None:
        return None
    if not (np.isfinite(budget_ms) and budget_ms > 0):
        raise TaktlineError(
            ErrorCode.BUDGET_INVALID, f"search.budget_ms is {budget_ms}", "send a positive number, or leave it out"
        )
    return budget_ms / 1000.0


def _state_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.STATE_INVALID, f"the state is unusable: {reason}", next_step)
