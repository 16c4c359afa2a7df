"""Which requests a Cosmos3 deployment serves: the preset, what the checkpoint states, what the deployment changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import msgspec
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.deployment import EngineOptions, WorldActionOptions

from taktline_worker.models.cosmos3.request import PRESETS, SPATIAL_FACTOR, RequestSettings

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)

PAGE = "docs/cosmos3.md"
MAX_GUIDANCE = 20.0
MAX_STEPS = 100
_LAST_TIME = 1001.0
_EDGE_INTERVAL = (960.0, 1001.0)
"""The official recipe of the Edge policy: of its four steps only the first runs guidance."""

VIEW_TEXT = (
    "This video contains concatenated views from multiple camera perspectives."
    " The top row is from the wrist-mounted camera."
    " The bottom row contains two horizontally concatenated third-person perspective views of the scene from opposite"
    " sides, with the robot visible."
)
"""What the released DROID policy was trained to read of its picture; another wording is another prompt to it."""


@dataclass(frozen=True, slots=True)
class Embodiment:
    """What the numbers of one robot's state and actions are.

    Attributes:
        domain: row of the checkpoint's embodiment tables.
        dims: numbers of the state and of an action.
        flipped: of these, which the model knows as 1 - value.
    """

    name: str
    domain: int
    dims: int
    flipped: tuple[int, ...]
    meaning: str


DROID = Embodiment("droid_lerobot", 8, 8, (7,), "7 joint positions in radians, then the gripper from 0 to 1")
EMBODIMENTS = {DROID.name: DROID}
"""Those with a released policy; a checkpoint of one's own states its robot in taktline.json."""


class OwnEmbodiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A robot that only this checkpoint knows; see `Embodiment`."""

    name: str
    domain: int
    dims: int
    flipped: tuple[int, ...] = ()
    meaning: str = "the numbers of its training data, in their order"


class OwnShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Frames and actions of a checkpoint that was trained further in another shape; see `RequestSettings`."""

    frames: int
    actions: int
    padded: tuple[int, int]
    content: tuple[int, int]
    fps: float


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`taktline.json` of a Cosmos3 folder; every field may be left out.

    Attributes:
        description: one sentence, for people.
        preset: likewise all fields of `WorldActionOptions`, which come first where a deployment sets them.
        own_embodiment: the robot of a checkpoint that was trained further.
        own_shape: likewise, where it was trained in another shape than the official one.
        view_text: what the picture is said to show, where it is not the three DROID views.
    """

    description: str = ""
    preset: Literal["official", "paper"] = "official"
    embodiment: str = ""
    own_embodiment: OwnEmbodiment | None = None
    own_shape: OwnShape | None = None
    guidance: float | None = None
    guidance_interval: tuple[float, float] | None = None
    shift: float | None = None
    prompt: Literal["json", "plain"] = "json"
    view_text: str = VIEW_TEXT


@dataclass(frozen=True, slots=True)
class Serving:
    """All that is decided before the first observation.

    Attributes:
        settings: of every request.
        rows: actions of an answer, at most `settings.actions`.
        control_period_s: time between two of them.
        prompt: `json` or `plain`.
        imagine: whether clients may ask for the imagined video.
    """

    settings: RequestSettings
    embodiment: Embodiment
    rows: int
    control_period_s: float
    prompt: Literal["json", "plain"]
    view_text: str
    imagine: bool


def resolve(sidecar: Sidecar, options: EngineOptions, *, edge: bool, domains: int, action_width: int) -> Serving:
    """What a deployment serves.

    Args:
        edge: whether the checkpoint is an Edge model, whose official recipe differs.
        domains: rows of the checkpoint's embodiment tables.
        action_width: numbers of a row of actions in the network.

    Raises:
        TaktlineError: CONFIG_INVALID with the setting, its bounds and where to change it.
    """
    asked = options.world_action or WorldActionOptions()
    preset = _shaped(PRESETS[asked.preset or sidecar.preset], sidecar.own_shape)
    embodiment = _embodiment(asked.embodiment or sidecar.embodiment, sidecar.own_embodiment)
    if not 0 <= embodiment.domain < domains:
        raise _error(
            f"embodiment {embodiment.name!r} is domain {embodiment.domain}; the checkpoint has {domains}",
            "correct own_embodiment.domain in taktline.json, or use the checkpoint that was trained for this robot",
        )
    # The paper's shape has rows of its own width, whatever robot they are for.
    dims = preset.raw_dims if preset.name == "paper" else embodiment.dims
    if not 1 <= dims <= action_width:
        raise _error(
            f"embodiment {embodiment.name!r} has {dims} numbers an action, the network {action_width}",
            "correct own_embodiment.dims in taktline.json",
        )
    interval = _first(_EDGE_INTERVAL if edge else None, asked.guidance_interval, sidecar.guidance_interval)
    settings = replace(
        preset,
        raw_dims=dims,
        domain=embodiment.domain,
        steps=_within("engine.solverSteps", _first(preset.steps, options.solver_steps), 1, MAX_STEPS),
        shift=_within("engine.worldAction.shift", _first(preset.shift, asked.shift, sidecar.shift), 0.01, 100.0),
        guidance=_guidance(_first(preset.guidance, asked.guidance, sidecar.guidance)),
        interval=_interval(interval),
    )
    period_ms = _first(1000.0 / settings.fps, options.control_period_ms)
    return Serving(
        settings=settings,
        embodiment=embodiment,
        rows=_within("engine.actionHorizon", _first(settings.actions, options.action_horizon), 1, settings.actions),
        control_period_s=_within("engine.controlPeriodMs", period_ms, 0.1, 60_000.0) / 1000.0,
        prompt=asked.prompt or sidecar.prompt,
        view_text=sidecar.view_text,
        imagine=asked.imagine,
    )


def check_grid(settings: RequestSettings) -> None:
    """Raises CONFIG_INVALID for frames that the VAE cannot cut into latent cells."""
    sides = zip(settings.content, settings.padded, strict=True)
    fits = all(SPATIAL_FACTOR <= inner <= outer and outer % SPATIAL_FACTOR == 0 for inner, outer in sides)
    if not fits or (settings.frames - 1) % 4 or (settings.encoded_frames - 1) % 4:
        raise _error(
            f"frames of {settings.content} padded to {settings.padded}, {settings.encoded_frames} of"
            f" {settings.frames} encoded, do not fit latent cells of {SPATIAL_FACTOR} pixels and 4 frames",
            "use a preset's sizes, or multiples of 16 pixels and 1 + 4n frames",
        )


def _shaped(preset: RequestSettings, own: OwnShape | None) -> RequestSettings:
    """A checkpoint's own shape in place of the official one; the paper's is asked for by name and stays."""
    if own is None or preset.name == "paper":
        return preset
    return replace(
        preset,
        name="own",
        frames=_within("own_shape.frames", own.frames, 5, 1001),
        actions=_within("own_shape.actions", own.actions, 1, 1024),
        padded=own.padded,
        content=own.content,
        fps=_within("own_shape.fps", own.fps, 0.1, 1000.0),
    )


def _embodiment(name: str, own: OwnEmbodiment | None) -> Embodiment:
    known = dict(EMBODIMENTS)
    if own is not None:
        if any(not 0 <= place < own.dims for place in own.flipped):
            raise _error(
                f"own_embodiment flips dimensions {list(own.flipped)} of {own.dims}", "name dimensions that it has"
            )
        known[own.name] = Embodiment(own.name, own.domain, own.dims, own.flipped, own.meaning)
    wanted = name or (own.name if own is not None else DROID.name)
    if wanted not in known:
        raise _error(
            f"embodiment {wanted!r} is none that this checkpoint has a policy for",
            f"set engine.worldAction.embodiment to one of {', '.join(sorted(known))}, or state own_embodiment in"
            " taktline.json",
        )
    return known[wanted]


def _guidance(value: float) -> float:
    return _within("engine.worldAction.guidance", value, 1.0, MAX_GUIDANCE)


def _interval(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    if interval is None:
        return None
    low, high = interval
    if not (math.isfinite(low) and math.isfinite(high) and 0 <= low < high <= _LAST_TIME):
        raise _error(
            f"engine.worldAction.guidanceInterval is {low:g} to {high:g}",
            f"set two times, the smaller first, from 0 to {_LAST_TIME:g}; [0, {_LAST_TIME:g}] is every step but time 0",
        )
    return interval


def _first(default: Value, *stated: Value | None) -> Value:
    """The first value that is stated."""
    return next((value for value in stated if value is not None), default)


def _within(name: str, value: Number, low: float, high: float) -> Number:
    if not (math.isfinite(value) and low <= value <= high):
        raise _error(f"{name} is {value:g}", f"set {low:g} to {high:g}")
    return value


def _error(message: str, next_step: str) -> TaktlineError:
    return TaktlineError(ErrorCode.CONFIG_INVALID, message, next_step)
