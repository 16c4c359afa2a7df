"""Observations to network rows and network actions to robot units, by the conventions of the checkpoint."""

from __future__ import annotations

import copy
import functools
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.image_fit import fitted_size
from torch import Tensor

from taktline_worker.adapter import Frame
from taktline_worker.frames import FrameCache, frame_key
from taktline_worker.jpeg_threads import BegunFrame, JpegThreads, Memory
from taktline_worker.models.pi import aloha
from taktline_worker.models.pi.camera_names import CameraNames
from taktline_worker.models.pi.config import PiArchitecture, PiConventions
from taktline_worker.models.pi.frame_memory import FrameMemory, FramesAhead, Shape
from taktline_worker.models.pi.native_rows import NativePrompts, NativeRows, native_prompts
from taktline_worker.models.pi.normalise import state_bins
from taktline_worker.models.pi.pending import BegunByOthers, BegunPiRow, PendingPiRow, PreparedRow
from taktline_worker.models.pi.resize import to_model_input
from taktline_worker.models.pi.rtc import read_row
from taktline_worker.models.pi.tokenizer import BOS_ID, Tokenizer
from taktline_worker.models.pi.unnormalise import Unnormaliser
from taktline_worker.observation import DEFAULT_MAX_PIXELS, EncodedImage, RobotInput, decode_image
from taktline_worker.rtc import RtcSettings, cut_to

# Far above any token budget; keeps the tokenizer from chewing on megabytes.
MAX_INSTRUCTION_CHARACTERS = 4096


class PiProcessor:
    """Stateless after construction; safe to share between threads.

    Args:
        cameras: robot camera name -> checkpoint key; empty takes the checkpoint's own names.
        max_pixels: frames above it are refused by their header.
        rtc: what to do with the tail of a robot's last chunk; None refuses one.
        frame_bytes: memory for the pixels of frames seen before; 0 keeps none.

    Attributes:
        raw: leave the resizing to the runner, for rows without a tail. Both are set before the first observation.
        raw_tails: for rows with a tail too, which run among the others then.
        frames: memory of the frames that the runner resizes.
        native: threads that decode those before anybody asks for them; None leaves them to the engine's pool.
        ahead: memory that the next of those frames go to.
        prompts: prompts of rows whose frames those have begun; None leaves all to `tokens`.
        unnormalise: network outputs on the CPU to robot units.

    Raises:
        TaktlineError: CONFIG_INVALID where `cameras` names a camera the checkpoint lacks, or leaves one out.
    """

    def __init__(
        self,
        architecture: PiArchitecture,
        conventions: PiConventions,
        tokenizer: Tokenizer,
        cameras: Mapping[str, str],
        max_pixels: int = DEFAULT_MAX_PIXELS,
        rtc: RtcSettings | None = None,
        frame_bytes: int = 0,
    ) -> None:
        self.architecture = architecture
        self.conventions = conventions
        self.rtc = rtc
        self.raw, self.raw_tails = False, False
        self._whole: tuple[RtcSettings, int] | None = None
        self.seen: FrameCache[tuple[Tensor, bytes]] = FrameCache(frame_bytes)
        """Network inputs by the digest of their frames; where the runner resizes them, frames by their `_sketch`, or by
        `BegunFrame.key`, with the bytes that they were decoded from."""
        self.frames = FrameMemory()
        self.ahead = FramesAhead(self.frames)
        self.native: JpegThreads | None = None
        self.prompts: NativePrompts | None = None
        self._noise: deque[Tensor] = deque()
        self._tokenizer = tokenizer
        self.unnormalise = Unnormaliser(conventions.action_normaliser, conventions.action_dim, torch.device("cpu"))
        self._max_pixels = max_pixels
        self.cameras = CameraNames(conventions.slots, cameras)
        self.required_cameras, self.optional_cameras = self.cameras.required, self.cameras.optional

    def begin_frames(self, frames: Sequence[tuple[str, Frame]]) -> list[BegunFrame | None]:
        """Begins to decode what native threads can and nobody seems to have seen: `EncodedImage.begun` of each frame.

        What is to be refused is left to `begin`.
        """
        begun: list[BegunFrame | None] = [None] * len(frames)
        native = self.native
        if native is None or not self.raw:
            return begun
        places = [
            at
            for at, (name, (encoding, _, data)) in enumerate(frames)
            if encoding == "jpeg" and data and name in self.cameras
        ]
        batch = native.batch(tuple([frames[at][1][2] for at in places]))
        memory: list[Memory | None] = []
        for at, shape, key in zip(places, batch.shapes, batch.keys, strict=True):
            known = self._known(key, frames[at][1][2]) if shape is not None and self.seen.limit_bytes else None
            if known is not None:
                begun[at] = BegunFrame(known, key)
            taken = shape is not None and known is None and self._is_good(shape)
            memory.append(self.ahead.take(shape) if taken and shape is not None else None)
        for at, one in zip(places, native.begin(batch, memory), strict=True):
            begun[at] = begun[at] or one
        return begun

    def _known(self, key: int, data: bytes | memoryview) -> Tensor | None:
        """The pixels of a frame seen before."""
        kept = self.seen.get(key)
        return None if kept is None or kept[1] != bytes(data) else kept[0]

    def _keep(self, image: EncodedImage, early: BegunFrame) -> None:
        if self.seen.limit_bytes and not early.was_known:
            file = bytes(image.data)
            self.seen.put(early.key, (early.pixels, file), early.pixels.numel() + len(file))

    def look_ahead(self, rows: Sequence[PreparedRow]) -> None:
        """Behind the launch of these, while the engine runs: keeps their frames, and gets what the next ones need."""
        shapes = []
        for image in [image for row in rows for image in row.images]:
            if image.begun is not None:
                self._keep(image, image.begun)
                shapes.append(image.begun.shape)
        self.ahead.look_ahead(shapes)
        if self.prompts is not None:
            self.prompts.look_ahead()
        if not self._noise:
            self._noise.append(self.noise(secrets.randbits(63)))

    def begin(self, observation: RobotInput, pool: Executor) -> PendingPiRow | BegunPiRow:
        """Checks an observation, and hands to `pool` its images, unless others have begun them, and its prompt.

        Raises:
            TaktlineError: CAMERA_MISSING, CAMERA_UNKNOWN, STATE_INVALID, RTC_INVALID or INSTRUCTION_INVALID.
        """
        frames = self.cameras.in_order(observation.images)
        ordinary = self.prompts is not None and observation.rtc is None
        begun_row = self._begun(frames, observation, pool) if ordinary else None
        return self._pending(frames, observation, pool) if begun_row is None else begun_row

    def _begun(
        self, frames: list[tuple[str, EncodedImage]], observation: RobotInput, pool: Executor
    ) -> BegunPiRow | None:
        """The row of an ordinary observation whose frames have all been begun."""
        assert self.prompts is not None
        if not self.raw or not all(image.begun is not None for _, image in frames):
            return None
        state = observation.state
        try:
            tokens = self.prompts.tokens(observation.instruction, state, self._words)
        except TaktlineError:
            return None  # the long way judges: it knows the state, which has its word first
        if tokens is None:
            return None
        images, noise = tuple([image for _, image in frames]), self.drawn(observation.seed)
        again = functools.partial(self._pending, frames, observation, pool)
        return BegunPiRow(images, tokens, noise, state.astype(np.float64), again)

    def _pending(self, frames: list[tuple[str, EncodedImage]], observation: RobotInput, pool: Executor) -> PendingPiRow:
        raw = self.raw and (observation.rtc is None or self.raw_tails)
        state = self._state(observation.state)
        policy_state = aloha.to_policy_state(state) if self.conventions.adapt_to_pi else state
        with np.errstate(over="ignore", invalid="ignore"):  # the check below has a better word for it
            normalised = self.conventions.state_normaliser.forward(policy_state)
        if not np.isfinite(normalised.astype(np.float32)).all():
            raise _state_error("it is out of all proportion to the checkpoint's statistics", "check the state's units")
        # Now; who is refused above costs nobody a frame.
        begun: set[str] = set()
        decode = tuple(functools.partial(self._pixels, name, image, raw, begun) for name, image in frames)
        pixels = tuple(
            BegunByOthers(one) if image.begun is not None and raw else pool.submit(one)
            for one, (_, image) in zip(decode, frames, strict=True)
        )
        begun.update(name for name, image in frames if image.begun is not None and raw)
        text = functools.partial(self._text, observation.instruction, normalised, observation.seed)
        rtc = None
        if observation.rtc is not None and self.rtc is not None:  # without settings the engine has refused it
            width = self.architecture.action_width
            sent = observation.rtc
            if self._whole is not None:
                sent = cut_to(sent, self.conventions.horizon, *self._whole, self.conventions.action_dim)
            rtc = read_row(self.conventions, self.rtc, width, sent, policy_state)
        model_state = None
        if self.architecture.family == "pi0":
            model_state = torch.zeros(self.architecture.action_width)
            model_state[: len(normalised)] = torch.from_numpy(normalised.astype(np.float32))
        return PendingPiRow(pixels, decode, text, model_state, policy_state, rtc, raw, begun)

    def shortened(self, horizon: int) -> PiProcessor:
        """The same for chunks of `horizon` actions, fewer than robots know of; it shares the frames seen before.

        Where the whole policy was trained with delays, it keeps to those that such a chunk has.
        """
        found = copy.copy(self)
        found.conventions, found._noise = replace(self.conventions, horizon=horizon), deque()
        if self.rtc is not None:
            found._whole = self.rtc, self.conventions.horizon
            found.rtc = replace(self.rtc, max_delay=min(self.rtc.max_delay, horizon))
        return found

    def look_prompts_up(self, rows: NativeRows) -> None:
        """Lets `prompts` make those that it can."""
        self.prompts = native_prompts(rows, self.conventions, self._tokenizer, self.architecture.vocabulary)

    def _words(self, instruction: str) -> str:
        """The words of an instruction in the prompt. Raises TaktlineError INSTRUCTION_INVALID as `tokens`."""
        self.tokens(instruction, np.zeros(0))
        return cleaned(instruction)

    def _text(
        self, instruction: str, normalised: NDArray[np.floating], seed: int | None
    ) -> tuple[NDArray[np.int64], Tensor]:
        """Tokens and noise of a row."""
        return self.tokens(instruction, normalised), self.drawn(seed)

    def drawn(self, seed: int | None) -> Tensor:
        """Noise by a seed; of none that somebody has seen where it is None, and then it may have been drawn ahead."""
        if seed is not None:
            return self.noise(seed)
        try:
            return self._noise.pop()
        except IndexError:
            return self.noise(secrets.randbits(63))

    def _pixels(self, name: str, image: EncodedImage, raw: bool, begun: set[str]) -> tuple[Tensor, bytes]:
        """A frame (`raw`) or its network input, and its key, empty where none is kept; the same bytes give the same.

        It is noted in `begun` when what follows needs no lock, or nothing does.
        """
        try:
            if raw and image.begun is not None and image.begun.decoded():
                self._keep(image, image.begun)
                return image.begun.pixels, b""
            key = b""
            if self.seen.limit_bytes:
                key = _sketch(image.encoding, image.shape, image.data) if raw else frame_key(image)
            kept = self.seen.get(key) if key else None
            if kept is not None and (not raw or kept[1] == bytes(image.data)):
                return kept[0], b"" if raw else key
            if raw:
                whole = image if image.begun is None else EncodedImage(image.encoding, bytes(image.data), image.shape)
                pixels = self._decoded(name, whole, begun)
            else:
                frame = decode_image(name, image, self._max_pixels)
                self._check_fitted(name, frame.shape)
                pixels = to_model_input(frame, self.architecture.image_size, self.conventions.resize)
            if key:
                file = bytes(image.data) if raw else b""
                self.seen.put(key, (pixels, file), pixels.numel() * pixels.element_size() + len(file))
            return pixels, b"" if raw else key
        finally:
            begun.add(name)

    def _decoded(self, name: str, image: EncodedImage, begun: set[str]) -> Tensor:
        """A frame, uint8 (H, W, 3), in memory of `frames`."""
        taken: list[Tensor] = []

        def memory(shape: Shape) -> NDArray[np.uint8]:
            self._check_fitted(name, shape)  # here: the runner resizes a whole batch
            taken.append(self.frames.take(shape))
            begun.add(name)
            return np.asarray(taken[-1])

        decode_image(name, image, self._max_pixels, memory)
        return taken[-1]

    def _check_fitted(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises TaktlineError IMAGE_CORRUPT for a frame so long that nothing is left of its other side."""
        if not self._can_be_fitted(shape):
            size = self.architecture.image_size
            raise TaktlineError(
                ErrorCode.IMAGE_CORRUPT,
                f"camera {name!r}: a frame of {shape[1]} x {shape[0]} has no pixel left at {size} x {size}",
                "send what the camera sees, not a strip of it",
            )

    def _is_good(self, shape: Shape) -> bool:
        return shape in self.ahead or (shape[0] * shape[1] <= self._max_pixels and self._can_be_fitted(shape[:2]))

    def _can_be_fitted(self, shape: tuple[int, ...]) -> bool:
        return _is_left(shape[0], shape[1], self.architecture.image_size)

    def noise(self, seed: int) -> Tensor:
        """fp32 (H, action width): drawn on the CPU by a generator of its own, so no batch neighbour can change it."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.conventions.horizon, self.architecture.action_width, generator=generator)

    def prompt(self, instruction: str, normalised: NDArray[np.floating]) -> str:
        """The text that is tokenised, for a normalised state (D,)."""
        if self.conventions.prompt == "text_newline":
            return instruction if instruction.endswith("\n") else f"{instruction}\n"
        words = cleaned(instruction)
        if self.conventions.prompt == "text_then_newline":
            return words
        width = self.conventions.state_prompt_width
        padded = np.pad(normalised, (0, width - len(normalised))) if width else normalised
        numbers = " ".join(str(index) for index in state_bins(padded))
        return f"Task: {words}, State: {numbers};\nAction: "

    def tokens(self, instruction: str, normalised: NDArray[np.floating]) -> NDArray[np.int64]:
        """Ids of the prompt, BOS first, no padding.

        Raises:
            TaktlineError: INSTRUCTION_INVALID where it is empty or longer than the checkpoint's budget.
        """
        if not instruction.strip():
            raise _instruction_error("it is empty", "say what the robot shall do")
        if len(instruction) > MAX_INSTRUCTION_CHARACTERS:
            raise _instruction_error(
                f"it has {len(instruction)} characters, the limit is {MAX_INSTRUCTION_CHARACTERS}", "shorten it"
            )
        ids = [BOS_ID, *self._tokenizer.encode(self.prompt(instruction, normalised))]
        if self.conventions.prompt == "text_then_newline":
            ids += self._tokenizer.encode("\n")
        budget = self.conventions.prompt_tokens
        if len(ids) > budget:
            if not self.conventions.truncate_prompt:
                raise _instruction_error(
                    f"the prompt has {len(ids)} tokens, the checkpoint was trained with at most {budget}", "shorten it"
                )
            ids = ids[:budget]
        if max(ids) >= self.architecture.vocabulary:
            raise _instruction_error(
                f"token {max(ids)} is beyond the checkpoint's vocabulary", "avoid special symbols in the instruction"
            )
        return np.array(ids, np.int64)

    def finish(self, actions: Tensor, state: NDArray[np.float64]) -> NDArray[np.float32]:
        """Network output (H, action width) fp32 -> float32 (H, D) in robot units.

        Raises:
            TaktlineError: WORKER_FAILED where the network's output is not finite.
        """
        return self.complete(self.unnormalise(actions).numpy(), state)

    def complete(self, actions: NDArray[np.floating], state: NDArray[np.float64]) -> NDArray[np.float32]:
        """What `unnormalise` gave, (H, D) -> float32 (H, D) as the robot executes it; raises as `finish`."""
        conventions = self.conventions
        cut = actions
        if conventions.relative_mask:
            mask = np.array(conventions.relative_mask)
            offset = np.where(mask, state[: len(mask)], 0.0).astype(cut.dtype)
            cut = cut.copy()
            cut[:, : len(mask)] += offset
        if conventions.adapt_to_pi:
            cut = aloha.to_robot_actions(cut.astype(np.float64))
        result = cut.astype(np.float32)
        if not np.isfinite(result).all():
            raise TaktlineError(
                ErrorCode.WORKER_FAILED,
                "the network's answer to this observation is not finite",
                "check the observation's state; if others fail too, check the checkpoint",
            )
        return result

    def _state(self, state: NDArray[np.generic]) -> NDArray[np.float64]:
        expected = self.conventions.state_dim
        if state.shape != (expected,):
            raise _state_error(f"it has shape {state.shape}, the policy needs ({expected},)", "send the whole state")
        values = state.astype(np.float64)
        with np.errstate(over="ignore"):  # what is beyond float32 would be infinite in the answer's units
            finite = np.isfinite(values.astype(np.float32))
        if not finite.all():
            where = np.flatnonzero(~finite).tolist()
            raise _state_error(f"entries {where} are NaN, infinite or beyond float32", "check the sensors")
        return values


@functools.lru_cache(maxsize=256)
def _is_left(height: int, width: int, size: int) -> bool:
    return min(fitted_size(height, width, size, size)) >= 1


def _sketch(encoding: str, shape: tuple[int, ...], data: bytes | memoryview) -> bytes:
    """Of another frame it is mostly another, of the same frame the same; it takes a tenth of what a digest takes."""
    return b"%b %r %d " % (encoding.encode(), shape, len(data)) + bytes(data[:64]) + bytes(data[-64:])


def cleaned(instruction: str) -> str:
    """As prompts have it."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def _state_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.STATE_INVALID, f"the state is unusable: {reason}", next_step)


def _instruction_error(reason: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.INSTRUCTION_INVALID, f"the instruction is unusable: {reason}", next_step)
