"""Observations to Cosmos3 requests, and the network's actions to robot units."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.models.cosmos3 import video
from taktline_worker.models.cosmos3.composition import COMPOSED, VIEWS, compose, to_frames
from taktline_worker.models.cosmos3.prompt import prompt_text
from taktline_worker.models.cosmos3.request import SPATIAL_FACTOR, PolicyRequest, draw_noise
from taktline_worker.models.cosmos3.settings import Serving
from taktline_worker.models.cosmos3.tokenizer import ChatTokenizer
from taktline_worker.observation import DEFAULT_MAX_PIXELS, EncodedImage, ImagineInput, RobotInput, decode_image

MAX_INSTRUCTION_CHARACTERS = 2000
MAX_PROMPT_TOKENS = 1024
"""Longest prompt; the released policies' training cut at four times as many, and no task needs a tenth."""
_SEEDS = 2**32
"""What the generator of the noise takes; of a longer seed the low bits count."""


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """What the runner takes, and what the robot wants to see of it."""

    request: PolicyRequest
    imagine: ImagineInput | None = None


@dataclass(frozen=True, slots=True)
class PendingCosmosRow:
    """A checked observation: its pictures are being decoded and its noise drawn."""

    frames: tuple[Future[NDArray[np.uint8]], ...]
    noise: Future[tuple[Tensor, Tensor]]
    conditional: tuple[int, ...]
    state: Tensor | None
    imagine: ImagineInput | None
    processor: Cosmos3Processor

    def result(self) -> PreparedRow:
        """The finished row. Raises TaktlineError where an image is corrupt."""
        return self.processor.finish_row(self)


class Cosmos3Processor:
    """Stateless after construction; safe to share between threads.

    Args:
        cameras: robot camera name -> view. The views are the three of `composition.VIEWS`, or `image` alone for robots
            that compose the picture themselves; empty takes the three under their own names.
        action_width: numbers of a row of actions in the network.

    Raises:
        TaktlineError: CONFIG_INVALID for a mapping that does not fit.
    """

    def __init__(
        self,
        serving: Serving,
        tokenizer: ChatTokenizer,
        cameras: Mapping[str, str],
        action_width: int,
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self.serving = serving
        self._tokenizer = tokenizer
        self._action_width = action_width
        self._max_pixels = max_pixels
        mapping = dict(cameras) or {name: name for name in VIEWS}
        views = sorted(mapping.values())
        if views not in (sorted(VIEWS), [COMPOSED]):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"model.cameras names the views {views}; the policy reads {list(VIEWS)}, or {COMPOSED!r} alone",
                "map one robot camera to each of the three, or one to the picture that the robot composes, or nothing",
            )
        robot_name = {view: name for name, view in mapping.items()}
        self.cameras = tuple(robot_name[view] for view in (VIEWS if len(views) > 1 else (COMPOSED,)))

    @property
    def state_dim(self) -> int:
        """Numbers of a robot's state; 0 where the request has none."""
        return self.serving.embodiment.dims if self.serving.settings.state_row else 0

    def begin(self, observation: RobotInput, pool: Executor) -> PendingCosmosRow:
        """Checks an observation and hands its images to `pool`.

        Raises:
            TaktlineError: CAMERA_MISSING, CAMERA_UNKNOWN, STATE_INVALID, INSTRUCTION_INVALID or IMAGINE_INVALID.
        """
        self._check_cameras(observation.images)
        state = self._state(observation.state)
        conditional = self._conditional(observation.instruction)
        imagine = self._imagine(observation.imagine)
        seed = (secrets.randbits(32) if observation.seed is None else observation.seed) % _SEEDS
        return PendingCosmosRow(
            frames=tuple(pool.submit(self._decode, name, observation.images[name]) for name in self.cameras),
            noise=pool.submit(draw_noise, self.serving.settings, self._action_width, seed),
            conditional=conditional,
            state=state,
            imagine=imagine,
            processor=self,
        )

    def finish_row(self, pending: PendingCosmosRow) -> PreparedRow:
        """The row of decoded frames. Raises TaktlineError where an image is corrupt or the views do not fit."""
        s = self.serving.settings
        frames = [frame.result() for frame in pending.frames]
        picture = frames[0] if len(frames) == 1 else compose(*frames)
        video_noise, action_noise = pending.noise.result()
        request = PolicyRequest(
            conditional=pending.conditional,
            unconditional=self._tokenizer.unconditional,
            frames=to_frames(picture, s.content, s.padded, s.encoded_frames),
            state=pending.state,
            video_noise=video_noise,
            action_noise=action_noise,
            imagine=pending.imagine is not None,
        )
        return PreparedRow(request, pending.imagine)

    def actions(self, actions: Tensor) -> NDArray[np.float32]:
        """Network output (actions, raw_dims) -> float32 (rows, D) in robot units.

        Raises:
            TaktlineError: WORKER_FAILED where it is not finite.
        """
        found = actions[: self.serving.rows].float().numpy().copy()
        if not np.isfinite(found).all():
            raise TaktlineError(
                ErrorCode.WORKER_FAILED,
                "the network's answer to this observation is not finite",
                "check the observation's state; if others fail too, check the checkpoint",
            )
        return self._turned(found)

    def _turned(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Numbers (..., D) between the robot's and the model's way of counting, which is the same way back."""
        if self.serving.settings.state_row:
            for place in self.serving.embodiment.flipped:
                values[..., place] = 1.0 - values[..., place]
        return values

    def _decode(self, name: str, image: EncodedImage) -> NDArray[np.uint8]:
        return decode_image(name, image, self._max_pixels)

    def _check_cameras(self, images: Mapping[str, EncodedImage]) -> None:
        wanted = ", ".join(self.cameras)
        unknown = sorted(images.keys() - set(self.cameras))
        if unknown:
            more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
            raise TaktlineError(
                ErrorCode.CAMERA_UNKNOWN,
                f"the policy has no camera {', '.join(repr(name[:64]) for name in unknown[:4])}{more}",
                f"send {wanted} and no other; model.cameras maps names",
            )
        missing = [name for name in self.cameras if name not in images]
        if missing:
            raise TaktlineError(
                ErrorCode.CAMERA_MISSING,
                f"views are missing: {', '.join(missing)}",
                f"send all of {wanted}: the policy was trained on no other picture",
            )

    def _state(self, state: NDArray[np.generic]) -> Tensor | None:
        if not self.state_dim:
            return None
        embodiment = self.serving.embodiment
        if state.shape != (embodiment.dims,):
            raise _state_error(
                f"it has shape {state.shape}, embodiment {embodiment.name!r} has ({embodiment.dims},)",
                f"send {embodiment.meaning}",
            )
        with np.errstate(over="ignore"):  # the check below has a better word for it
            values = state.astype(np.float32)
        if not np.isfinite(values).all():
            where = np.flatnonzero(~np.isfinite(values)).tolist()
            raise _state_error(f"entries {where[:8]} are NaN or infinite", "check the sensors")
        return torch.from_numpy(self._turned(values))

    def _conditional(self, instruction: str) -> tuple[int, ...]:
        if not instruction.strip():
            raise _instruction_error("it is empty", "say what the robot shall do")
        if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
            raise _instruction_error(
                f"it has {len(instruction)} characters, the limit is {MAX_INSTRUCTION_CHARACTERS}", "shorten it"
            )
        if "<|" in instruction:
            raise _instruction_error("it holds '<|', which begins the tokenizer's own symbols", "leave it out")
        s = self.serving
        ids = self._tokenizer.encode(prompt_text(s.prompt, instruction, s.view_text, s.settings))
        if len(ids) > MAX_PROMPT_TOKENS:
            raise _instruction_error(
                f"the prompt has {len(ids)} tokens, the limit is {MAX_PROMPT_TOKENS}", "shorten the instruction"
            )
        return ids

    def _imagine(self, imagine: ImagineInput | None) -> ImagineInput | None:
        if imagine is not None and not self.serving.imagine:
            raise TaktlineError(
                ErrorCode.IMAGINE_INVALID,
                "this deployment serves actions only",
                "leave imagine out, or set spec.engine.worldAction.imagine for a worker that keeps the video decoder",
            )
        if imagine is not None:
            video.check(imagine, self.serving.settings.latent_grid[1] * SPATIAL_FACTOR)
        return imagine


def _state_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.STATE_INVALID, f"the state is unusable: {reason}", next_step)


def _instruction_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INSTRUCTION_INVALID, f"the instruction is unusable: {reason}", next_step)
