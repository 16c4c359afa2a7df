"""Observations to rows and predictions to robot actions, for one embodiment of a MiniCPM-RobotManip checkpoint."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.image_fit import fit_frame
from taktline_protocol.messages import ImageFit
from torch import Tensor

from taktline_worker.engine_options import config_error
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow
from taktline_worker.models.minicpm_robot.config import MiniCpmArchitecture, Stated
from taktline_worker.models.minicpm_robot.prompt import Prompt
from taktline_worker.observation import DEFAULT_MAX_PIXELS, EncodedImage, RobotInput, check_cameras, decode_image

MAX_CAMERAS = 8


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`taktline.json` of a MiniCPM-RobotManip folder; only `cameras` must be there, as no published file names them.

    Attributes:
        description: one sentence, for people.
        cameras: views in the order of the training, e.g. ["agentview", "wrist"] for LIBERO.
        embodiment: bank of the head; `model.statistics` overrides it.
        state_channels: [first, end) pairs of the network's state that the robot sends, one behind the other; the rest
            is zero. Unset sends all of it.
        action_channels: likewise of the actions that the robot gets.
        control_period_ms: time between two action rows; EngineOptions.control_period_ms overrides it.
        architecture: what neither config.json nor any shape tells.
    """

    description: str = ""
    cameras: tuple[str, ...] = ()
    embodiment: int = 0
    state_channels: tuple[tuple[int, int], ...] | None = None
    action_channels: tuple[tuple[int, int], ...] | None = None
    control_period_ms: float | None = None
    architecture: Stated = Stated()


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A checked observation whose images are still being decoded."""

    images: tuple[Future[Tensor], ...]
    finish: Callable[[Tensor], MiniCpmRow]

    def result(self) -> MiniCpmRow:
        """The finished row. Raises TaktlineError where an image is corrupt or too large."""
        return self.finish(torch.stack([image.result() for image in self.images]))


class MiniCpmProcessor:
    """Stateless after construction; safe to share between threads. Nothing is normalised: values are the robot's own.

    Args:
        cameras: robot camera name -> name in `sidecar.cameras`; empty takes those names.

    Raises:
        TaktlineError: CONFIG_INVALID for cameras, channels or an embodiment that do not fit.
    """

    def __init__(
        self,
        architecture: MiniCpmArchitecture,
        sidecar: Sidecar,
        prompt: Prompt,
        embodiment: int,
        cameras: Mapping[str, str],
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self.architecture = architecture
        size = architecture.vision.image_size
        self.image_fit = ImageFit(height=size, width=size, filter="bicubic", letterbox=False)
        self._prompt = prompt
        self._max_pixels = max_pixels
        head = architecture.head
        if not 0 <= embodiment < head.embodiments:
            raise config_error(
                f"embodiment {embodiment} is none of the checkpoint's {head.embodiments}",
                f"set model.statistics, or embodiment in taktline.json, to 0 .. {head.embodiments - 1}",
            )
        self.embodiment = embodiment
        self._state = _channels("state_channels", sidecar.state_channels, head.state_width)
        self._actions = _channels("action_channels", sidecar.action_channels, head.action_width)
        wanted = sidecar.cameras
        if not 1 <= len(wanted) <= MAX_CAMERAS or len(set(wanted)) != len(wanted):
            raise config_error(
                f"taktline.json names the cameras {list(wanted)}",
                f'name 1 to {MAX_CAMERAS} in the order of the training, e.g. "cameras": ["agentview", "wrist"]',
            )
        mapping = dict(cameras) or {name: name for name in wanted}
        if sorted(mapping.values()) != sorted(wanted):
            raise config_error(
                f"model.cameras names {sorted(mapping.values())}; the checkpoint reads {list(wanted)}",
                "map one robot camera to each of them, or map nothing",
            )
        robot_name = {key: name for name, key in mapping.items()}
        self.cameras = tuple(robot_name[key] for key in wanted)
        prompt.tokens("check", len(wanted))  # a template that takes no images is refused before the weights are read

    @property
    def state_dim(self) -> int:
        """Numbers that a robot sends."""
        return len(self._state)

    @property
    def action_dim(self) -> int:
        """Numbers of one action row."""
        return len(self._actions)

    def begin(self, observation: RobotInput, pool: Executor) -> PendingRow:
        """Checks an observation and hands its images to `pool`.

        Raises:
            TaktlineError: CAMERA_MISSING, CAMERA_UNKNOWN, STATE_INVALID or INSTRUCTION_INVALID.
        """
        check_cameras(observation.images, self.cameras)
        finish = self._finish(observation)
        images = tuple(pool.submit(self.patches, name, observation.images[name]) for name in self.cameras)
        return PendingRow(images, finish)

    def row(self, observation: RobotInput, patches: Tensor) -> MiniCpmRow:
        """The row of an observation whose images are patches (cameras, P, 3 * patch^2) already."""
        return self._finish(observation)(patches)

    def noise(self, seed: int) -> Tensor:
        """fp32 (H, action width): drawn on the CPU by a generator of its own, so no batch neighbour can change it."""
        head = self.architecture.head
        return torch.randn(head.horizon, head.action_width, generator=torch.Generator().manual_seed(seed))

    def patches(self, name: str, image: EncodedImage) -> Tensor:
        """fp32 (P, 3 * patch^2) in [-1, 1], row by row: the frame made square by Pillow's bicubic filter.

        Raises:
            TaktlineError: IMAGE_CORRUPT or IMAGE_TOO_LARGE.
        """
        v = self.architecture.vision
        frame = fit_frame(decode_image(name, image, self._max_pixels), self.image_fit)
        values = (torch.from_numpy(np.require(frame, requirements="W")).float() / 255.0 - 0.5) / 0.5
        cells = values.view(v.grid, v.patch, v.grid, v.patch, 3).permute(0, 2, 4, 1, 3)
        return cells.reshape(v.grid**2, -1)

    def decode(self, actions: Tensor, rows: int) -> NDArray[np.float32]:
        """float32 (rows, D) in robot units.

        Raises:
            TaktlineError: WORKER_FAILED where they are not finite.
        """
        found = actions[:rows, self._actions].numpy().astype(np.float32)
        if not np.isfinite(found).all():
            raise TaktlineError(
                ErrorCode.WORKER_FAILED,
                "the network's answer to this observation is not finite",
                "check the observation's state; if others fail too, check the checkpoint",
            )
        return found

    def _finish(self, observation: RobotInput) -> Callable[[Tensor], MiniCpmRow]:
        seed = secrets.randbits(63) if observation.seed is None else observation.seed
        return partial(
            MiniCpmRow,
            tokens=self._prompt.tokens(observation.instruction, len(self.cameras)),
            state=self._full_state(observation.state),
            noise=self.noise(seed),
            embodiment=self.embodiment,
        )

    def _full_state(self, state: NDArray[np.generic]) -> Tensor:
        if state.shape != (self.state_dim,):
            raise _state_error(f"it has shape {state.shape}, the policy reads ({self.state_dim},)", "send that many")
        values = state.astype(np.float32)
        if not np.isfinite(values).all():
            where = np.flatnonzero(~np.isfinite(values)).tolist()
            raise _state_error(f"entries {where[:8]} are NaN or infinite", "check the sensors")
        full = torch.zeros(self.architecture.head.state_width)
        full[self._state] = torch.from_numpy(values)
        return full


def _channels(field: str, stated: tuple[tuple[int, int], ...] | None, width: int) -> list[int]:
    """Indices of the stated ranges, in their order."""
    ranges = ((0, width),) if stated is None else stated
    found = [index for first, end in ranges for index in range(first, end)]
    fits = all(0 <= first < end <= width for first, end in ranges) and len(set(found)) == len(found)
    if not fits or (field == "action_channels" and not found):
        raise config_error(
            f"{field} in taktline.json is {[list(pair) for pair in ranges]}; the network has {width}",
            "state [first, end) pairs that do not overlap, e.g. [[7, 17]]",
        )
    return found


def _state_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.STATE_INVALID, f"the state is unusable: {reason}", next_step)
