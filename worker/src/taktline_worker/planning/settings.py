"""Settings of one search: a deployment's defaults, what a request may change, and the limits that refuse the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from taktline_protocol import ErrorCode, TaktlineError

OptimiserName = Literal["cem", "mppi"]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """One search. The defaults are those of the published planner.

    Attributes:
        candidates: action sequences a round.
        rounds: refinements, one after the other.
        elites: best candidates that a round's new distribution is fitted to (CEM).
        horizon: actions of a sequence.
        max_step_m: bound of each xyz delta in metres, and the first round's standard deviation.
        momentum_mean: share of the old mean of xyz that stays; likewise the other three.
        gripper_clip: bound of the gripper delta.
        gripper_dead_zone: a planned gripper delta below it is answered as 0.
        pins: controlled dimension (0..2 = xyz, 3 = gripper) -> fixed value; not bounded by the clips.
        close_gripper: from this step on the gripper delta is 1 whatever is sampled; None never.
        convergence: stop when no standard deviation is above this share of its first value; 0 runs all rounds.
            MPPI keeps its standard deviation, so with it this must be 0.
        temperature: MPPI's softness, as a share of the energies' spread in the round.
        anytime: the hand-off deadline ends the search, with the best plan found by then.
    """

    optimiser: OptimiserName = "cem"
    candidates: int = 400
    rounds: int = 10
    elites: int = 10
    horizon: int = 2
    max_step_m: float = 0.05
    momentum_mean: float = 0.15
    momentum_std: float = 0.15
    momentum_mean_gripper: float = 0.15
    momentum_std_gripper: float = 0.15
    gripper_clip: float = 0.75
    gripper_dead_zone: float = 0.25
    pins: Mapping[int, float] = field(default_factory=dict)
    close_gripper: int | None = None
    convergence: float = 0.0
    temperature: float = 0.25
    anytime: bool = False


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """The most that a request may ask for; a deployment's own settings are checked against them too."""

    candidates: int = 4096
    rounds: int = 100
    horizon: int = 8


@dataclass(frozen=True, slots=True)
class SearchChanges:
    """What one request asks for instead of the deployment's settings; None keeps them."""

    candidates: int | None = None
    rounds: int | None = None
    elites: int | None = None
    horizon: int | None = None
    anytime: bool | None = None


def resolve(defaults: SearchSettings, changes: SearchChanges, limits: SearchLimits) -> SearchSettings:
    """The settings of one request.

    Raises:
        TaktlineError: SEARCH_INVALID naming the setting, its value and its range.
    """
    wanted = {
        name: value
        for name in ("candidates", "rounds", "elites", "horizon", "anytime")
        if (value := getattr(changes, name)) is not None
    }
    settings = replace(defaults, **wanted)
    check(settings, limits)
    return settings


def check(settings: SearchSettings, limits: SearchLimits) -> None:
    """Raises TaktlineError `search_invalid` for the first setting out of its range."""
    s = settings
    _within("candidates", s.candidates, 2, limits.candidates)
    _within("rounds", s.rounds, 1, limits.rounds)
    _within("horizon", s.horizon, 1, limits.horizon)
    # The elites' standard deviation is unbiased: one elite has none.
    _within("elites", s.elites, 2, s.candidates)
    _within("max_step_m", s.max_step_m, 1e-6, 1.0)
    for name in ("momentum_mean", "momentum_std", "momentum_mean_gripper", "momentum_std_gripper"):
        _within(name, getattr(s, name), 0.0, 1.0)
    _within("gripper_clip", s.gripper_clip, 0.0, 1.0)
    _within("gripper_dead_zone", s.gripper_dead_zone, 0.0, 1.0)
    _within("convergence", s.convergence, 0.0, 1.0)
    if s.optimiser == "mppi" and s.convergence:
        raise search_error(
            f"convergence is {s.convergence:g}, and mppi keeps its standard deviation: it would never stop",
            "leave convergence out, or search with optimiser cem",
        )
    _within("temperature", s.temperature, 1e-3, 1e3)
    for dimension, value in s.pins.items():
        _within("the dimension of a pin", dimension, 0, 3)
        _within(f"the pin of dimension {dimension}", value, -1.0, 1.0)
    if s.close_gripper is not None:
        _within("close_gripper", s.close_gripper, 0, s.horizon)


def search_error(message: str, next_step: str) -> TaktlineError:
    """The refusal of a search that cannot be run as asked."""
    return TaktlineError(ErrorCode.SEARCH_INVALID, message, next_step)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise search_error(
            f"{name} is {value:g}; it must be between {low:g} and {high:g}",
            "correct the request's search settings, or the limits of spec.engine.search",
        )
