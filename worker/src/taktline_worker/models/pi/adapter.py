"""The π adapter: a checkpoint folder loaded into a processor and a runner, behind the interface of all families."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import EngineConfig, QuantisationOptions
from taktline_protocol.limits import MIB
from torch import Tensor

from taktline_worker.adapter import Answer, CapturedGraph, Description, Frame, GuidedChunk, Level, RunningBatch, as_one
from taktline_worker.checkpoint import verify_digests
from taktline_worker.devices import choose_device
from taktline_worker.engine_options import config_error
from taktline_worker.jpeg_threads import BegunFrame, jpeg_threads
from taktline_worker.models.pi import byte_expert
from taktline_worker.models.pi.config import resolve
from taktline_worker.models.pi.folder import open_folder
from taktline_worker.models.pi.frame_memory import new_frame
from taktline_worker.models.pi.native_rows import native_rows
from taktline_worker.models.pi.pending import BegunPiRow, PendingPiRow, PreparedRow
from taktline_worker.models.pi.processor import PiProcessor
from taktline_worker.models.pi.profile import PiProfile
from taktline_worker.models.pi.resize import pillow_fit
from taktline_worker.models.pi.rtc import RtcRow, settings_of
from taktline_worker.models.pi.runner import PiBatch, PiRow, PiRunner, collate
from taktline_worker.models.pi.runners import BatchRunner, Launching, make_runner, read_weights, shorten
from taktline_worker.models.pi.single_row import RowLetter, SingleRows
from taktline_worker.models.pi.tokenizer import BOS_ID
from taktline_worker.models.pi.weights import fewer_steps
from taktline_worker.observation import RobotInput
from taktline_worker.rtc import RtcPlan

logger = logging.getLogger(__name__)

USUAL_FRAME = (480, 640, 3)
"""What most cameras of robots send."""
# A large vision tower takes a second an image on a CPU, and the check of its reuse encodes a whole batch.
_CHECKED_ON_CPU = 8


class PiAdapter:
    """One loaded π0 or π0.5 policy.

    Args:
        guided: the runner of rows with an RTC tail; None = `runner`, in the same batch as the others. On a GPU, rows
            that are fixed or differentiated need other kernels, which must not change what their neighbours get.
        cheaper: the same policy with fewer solver steps or a shorter chunk.
        quantisation: how `runner` stores the expert's matrices.
    """

    def __init__(
        self,
        processor: PiProcessor,
        runner: BatchRunner,
        precision: str,
        guided: BatchRunner | None = None,
        cheaper: Mapping[Level, PiAdapter] | None = None,
        quantisation: QuantisationOptions | None = None,
    ) -> None:
        self.processor = processor
        self.runner = runner
        self.guided = guided
        self.cheaper = dict(cheaper or {})
        self._precision, self._quantisation = precision, quantisation
        self._in_robot_units = _unnormalises(runner)
        conventions, rtc = processor.conventions, processor.rtc
        self.description = Description(
            family=processor.architecture.family,
            precision=byte_expert.label(precision, quantisation),
            device=str(runner.device),
            cameras=processor.required_cameras,
            optional_cameras=processor.optional_cameras,
            state_dim=conventions.state_dim,
            action_dim=conventions.action_dim,
            horizon=conventions.horizon,
            control_period_s=conventions.control_period_s,
            rtc="" if rtc is None else rtc.mode,
            rtc_max_delay=0 if rtc is None else rtc.max_delay,
            image_fit=pillow_fit(processor.architecture.image_size) if conventions.resize == "pil" else None,
        )

    def begin_frames(self, frames: Sequence[tuple[str, Frame]]) -> list[BegunFrame | None]:
        """What has been begun of each frame, for `begin` to take over."""
        return self.processor.begin_frames(frames)

    def begin(self, observation: RobotInput, pool: Executor) -> PendingPiRow | BegunPiRow:
        """Checks an observation and starts decoding its images. Raises TaktlineError where it does not fit."""
        return self.processor.begin(observation, pool)

    def run(self, rows: Sequence[PreparedRow], bucket: int) -> Tensor:
        """As `runner` gives them: normalised, or in robot units where it `unnormalises`; `finish` knows."""
        del bucket  # the graph runner pads by itself; eager, padding would only cost time
        network = [prepared.row for prepared in rows]
        guided = self.guided
        apart = [row.rtc is not None and guided is not None for row in network]
        if guided is None or not any(apart):
            return self._answered(self.runner, network)
        parts = {True: guided, False: self.runner}
        outputs: dict[bool, Tensor] = {
            own: self._answered(part, [row for row, on in zip(network, apart, strict=True) if on is own])
            for own, part in parts.items()
            if own in apart
        }
        remaining = {own: iter(part) for own, part in outputs.items()}
        return torch.stack([next(remaining[own]) for own in apart])

    def draft(self, pending: Sequence[PendingPiRow | BegunPiRow]) -> tuple[PiBatch, Any] | RowLetter | None:
        """The batch without its frames, and what the runner makes of it, or a row's letter where that will do.

        None for rows that do not go this way.
        """
        single = _single(self.runner)
        if single is not None and len(pending) == 1 and type(pending[0]) is BegunPiRow:
            letter = single.draft(pending[0].without_frames())
            if letter is not None:
                return letter
        guided = self.guided
        runner: Launching | None = as_one(self.runner, Launching)
        tails = guided is not None and any(one.rtc is not None for one in pending)
        if not pending or tails or runner is None or not all(one.raw for one in pending):
            return None
        try:
            pending[0].let_frames_begin()
            batch = self._collate([one.without_frames() for one in pending])
        except TaktlineError:  # its row says the same
            return None
        return batch, runner.draft(batch)

    def launch(
        self, rows: Sequence[PreparedRow], bucket: int, draft: tuple[PiBatch, Any] | RowLetter | None = None
    ) -> RunningBatch | None:
        """Captured graphs run without being waited for; rows that run apart, and eager runners, do not."""
        del bucket
        launched = self._launched(rows, draft)
        if launched is not None:
            self._look_ahead(rows, draft)
        return launched

    def _look_ahead(self, rows: Sequence[PreparedRow], draft: tuple[PiBatch, Any] | RowLetter | None) -> None:
        """Behind a launch, while the engine runs: keeps the rows' frames, and gets what the next ones need."""
        try:
            self.processor.look_ahead(rows)
            single = _single(self.runner)
            if single is not None and isinstance(draft, RowLetter):
                single.look_ahead(draft)
        except Exception as error:  # whoever needs it asks for it, and is told; these rows run
            logger.error("nothing is got ahead for the next rows", exc_info=error)

    def _launched(
        self, rows: Sequence[PreparedRow], draft: tuple[PiBatch, Any] | RowLetter | None
    ) -> RunningBatch | None:
        single = _single(self.runner)
        if isinstance(draft, RowLetter):
            if single is not None and (running := single.launch(rows[0].row.raw or (), draft)) is not None:
                return running
            draft = None
        guided = self.guided
        runner: Launching | None = as_one(self.runner, Launching)
        if runner is None or _unnormalises(self.runner) is not self._in_robot_units:
            return None
        if guided is not None and any(prepared.row.rtc is not None for prepared in rows):
            return None
        if draft is None:
            return runner.launch(self._collate([prepared.row for prepared in rows]))
        batch, written = draft
        frames = tuple(frame for prepared in rows for frame in prepared.row.raw or ())
        return runner.launch(replace(batch, raw=frames), written)

    def _answered(self, runner: BatchRunner, rows: Sequence[PiRow]) -> Tensor:
        """Rows of one runner, in the units of all."""
        outputs = runner.run(self._collate(rows))
        return self.processor.unnormalise(outputs) if self._in_robot_units and not _unnormalises(runner) else outputs

    def _collate(self, rows: Sequence[PiRow]) -> PiBatch:
        return collate(rows, self.processor.architecture.tokens_per_image, rtc=self.processor.rtc)

    def finish(self, rows: Sequence[PreparedRow], outputs: Tensor) -> list[Answer | TaktlineError]:
        """float32 (H, D) in robot units, with what a tail did to it, or the error of a row that is not finite."""
        results: list[Answer | TaktlineError] = []
        done: Sequence[Any] = outputs.numpy() if self._in_robot_units else outputs  # type: ignore[assignment]
        finish: Callable[..., NDArray[np.float32]]
        finish = self.processor.complete if self._in_robot_units else self.processor.finish
        for prepared, actions in zip(rows, done, strict=True):
            try:
                chunk = finish(actions, prepared.state)
            except TaktlineError as error:
                results.append(error)
            else:
                results.append(chunk if prepared.row.rtc is None else self._guided_chunk(chunk, prepared.row.rtc.plan))
        return results

    def _guided_chunk(self, actions: NDArray[np.float32], plan: RtcPlan) -> GuidedChunk:
        settings = self.processor.rtc
        assert settings is not None  # rows get a tail only where there are settings
        return GuidedChunk(
            actions=actions,
            mode=settings.mode,
            delay=plan.delay,
            prefix_end=plan.end,
            schedule="hard" if settings.mode == "trained" else settings.schedule,
            path="batched" if self.guided is None else "apart",
        )

    def warm_guided(self, buckets: Sequence[int]) -> None:
        """Runs the apart runner once with each batch size, so that no request waits for a kernel to be compiled."""
        if self.guided is None:
            return
        row = self._largest(raw=False).row
        horizon, width = row.noise.shape
        row = replace(row, rtc=RtcRow(torch.zeros(horizon, width), torch.zeros(horizon), RtcPlan(0, 0)))
        for bucket in buckets:
            self.guided.run(self._collate([row] * bucket))

    def profile(self, *, views: int = 0, prompt_tokens: int = 0) -> PiProfile:
        """The engine as what is measured; 0 takes all cameras and the longest prompt."""
        conventions = self.processor.conventions
        cameras = sum(1 for slot in conventions.slots if slot.names)
        if views > cameras or prompt_tokens > conventions.prompt_tokens:
            raise config_error(
                f"{views} cameras and {prompt_tokens} prompt tokens are asked for; the policy has {cameras} and"
                f" {conventions.prompt_tokens}",
                "ask for no more than the policy has",
            )
        return PiProfile(
            self.runner,
            self.processor.architecture,
            conventions.horizon,
            conventions.solver_steps,
            views or cameras,
            prompt_tokens or conventions.prompt_tokens,
            self._precision,
            self._quantisation,
        )

    def caches(self) -> dict[str, tuple[int, int]]:
        """Hits and misses: `frame_pixels` of decoded frames, `frame_features` of frames behind the vision tower."""
        seen = {"frame_pixels": self.processor.seen, "frame_features": getattr(self.runner, "seen", None)}
        return {name: (cache.hits, cache.misses) for name, cache in seen.items() if cache is not None}

    def graphs(self) -> list[CapturedGraph]:
        """The captured graphs; none where the runner is eager."""
        captured = dict(getattr(self.runner, "captured", {}))
        return [CapturedGraph(b.rows, graph.capture_s, graph.pool_bytes) for b, graph in captured.items()]

    def largest_row(self) -> PreparedRow:
        """Every camera and a full prompt, of neutral content; frames of a usual size where the runner resizes them."""
        return self._largest(raw=self.processor.raw)

    def _largest(self, *, raw: bool) -> PreparedRow:
        a, c = self.processor.architecture, self.processor.conventions
        cameras = sum(1 for slot in c.slots if slot.names)
        frame = new_frame(USUAL_FRAME).zero_()
        row = PiRow(
            pixels=torch.empty(cameras, 0) if raw else torch.zeros(cameras, 3, a.image_size, a.image_size),
            tokens=np.full(c.prompt_tokens, BOS_ID, np.int64),
            noise=self.processor.noise(0),
            state=torch.zeros(a.action_width) if a.family == "pi0" else None,
            raw=(frame,) * cameras if raw else None,
        )
        return PreparedRow(row, np.zeros(c.state_dim))


def _single(runner: BatchRunner) -> SingleRows | None:
    found: SingleRows | None = getattr(runner, "single", None)
    return found


def _unnormalises(runner: BatchRunner) -> bool:
    return bool(getattr(runner, "unnormalises", False))


def load(config: EngineConfig) -> PiAdapter:
    """Loads the checkpoint that `config` names, after all startup checks.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with the reason and the next step.
    """
    path = Path(config.model.path)
    if not path.is_dir():
        raise config_error(f"model.path {path} is no folder", "mount the volume that holds the checkpoint")
    if config.engine.parallel.tp != 1 or config.engine.parallel.cfg != 1:
        raise config_error(
            f"engine.parallel asks for tp {config.engine.parallel.tp} and cfg {config.engine.parallel.cfg}",
            "π0 and π0.5 fit one GPU and have no guided branch: use dp, one replica a GPU",
        )
    verify_digests(path, config.model.sha256)
    folder = open_folder(path, config.model.statistics)
    if folder.family != config.model.family:
        raise config_error(
            f"model.family is {config.model.family}, the tensors are those of {folder.family}",
            f"set model.family to {folder.family}, or mount the other checkpoint",
        )
    conventions = resolve(folder.conventions, config)
    # Before the weights: a wrong camera name must not cost minutes of loading.
    rtc = settings_of(conventions, config.engine.rtc)
    processor = PiProcessor(
        folder.architecture,
        conventions,
        folder.tokenizer,
        config.model.cameras,
        config.engine.max_image_pixels,
        rtc,
        config.engine.frame_cache_mb * MIB,
    )
    device = choose_device(config.engine.device)
    quantisation = config.engine.quantisation
    byte_expert.check(quantisation, config.engine.precision, config.engine.buckets, device)
    weights = read_weights(folder, conventions, config.engine.precision, device)
    in_batch = rtc is not None and rtc.mode == "guided" and not rtc.exact
    bound = rtc.max_guidance_weight if rtc is not None and in_batch else None
    precision = config.engine.precision
    made = partial(
        make_runner,
        architecture=folder.architecture,
        buckets=config.engine.buckets,
        precision=precision,
        guidance=bound,
        quantisation=quantisation,
    )
    runner = made(weights, conventions=conventions)
    together = rtc is None or in_batch or device.type == "cpu"
    processor.raw = not isinstance(runner, PiRunner)  # captured graphs resize frames themselves
    processor.raw_tails = together
    native = None
    if processor.raw:
        processor.native, native = jpeg_threads(), native_rows()
    if native is not None:
        processor.look_prompts_up(native)
    shorten(runner, native)
    if isinstance(runner, PiRunner) and config.engine.frame_cache_mb:
        cameras = sum(1 for slot in conventions.slots if slot.names)
        most = cameras * max(config.engine.buckets)
        if device.type == "cpu":
            most = min(most, _CHECKED_ON_CPU)
        exact = runner.reuse_features(config.engine.frame_cache_mb * MIB, most)
        logger.info("features of frames seen before are reused" if exact else "features are not reused: not exact here")
    levels = [Level(solver_steps=steps) for steps in config.engine.cheaper_steps]
    levels += [Level(horizon=horizon) for horizon in config.engine.shorter_horizons]
    cheaper: dict[Level, PiAdapter] = {}
    for level in levels:
        its_weights = fewer_steps(weights, level.solver_steps) if level.solver_steps else weights
        its_processor = processor.shortened(level.horizon) if level.horizon else processor
        its = made(its_weights, conventions=its_processor.conventions)
        shorten(its, native)
        apart = None if together else its if isinstance(its, PiRunner) else PiRunner(its_weights, folder.architecture)
        cheaper[level] = PiAdapter(its_processor, its, precision, apart, quantisation=quantisation)
    if together:
        return PiAdapter(processor, runner, precision, cheaper=cheaper, quantisation=quantisation)
    assert rtc is not None
    guided = runner if isinstance(runner, PiRunner) else PiRunner(weights, folder.architecture)
    adapter = PiAdapter(processor, runner, precision, guided, cheaper, quantisation)
    logger.info(
        "observations with an RTC tail run apart from their batch, eagerly",
        extra={"policy": config.policy, "mode": rtc.mode, "exact": rtc.exact},
    )
    adapter.warm_guided(config.engine.buckets)
    return adapter
