"""The GR00T adapter: a checkpoint folder and one of its embodiments, behind the interface of all families."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig
from torch import Tensor

from taktline_worker.adapter import Answer, CapturedGraph, Description, GuidedChunk
from taktline_worker.checkpoint import TensorFiles, read_json, read_sidecar, verify_digests
from taktline_worker.devices import choose_device
from taktline_worker.engine_options import check_replicas_only, config_error, control_period_s
from taktline_worker.fp8_layers import check_device
from taktline_worker.models.groot.config import BACKBONE_FILE, CONFIG_FILE, GrootArchitecture, read_architecture
from taktline_worker.models.groot.embodiment import Embodiment, read_embodiment
from taktline_worker.models.groot.fp8 import quantise
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.processor import GrootProcessor, PendingGrootRow, PreparedRow, open_tokenizer
from taktline_worker.models.groot.profile import GrootProfile
from taktline_worker.models.groot.rtc import SETTINGS as RTC
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.weights import load_weights
from taktline_worker.observation import EncodedImage, RobotInput

FAMILY = "gr00t-n1.7"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`taktline.json` of a GR00T folder; every field may be left out.

    Attributes:
        description: one sentence, for people.
        control_period_ms: time between two action rows; EngineOptions.control_period_ms overrides it.
    """

    description: str = ""
    control_period_ms: float | None = None


class GrootAdapter:
    """One loaded policy for one embodiment."""

    def __init__(
        self,
        processor: GrootProcessor,
        runner: GrootRunner,
        precision: str,
        control_period_s: float,
        rtc: bool,
        buckets: Sequence[int],
    ) -> None:
        self.processor = processor
        self.runner: GrootRunner | GrootGraphs = runner
        e = processor.embodiment
        self.description = Description(
            family=FAMILY,
            precision=precision,
            device=str(runner.device),
            cameras=processor.cameras,
            optional_cameras=(),
            state_dim=e.state_dim,
            action_dim=e.action_dim,
            horizon=e.rows,
            control_period_s=control_period_s,
            rtc=RTC.mode if rtc else "",
        )
        if runner.device.type == "cuda":
            self.runner = GrootGraphs(runner, self.largest_row().row, buckets)
            self.runner.capture()

    def begin(self, observation: RobotInput, pool: Executor) -> PendingGrootRow:
        """Checks an observation and starts decoding its images. Raises TaktlineError where it does not fit."""
        return self.processor.begin(observation, pool)

    def run(self, rows: Sequence[PreparedRow], bucket: int) -> Tensor:
        """fp32 (rows, H, action width) on the CPU, normalised units."""
        del bucket  # the runner knows its own
        return self.runner.run([prepared.row for prepared in rows])

    def finish(self, rows: Sequence[PreparedRow], outputs: Tensor) -> list[Answer | TaktlineError]:
        """float32 (rows, D) in robot units, with what a tail did to it, or the error of a row that is not finite."""
        results: list[Answer | TaktlineError] = []
        for prepared, actions in zip(rows, outputs, strict=True):
            try:
                chunk = self.processor.decode(actions, prepared.state)
            except TaktlineError as error:
                results.append(error)
                continue
            tail = prepared.row.rtc
            if tail is None:
                results.append(chunk)
            else:
                plan = tail.plan
                results.append(GuidedChunk(chunk, RTC.mode, plan.delay, plan.end, RTC.schedule, "batched"))
        return results

    def graphs(self) -> list[CapturedGraph]:
        """The captured graphs; none on a CPU."""
        captured = dict(getattr(self.runner, "captured", {}))
        return [CapturedGraph(b.rows, graph.capture_s, graph.pool_bytes) for b, graph in captured.items()]

    def profile(self, *, views: int = 0, prompt_tokens: int = 0) -> GrootProfile:
        """See `HasProfile`; the row is that of calibration.

        Raises:
            TaktlineError: CONFIG_INVALID for another number of cameras or tokens: the embodiment and its template say.
        """
        if views or prompt_tokens:
            raise config_error(
                "an embodiment has cameras and a prompt of its own", "leave --views and --prompt-tokens out"
            )
        return GrootProfile(self.runner, self.largest_row().row, self.description.precision)

    def largest_row(self) -> PreparedRow:
        """Every camera at the checkpoint's own size and an instruction of usual length."""
        e = self.processor.embodiment
        height, width = (e.transform.edge, e.transform.edge) if e.transform.edge else e.transform.target
        frame = EncodedImage("raw", bytes(height * width * 3), (height, width, 3))
        observation = RobotInput(
            images=dict.fromkeys(self.processor.cameras, frame),
            state=np.zeros(e.state_dim),
            instruction="pick up the object and put it into the box on the left",
            seed=0,
        )
        return self.processor.begin(observation, _Now()).result()


class _Now(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]  # the base class's own signature
        """See Executor."""
        from concurrent.futures import Future

        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def load(config: EngineConfig) -> GrootAdapter:
    """Loads the checkpoint that `config` names, after all startup checks.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with the reason and the next step.
    """
    folder = Path(config.model.path)
    if not folder.is_dir():
        raise config_error(f"model.path {folder} is no folder", "mount the volume that holds the checkpoint")
    options = config.engine
    device = choose_device(options.device)
    if options.precision == "fp8":
        check_device(device)
    check_replicas_only(options.parallel)
    if options.rtc.mode == "trained" or options.rtc.schedule not in (None, RTC.schedule):
        raise config_error(
            f"engine.rtc asks for mode {options.rtc.mode} and schedule {options.rtc.schedule}",
            "GR00T follows a tail in its own way only: set mode to auto or off and leave the schedule out",
        )
    verify_digests(folder, config.model.sha256)
    files = TensorFiles(folder)
    architecture = _architecture(folder, files, config)
    embodiment = read_embodiment(folder, config.model.statistics, architecture.head.horizon)
    embodiment = _shortened(embodiment, options.action_horizon)
    _check_widths(architecture, embodiment)
    # Before the weights: a wrong camera name must not cost minutes of loading.
    processor = GrootProcessor(
        architecture, embodiment, open_tokenizer(folder), config.model.cameras, options.max_image_pixels
    )
    sidecar = read_sidecar(folder, Sidecar, "docs/groot.md")
    period_s = control_period_s(options.control_period_ms, sidecar.control_period_ms)
    weights = load_weights(files, architecture, [embodiment.slot], _DTYPES[options.precision], device)
    runner = GrootRunner(quantise(weights) if options.precision == "fp8" else weights, architecture)
    return GrootAdapter(processor, runner, options.precision, period_s, options.rtc.mode != "off", options.buckets)


def _architecture(folder: Path, files: TensorFiles, config: EngineConfig) -> GrootArchitecture:
    backbone = folder / BACKBONE_FILE
    found = read_architecture(
        read_json(folder / CONFIG_FILE), read_json(backbone) if backbone.is_file() else None, files.shapes
    )
    steps = config.engine.solver_steps
    if steps is None:
        return found
    if not 1 <= steps <= found.head.time_buckets:
        raise config_error(f"engine.solver_steps is {steps}", f"set 1 to {found.head.time_buckets}")
    return replace(found, head=replace(found.head, solver_steps=steps))


def _shortened(embodiment: Embodiment, horizon: int | None) -> Embodiment:
    if horizon is None:
        return embodiment
    if not 1 <= horizon <= embodiment.rows:
        raise config_error(
            f"engine.action_horizon is {horizon}, embodiment {embodiment.tag!r} decodes {embodiment.rows} actions",
            f"set 1 to {embodiment.rows}",
        )
    return replace(embodiment, rows=horizon)


def _check_widths(architecture: GrootArchitecture, e: Embodiment) -> None:
    state = sum(part.model_width for part in e.state)
    head = architecture.head
    if state > head.state_width or e.action_dim > head.action_width or not 0 <= e.slot < head.embodiments:
        raise TaktlineError(
            ErrorCode.CHECKPOINT_INVALID,
            f"embodiment {e.tag!r} has {state} state and {e.action_dim} action numbers and slot {e.slot}; the network"
            f" has {head.state_width}, {head.action_width} and {head.embodiments} slots",
            "use the processor files and tensors of one checkpoint",
        )
