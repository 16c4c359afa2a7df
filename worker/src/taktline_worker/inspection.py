"""What a checkpoint folder holds, and every problem that would keep a worker from serving it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from taktline_protocol import TaktlineError

from taktline_worker.checkpoint import TensorFiles, file_sha256, refuse
from taktline_worker.models.pi import folder as pi_folder
from taktline_worker.models.pi.normalise import Normaliser
from taktline_worker.models.pi.processor import PiProcessor


class Problem(msgspec.Struct, frozen=True):
    """One finding; only those of severity `error` keep a worker from serving the folder."""

    severity: str
    code: str
    message: str
    next_step: str


class NormalisationReport(msgspec.Struct, frozen=True):
    """Mode and range of one feature's statistics; the first pair is mean/min/lower quantile, the second its partner."""

    mode: str
    width: int
    low_range: tuple[float, float] | None
    high_range: tuple[float, float] | None
    constant_dimensions: tuple[int, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What `taktline checkpoint inspect` prints; fields stay empty where a problem hid them."""

    path: str
    usable: bool
    problems: tuple[Problem, ...]
    family: str = ""
    layout: str = ""
    description: str = ""
    parameters: int = 0
    bytes: int = 0
    dtypes: dict[str, int] = {}
    architecture: dict[str, Any] = {}
    cameras: tuple[str, ...] = ()
    optional_cameras: tuple[str, ...] = ()
    masked_cameras: tuple[str, ...] = ()
    state_dim: int = 0
    action_dim: int = 0
    horizon: int = 0
    solver_steps: int = 0
    control_period_ms: float = 0.0
    prompt: str = ""
    prompt_tokens: int = 0
    resize: str = ""
    relative_actions: tuple[bool, ...] = ()
    adapt_to_pi: bool = False
    tokenizer: str = ""
    tokenizer_pieces: int = 0
    state_normalisation: NormalisationReport | None = None
    action_normalisation: NormalisationReport | None = None
    sha256: dict[str, str] = {}
    facts: dict[str, str] = {}
    """What families other than π0 and π0.5 say of themselves, by name."""


def inspect(path: Path, *, statistics: str = "", read_weights: bool = True) -> Report:
    """Opens a folder as a worker would and reports what it finds; never raises for a bad checkpoint.

    Args:
        statistics: openpi asset id or GR00T embodiment tag, where the folder holds several.
        read_weights: also hash the files and look for NaN in every tensor, which reads the weights once.
    """
    problems: list[Problem] = []
    fields: dict[str, Any] = {}
    try:
        other = _other_family(path)
        if other is not None:
            return _inspect_other(path, other, statistics, read_weights)
        files = TensorFiles(path)
        fields["dtypes"] = dict(Counter(str(dtype).removeprefix("torch.") for dtype in files.dtypes.values()))
        fields["bytes"] = sum(file.stat().st_size for file in files.paths)
        if read_weights:
            fields["sha256"] = {file.name: file_sha256(file) for file in files.paths}
        opened = pi_folder.open_folder(path, statistics)
        fields |= _describe(opened)
        problems += _advice(opened)
        if read_weights:
            for _ in opened.files.read(opened.names):
                pass  # reading checks every tensor
    except TaktlineError as error:
        problems.append(Problem("error", error.code.value, error.message, error.next_step))
    usable = all(problem.severity != "error" for problem in problems)
    return Report(path=str(path), usable=usable, problems=tuple(problems), **fields)


def family_of(path: Path) -> str:
    """The family that a folder is of, as deployments name it.

    Raises:
        TaktlineError: the first reason for which a worker would refuse the folder.
    """
    other = _other_family(path)
    if other is not None:
        return str(other.describe(path, "", False)[0]["family"])
    return pi_folder.open_folder(path).family


def _other_family(path: Path) -> Any:
    """The module of the family that recognises the folder; None leaves it to π0 and π0.5."""
    from taktline_worker.models.cosmos3 import inspection as cosmos3
    from taktline_worker.models.groot import inspection as groot
    from taktline_worker.models.minicpm_robot import inspection as minicpm
    from taktline_worker.models.vjepa2_ac import inspection as vjepa2

    found = next((module for module in (cosmos3, groot, minicpm, vjepa2) if module.recognises(path)), None)
    openpi = (path / "assets").exists()
    if found is None and not openpi and not (path / "config.json").exists() and any(path.glob("*.safetensors")):
        raise refuse(
            f"{path} holds no config.json", "add that of the checkpoint: only openpi's folders and planners go without"
        )
    return found


def _inspect_other(path: Path, family: Any, statistics: str, read_weights: bool) -> Report:
    fields, notes = family.describe(path, statistics, read_weights)
    if read_weights:
        fields.setdefault("sha256", {file.name: file_sha256(file) for file in _weight_files(path)})
    problems = tuple(Problem("note", "", message, next_step) for message, next_step in notes)
    return Report(path=str(path), usable=True, problems=problems, **fields)


def _weight_files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.name.endswith((".safetensors", ".pt", ".pth", ".pth.tar")))


def _describe(opened: pi_folder.PiFolder) -> dict[str, Any]:
    conventions = opened.conventions
    processor = PiProcessor(opened.architecture, conventions, opened.tokenizer, {})
    return {
        "family": opened.family,
        "layout": opened.layout,
        "description": opened.sidecar.description,
        "parameters": opened.architecture.parameters,
        "architecture": {
            name: getattr(opened.architecture, name) for name in opened.architecture.__slots__ if name != "family"
        },
        "cameras": processor.required_cameras,
        "optional_cameras": processor.optional_cameras,
        "masked_cameras": tuple(slot.key for slot in conventions.slots if not slot.names),
        "state_dim": conventions.state_dim,
        "action_dim": conventions.action_dim,
        "horizon": conventions.horizon,
        "solver_steps": conventions.solver_steps,
        "control_period_ms": conventions.control_period_s * 1000.0,
        "prompt": conventions.prompt,
        "prompt_tokens": conventions.prompt_tokens,
        "resize": conventions.resize,
        "relative_actions": conventions.relative_mask,
        "adapt_to_pi": conventions.adapt_to_pi,
        "tokenizer": str(opened.tokenizer.path.relative_to(opened.path.resolve())),
        "tokenizer_pieces": opened.tokenizer.pieces,
        "state_normalisation": _normalisation(conventions.state_normaliser),
        "action_normalisation": _normalisation(conventions.action_normaliser),
    }


def _normalisation(normaliser: Normaliser) -> NormalisationReport:
    if normaliser.mode == "IDENTITY":
        return NormalisationReport("IDENTITY", 0, None, None, ())
    low, high = normaliser.low, normaliser.high
    spread = high if normaliser.mode == "MEAN_STD" else high - low
    return NormalisationReport(
        mode=normaliser.mode,
        width=normaliser.width,
        low_range=(float(low.min()), float(low.max())),
        high_range=(float(high.min()), float(high.max())),
        constant_dimensions=tuple(int(index) for index in np.flatnonzero(spread < 1e-4)),
    )


def _advice(opened: pi_folder.PiFolder) -> list[Problem]:
    """What a worker accepts and a person should still look at."""
    conventions = opened.conventions
    found = []
    if not conventions.control_period_s:
        found.append(("nothing in the folder states the control period", "set spec.engine.controlPeriodMs"))
    for name, normaliser in (("state", conventions.state_normaliser), ("action", conventions.action_normaliser)):
        report = _normalisation(normaliser)
        if report.mode == "IDENTITY":
            found.append((f"{name} is not normalised", "right only if the model was trained in robot units"))
        elif report.constant_dimensions:
            found.append(
                (
                    f"{name} dimensions {list(report.constant_dimensions)} hardly vary in the statistics",
                    "normalised values there are huge for any other input: check the robot's state layout",
                )
            )
    if conventions.prompt == "state" and conventions.layout == "lerobot" and not conventions.state_prompt_width:
        found.append(
            (
                "the prompt carries the state at its own length, as LeRobot writes it since v0.5.0",
                "if the checkpoint was trained by v0.4.4 or earlier, set state_prompt_width to 32 in taktline.json",
            )
        )
    return [Problem("note", "", message, next_step) for message, next_step in found]
