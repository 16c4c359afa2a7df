"""What is measured: a checkpoint folder, an engine config, or a full-size policy with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineConfig, EngineOptions, ModelConfig, QuantisationOptions

from taktline_worker.adapter import HasProfile, Profile
from taktline_worker.devices import choose_device

RANDOM = "random:"
RANDOM_POLICIES = {
    "pi05": "taktline_worker.models.pi.synthetic",
    "pi0": "taktline_worker.models.pi.synthetic",
    "gr00t-n1.7": "taktline_worker.models.groot.synthetic",
    "minicpm-robot": "taktline_worker.models.minicpm_robot.synthetic",
    "cosmos3-nano": "taktline_worker.models.cosmos3.synthetic",
    "cosmos3-nano-paper": "taktline_worker.models.cosmos3.synthetic",
    "cosmos3-nano-branch": "taktline_worker.models.cosmos3.synthetic",
    "cosmos3-edge": "taktline_worker.models.cosmos3.synthetic",
    "cosmos3-edge-paper": "taktline_worker.models.cosmos3.synthetic",
    "vjepa2-ac": "taktline_worker.models.vjepa2_ac.synthetic",
}
"""Published size with random weights -> the module whose `random_profile` makes it."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asks for; None and 0 keep the policy's own value.

    Attributes:
        policy: checkpoint folder, engine.json, or `random:` and a key of `RANDOM_POLICIES`.
        batches: batch sizes to prepare.
        views: cameras a row.
        prompt_tokens: prompt tokens a row.
        quantisation: how the action expert's matrices are stored for batches up to the engine's own limit.
        statistics: openpi asset id or embodiment tag, where a checkpoint folder holds several.
        layers: of a policy with random weights, keep so many of each tower: enough to measure kernels by. 0 keeps all.
    """

    policy: str
    batches: tuple[int, ...]
    device: str = "auto"
    precision: str = ""
    views: int = 0
    prompt_tokens: int = 0
    solver_steps: int = 0
    action_horizon: int = 0
    quantisation: Literal["", "fp8", "int8"] = ""
    statistics: str = ""
    layers: int = 0

    def quantised(self, own: QuantisationOptions | None = None) -> QuantisationOptions | None:
        """The engine's `own` way of storing weights, with the format that is asked for."""
        if not self.quantisation:
            return own
        if own is not None:
            return msgspec.structs.replace(own, expert=self.quantisation)
        return QuantisationOptions(expert=self.quantisation)


def open_subject(request: Request) -> Profile:
    """Loads the policy.

    Raises:
        TaktlineError: CONFIG_INVALID or CHECKPOINT_INVALID with the reason and the next step.
    """
    if request.policy.startswith(RANDOM):
        return _random(request)
    path = Path(request.policy)
    if path.is_file():
        config = _read(path)
    elif path.is_dir():
        config = EngineConfig(
            policy=path.name or "policy", model=ModelConfig(family=_family(path), path=str(path), revision="profile")
        )
        if request.statistics:
            model = msgspec.structs.replace(config.model, statistics=request.statistics)
            config = msgspec.structs.replace(config, model=model)
    else:
        raise _invalid(
            f"{request.policy!r} is no checkpoint folder and no engine.json",
            f"give a folder, the engine.json of a worker, or {RANDOM}pi05",
        )
    from taktline_worker.models.registry import load_adapter

    adapter = load_adapter(msgspec.structs.replace(config, engine=_options(config.engine, request)))
    if not isinstance(adapter, HasProfile):
        raise _invalid(
            f"the engine of {config.model.family} does not tell its phases",
            "measure a planner with taktline profile-planner, or read T_sync of its workers from"
            " GET /v1/policies/{policy}",
        )
    return adapter.profile(views=request.views, prompt_tokens=request.prompt_tokens)


def _options(engine: EngineOptions, request: Request) -> EngineOptions:
    device = choose_device(request.device if request.device != "auto" else engine.device)
    precision = request.precision or (engine.precision if device.type == "cuda" else "fp32")
    # An eager engine keeps its weights as they are; a format that is asked for gets the refusal of the family.
    own = engine.quantisation if device.type == "cuda" else None
    return msgspec.structs.replace(
        engine,
        device=device.type,
        precision=precision,
        buckets=request.batches,
        solver_steps=request.solver_steps or engine.solver_steps,
        action_horizon=request.action_horizon or engine.action_horizon,
        control_period_ms=engine.control_period_ms or 50.0,  # the rate of the robot costs the engine nothing
        cheaper_steps=(),
        shorter_horizons=(),
        quantisation=request.quantised(own),
    )


def _random(request: Request) -> Profile:
    name = request.policy.removeprefix(RANDOM)
    if name not in RANDOM_POLICIES:
        known = " or ".join(RANDOM + each for each in RANDOM_POLICIES)
        raise _invalid(f"there is no random policy {name!r}", f"choose {known}")
    if request.statistics:
        raise _invalid("random weights have no statistics to choose from", "leave --statistics out")
    module = importlib.import_module(RANDOM_POLICIES[name])
    device = choose_device(request.device)
    precision = request.precision or ("bf16" if device.type == "cuda" else "fp32")
    profile: Profile = module.random_profile(name, request, device, precision)
    return profile


def _family(path: Path) -> str:
    """Family of a folder, read off its files and tensors."""
    from taktline_worker.inspection import family_of

    return family_of(path)


def _read(path: Path) -> EngineConfig:
    from taktline_worker.lifecycle import read_config

    return read_config(path)


def check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    """Ascending batch sizes without repeats. Raises TaktlineError CONFIG_INVALID for none, or one below 1."""
    found = tuple(sorted(set(batches)))
    if not found or found[0] < 1 or found[-1] > 1024:
        raise _invalid(f"batch sizes {list(batches)} cannot be measured", "give sizes from 1 to 1024, as 1,2,4")
    return found


def _invalid(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)
