"""Observations to rows and network outputs to robot actions, for one embodiment of a GR00T checkpoint."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor

from taktline_worker.checkpoint import refuse
from taktline_worker.models.groot.batch import GrootRow
from taktline_worker.models.groot.config import GrootArchitecture
from taktline_worker.models.groot.embodiment import TOKENIZER_FILE, Embodiment, find
from taktline_worker.models.groot.images import scaled, to_patches
from taktline_worker.models.groot.rtc import RtcRow, read_row
from taktline_worker.observation import DEFAULT_MAX_PIXELS, EncodedImage, RobotInput, check_cameras, decode_image

IMAGE_TOKEN = "<|image_pad|>"  # noqa: S105 (a token of text)
MAX_INSTRUCTION_CHARACTERS = 4096
MAX_TOKENS = 1024
"""Longest sequence of images and text in one request."""
_PUNCTUATION = re.compile(r"[^\w\s]")


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """What the runner takes, and the raw state that relative actions start from."""

    row: GrootRow
    state: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PendingGrootRow:
    """A checked observation whose images are still being decoded."""

    images: tuple[Future[tuple[Tensor, tuple[int, int]]], ...]
    finish: Callable[[list[tuple[Tensor, tuple[int, int]]]], PreparedRow]

    def result(self) -> PreparedRow:
        """The finished row. Raises TaktlineError where an image is corrupt or the sequence gets too long."""
        return self.finish([image.result() for image in self.images])


class GrootProcessor:
    """Stateless after construction; safe to share between threads.

    Args:
        cameras: robot camera name -> checkpoint name; empty takes the checkpoint's own names.

    Raises:
        TaktlineError: CONFIG_INVALID for a mapping that does not fit; CHECKPOINT_INVALID for a tokenizer of another
            model.
    """

    def __init__(
        self,
        architecture: GrootArchitecture,
        embodiment: Embodiment,
        tokenizer: tokenizers.Tokenizer,
        cameras: Mapping[str, str],
        max_pixels: int = DEFAULT_MAX_PIXELS,
    ) -> None:
        self.architecture = architecture
        self.embodiment = embodiment
        self._tokenizer = tokenizer
        self._max_pixels = max_pixels
        found = tokenizer.token_to_id(IMAGE_TOKEN)
        if found != architecture.text.image_token:
            raise refuse(
                f"{TOKENIZER_FILE} has {IMAGE_TOKEN} as {found}, the backbone's is {architecture.text.image_token}",
                "copy the tokenizer of the backbone's own repository",
            )
        wanted = embodiment.cameras
        mapping = dict(cameras) or {name: name for name in wanted}
        if sorted(mapping.values()) != sorted(wanted):
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"model.cameras names {sorted(mapping.values())}; embodiment {embodiment.tag!r} reads {list(wanted)}",
                "map one robot camera to each of them, or map nothing",
            )
        robot_name = {key: name for name, key in mapping.items()}
        self.cameras = tuple(robot_name[key] for key in wanted)

    def begin(self, observation: RobotInput, pool: Executor) -> PendingGrootRow:
        """Checks an observation and hands its images to `pool`.

        Raises:
            TaktlineError: CAMERA_MISSING, CAMERA_UNKNOWN, STATE_INVALID, INSTRUCTION_INVALID or RTC_INVALID.
        """
        check_cameras(observation.images, self.cameras)
        state = self._state(observation.state)
        text = self.text(observation.instruction)
        rtc = None
        if observation.rtc is not None:
            head = self.architecture.head
            rtc = read_row(self.embodiment, observation.rtc, state, head.horizon, head.action_width, head.rtc_rate)
        seed = secrets.randbits(63) if observation.seed is None else observation.seed
        finish = partial(self._finish, text=text, state=state, noise=self.noise(seed), rtc=rtc)
        return PendingGrootRow(
            tuple(pool.submit(self._patches, name, observation.images[name]) for name in self.cameras), finish
        )

    def noise(self, seed: int) -> Tensor:
        """fp32 (H, action width): drawn on the CPU by a generator of its own, so no batch neighbour can change it."""
        head = self.architecture.head
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(head.horizon, head.action_width, generator=generator)

    def text(self, instruction: str) -> str:
        """The instruction as the network was trained to read it.

        Raises:
            TaktlineError: INSTRUCTION_INVALID where it is empty, too long, or holds the tokenizer's own symbols.
        """
        if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
            raise _instruction_error(
                f"it has {len(instruction)} characters, the limit is {MAX_INSTRUCTION_CHARACTERS}", "shorten it"
            )
        if self.embodiment.formalize_language:
            instruction = _PUNCTUATION.sub("", instruction.lower())
        if not instruction.strip():
            raise _instruction_error("it is empty", "say what the robot shall do")
        if "<|" in instruction:
            raise _instruction_error("it holds '<|', which begins the tokenizer's own symbols", "leave it out")
        return instruction

    def tokens(self, text: str, images: list[int]) -> NDArray[np.int64]:
        """Ids of one user turn: every image first, then the text.

        Args:
            images: image tokens of each image.

        Raises:
            TaktlineError: INSTRUCTION_INVALID where the sequence is too long.
        """
        frames = "".join(f"<|vision_start|>{IMAGE_TOKEN * count}<|vision_end|>" for count in images)
        prompt = f"<|im_start|>user\n{frames}{text}<|im_end|>\n"
        ids = np.array(self._tokenizer.encode(prompt, add_special_tokens=False).ids, np.int64)
        if len(ids) > MAX_TOKENS:
            raise _instruction_error(
                f"with {sum(images)} image tokens the prompt has {len(ids)}, the limit is {MAX_TOKENS}",
                "shorten the instruction, or send smaller frames",
            )
        if int((ids == self.architecture.text.image_token).sum()) != sum(images):
            raise _instruction_error("it cannot be told from the images", "leave symbols out of it")
        return ids

    def normalised(self, state: NDArray[np.float64]) -> Tensor:
        """The raw state (D,) as the network reads it: fp32 (state width,), zero-padded."""
        e = self.embodiment
        out = torch.zeros(self.architecture.head.state_width)
        if e.exclude_state:
            return out
        parts, start = [], 0
        for part in e.state:
            parts.append(part.normalised(state[start : start + part.width], e.clip))
            start += part.width
        values = np.concatenate(parts).astype(np.float32)
        if not np.isfinite(values).all():
            raise _state_error("it is out of all proportion to the checkpoint's statistics", "check the state's units")
        out[: len(values)] = torch.from_numpy(values)
        return out

    def decode(self, actions: Tensor, state: NDArray[np.float64]) -> NDArray[np.float32]:
        """Network output (H, action width) -> float32 (rows, D) in robot units, relative parts made absolute.

        Raises:
            TaktlineError: WORKER_FAILED where it is not finite.
        """
        e = self.embodiment
        values = actions[: e.rows].double().numpy()
        parts, start = [], 0
        for part in e.actions:
            parts.append(part.decoded(values[:, start : start + part.width], state))
            start += part.width
        result = np.concatenate(parts, axis=1).astype(np.float32)
        if not np.isfinite(result).all():
            raise TaktlineError(
                ErrorCode.WORKER_FAILED,
                "the network's answer to this observation is not finite",
                "check the observation's state; if others fail too, check the checkpoint",
            )
        return result

    def _finish(
        self,
        images: list[tuple[Tensor, tuple[int, int]]],
        text: str,
        state: NDArray[np.float64],
        noise: Tensor,
        rtc: RtcRow | None,
    ) -> PreparedRow:
        side = self.architecture.vision.merge**2
        row = GrootRow(
            patches=tuple(patches for patches, _ in images),
            grids=tuple(grid for _, grid in images),
            tokens=self.tokens(text, [len(patches) // side for patches, _ in images]),
            state=self.normalised(state),
            noise=noise,
            embodiment=self.embodiment.slot,
            rtc=rtc,
        )
        return PreparedRow(row, state)

    def _patches(self, name: str, image: EncodedImage) -> tuple[Tensor, tuple[int, int]]:
        v = self.architecture.vision
        frame = scaled(decode_image(name, image, self._max_pixels), self.embodiment.transform)
        return to_patches(frame, v.patch, v.merge, v.temporal)

    def _state(self, state: NDArray[np.generic]) -> NDArray[np.float64]:
        e = self.embodiment
        if state.shape != (e.state_dim,):
            parts = ", ".join(f"{part.key} {part.width}" for part in e.state)
            raise _state_error(
                f"it has shape {state.shape}, embodiment {e.tag!r} has ({e.state_dim},)",
                f"send {parts}, one behind the other",
            )
        values = state.astype(np.float64)
        with np.errstate(over="ignore"):  # what is beyond float32 would be infinite in the answer's units
            finite = np.isfinite(values.astype(np.float32))
        if not finite.all():
            where = np.flatnonzero(~finite).tolist()
            raise _state_error(f"entries {where[:8]} are NaN, infinite or beyond float32", "check the sensors")
        return values


def open_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The backbone's tokenizer.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where the file is missing or corrupt.
    """
    path = find(folder, TOKENIZER_FILE)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise refuse(f"{path} is no tokenizer: {error}", "copy it again from the backbone's repository") from error


def _state_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.STATE_INVALID, f"the state is unusable: {reason}", next_step)


def _instruction_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INSTRUCTION_INVALID, f"the instruction is unusable: {reason}", next_step)
