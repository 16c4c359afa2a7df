"""The MiniCPM-RobotManip adapter: a checkpoint folder and one of its embodiments, behind all families' interface."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import EngineConfig, EngineOptions
from torch import Tensor

from taktline_worker.adapter import Answer, CapturedGraph, Description
from taktline_worker.checkpoint import TensorFiles, read_json, read_sidecar, verify_digests
from taktline_worker.devices import choose_device
from taktline_worker.engine_options import check_replicas_only, config_error, control_period_s
from taktline_worker.fp8_layers import check_device
from taktline_worker.models.minicpm_robot.batch import MiniCpmRow
from taktline_worker.models.minicpm_robot.config import (
    CONFIG_FILE,
    SOLVER_STEPS,
    MiniCpmArchitecture,
    held,
    read_architecture,
)
from taktline_worker.models.minicpm_robot.fp8 import quantise
from taktline_worker.models.minicpm_robot.graphs import MiniCpmGraphs
from taktline_worker.models.minicpm_robot.processor import MiniCpmProcessor, PendingRow, Sidecar
from taktline_worker.models.minicpm_robot.profile import MiniCpmProfile
from taktline_worker.models.minicpm_robot.prompt import Prompt
from taktline_worker.models.minicpm_robot.runner import MiniCpmRunner
from taktline_worker.models.minicpm_robot.weights import load_weights
from taktline_worker.observation import RobotInput

FAMILY = "minicpm-robot"
PAGE = "docs/minicpm.md"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Folder:
    """What a folder holds beside its weights, checked."""

    files: TensorFiles
    sidecar: Sidecar
    architecture: MiniCpmArchitecture
    prompt: Prompt


class MiniCpmAdapter:
    """One loaded policy for one embodiment.

    Args:
        rows: actions of a chunk that are answered.
    """

    def __init__(
        self,
        processor: MiniCpmProcessor,
        runner: MiniCpmRunner,
        precision: str,
        control_period_s: float,
        rows: int,
        buckets: Sequence[int],
    ) -> None:
        self.processor = processor
        self.runner: MiniCpmRunner | MiniCpmGraphs = runner
        self._rows = rows
        self.description = Description(
            family=FAMILY,
            precision=precision,
            device=str(runner.device),
            cameras=processor.cameras,
            optional_cameras=(),
            state_dim=processor.state_dim,
            action_dim=processor.action_dim,
            horizon=rows,
            control_period_s=control_period_s,
            image_fit=processor.image_fit,
        )
        if runner.device.type == "cuda":
            graphs = MiniCpmGraphs(runner, self.largest_row(), buckets)
            graphs.capture()
            self.runner = graphs

    def begin(self, observation: RobotInput, pool: Executor) -> PendingRow:
        """Checks an observation and starts decoding its images. Raises TaktlineError where it does not fit."""
        return self.processor.begin(observation, pool)

    def run(self, rows: Sequence[MiniCpmRow], bucket: int) -> Tensor:
        """fp32 (rows, H, action width) on the CPU."""
        del bucket  # the runner knows its own
        return self.runner.run(rows)

    def finish(self, rows: Sequence[MiniCpmRow], outputs: Tensor) -> list[Answer | TaktlineError]:
        """float32 (rows, D) in robot units, or the error of a row that is not finite."""
        results: list[Answer | TaktlineError] = []
        for actions in outputs:
            try:
                results.append(self.processor.decode(actions, self._rows))
            except TaktlineError as error:
                results.append(error)
        assert len(results) == len(rows)
        return results

    def graphs(self) -> list[CapturedGraph]:
        """The captured graphs; none on a CPU."""
        captured = self.runner.captured if isinstance(self.runner, MiniCpmGraphs) else {}
        return [CapturedGraph(b.rows, graph.capture_s, graph.pool_bytes) for b, graph in dict(captured).items()]

    def profile(self, *, views: int = 0, prompt_tokens: int = 0) -> MiniCpmProfile:
        """See `HasProfile`; the row is that of calibration.

        Raises:
            TaktlineError: CONFIG_INVALID for another number of cameras or tokens: folder and template say them.
        """
        if views or prompt_tokens:
            raise config_error(
                "the folder has cameras and a prompt of its own", "leave --views and --prompt-tokens out"
            )
        return MiniCpmProfile(self.runner, self.largest_row(), self.description.precision)

    def largest_row(self) -> MiniCpmRow:
        """Every camera, black, and an instruction of usual length."""
        v = self.processor.architecture.vision
        observation = RobotInput(
            images={},
            state=np.zeros(self.processor.state_dim),
            instruction="pick up the object and put it into the box on the left",
            seed=0,
        )
        cameras = len(self.processor.cameras)
        black = -torch.ones(cameras, v.grid**2, 3 * v.patch**2)
        return self.processor.row(observation, black)


def load(config: EngineConfig) -> MiniCpmAdapter:
    """Loads the checkpoint that `config` names, after all startup checks.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with the reason and the next step.
    """
    path, options = Path(config.model.path), config.engine
    if not path.is_dir():
        raise config_error(f"model.path {path} is no folder", "mount the volume that holds the checkpoint")
    _check_options(options)
    verify_digests(path, config.model.sha256)
    folder = open_folder(path)
    a = folder.architecture
    embodiment = read_embodiment(config.model.statistics, folder.sidecar)
    # Before the weights: a wrong camera name must not cost minutes of loading.
    processor = MiniCpmProcessor(
        a, folder.sidecar, folder.prompt, embodiment, config.model.cameras, options.max_image_pixels
    )
    rows = a.head.horizon if options.action_horizon is None else options.action_horizon
    if not 1 <= rows <= a.head.horizon:
        raise config_error(
            f"engine.action_horizon is {rows}, the checkpoint has {a.head.horizon}", f"set 1 to {a.head.horizon}"
        )
    period_s = control_period_s(options.control_period_ms, folder.sidecar.control_period_ms, " (LIBERO: 50)")
    device = choose_device(options.device)
    weights = load_weights(folder.files, a, [embodiment], _DTYPES[options.precision], device)
    runner = MiniCpmRunner(quantise(weights) if options.precision == "fp8" else weights, a, folder.prompt.image_token)
    return MiniCpmAdapter(processor, runner, options.precision, period_s, rows, options.buckets)


def open_folder(path: Path) -> Folder:
    """Reads everything but the weights. Raises TaktlineError CHECKPOINT_INVALID or CONFIG_INVALID."""
    sidecar = read_sidecar(path, Sidecar, PAGE)
    files = TensorFiles(path)
    config = read_json(path / CONFIG_FILE)
    a = read_architecture(config, sidecar.architecture, files.shapes)
    image_token = held(config, "image_token_id", None)
    return Folder(files, sidecar, a, Prompt(path, a.vision.image_tokens, a.text.vocabulary, image_token))


def read_embodiment(stated: str, sidecar: Sidecar) -> int:
    """The bank of the head that is served. Raises TaktlineError CONFIG_INVALID where `stated` is no number."""
    if not stated:
        return sidecar.embodiment
    if not stated.isdecimal():
        raise config_error(
            f"model.statistics is {stated!r}; this family has embodiments by number and no statistics",
            "set the embodiment's number, e.g. 0 for LIBERO, or leave it out",
        )
    return int(stated)


def _check_options(options: EngineOptions) -> None:
    if options.precision == "fp8":
        check_device(choose_device(options.device))
    check_replicas_only(options.parallel)
    if options.rtc.mode in ("guided", "trained"):
        raise config_error(f"engine.rtc.mode is {options.rtc.mode}", "this family takes no tail: set auto or off")
    if options.solver_steps not in (None, SOLVER_STEPS) or options.cheaper_steps:
        raise config_error(
            "engine asks for other solver steps", f"the head was trained for {SOLVER_STEPS}: leave them out"
        )
