"""The scheduler file of a Cosmos3 folder: it is not what policies are solved by, and a wrong one is a sign.

The released policies were trained for the flow levels of `solver.noise_levels`; the files beside them are those of the
base models (Nano: Karras levels of 35 steps; Edge: flow levels with shift 3), and the official server reads neither.
A file that is none of these belongs to a model that was trained for other levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taktline_worker.checkpoint import read_json, refuse
from taktline_worker.models.cosmos3.solver import TRAIN_STEPS

FILE = "scheduler/scheduler_config.json"
_SOLVER = {
    "_class_name": "UniPCMultistepScheduler",
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "num_train_timesteps": TRAIN_STEPS,
}
_BASE_KARRAS = (0.147, 200.0)
_BASE_SHIFTS = (3.0, 5.0)


def check_scheduler(folder: Path, shift: float, *, stated: bool) -> str:
    """What the folder's scheduler file says, for people; empty where there is none.

    Args:
        shift: of the levels that will be served.
        stated: whether the deployment or taktline.json states that shift, so that any levels of a flow may be served.

    Raises:
        TaktlineError: CHECKPOINT_INVALID for another solver, or for levels that no released policy has.
    """
    path = folder / FILE
    if not path.is_file():
        return ""
    config = read_json(path)
    for name, value in _SOLVER.items():
        if config.get(name, value) != value:
            raise refuse(
                f"{FILE} has {name} = {config[name]!r}; the policy's solver has {value!r}",
                "use the checkpoint as published; this file is of a model that is solved in another way",
            )
    levels, known = _levels(config, shift)
    if not known and not stated:
        raise refuse(
            f"{FILE} states {levels}, which no released policy has: the model may have been trained for them",
            f"state the shift of its training in taktline.json (the released policies have 5; {shift:g} would be"
            " served), or put back the published file",
        )
    return f"{levels} in {FILE}, not used: shift {shift:g} is served"


def _levels(config: Mapping[str, Any], shift: float) -> tuple[str, bool]:
    """The file's noise levels in words, and whether a released checkpoint has them."""
    if config.get("use_karras_sigmas"):
        low, high = config.get("sigma_min"), config.get("sigma_max")
        known = low is not None and high is not None and _near(low, _BASE_KARRAS[0]) and _near(high, _BASE_KARRAS[1])
        return f"Karras levels from {low} to {high}", known
    if config.get("use_flow_sigmas"):
        stated = float(config.get("flow_shift", 1.0))
        return f"flow levels with shift {stated:g}", stated in (*_BASE_SHIFTS, shift)
    kinds = [name for name in ("use_beta_sigmas", "use_exponential_sigmas") if config.get(name)]
    return f"levels of another kind ({', '.join(kinds) or 'diffusion, not flow'})", False


def _near(value: float, wanted: float) -> bool:
    return abs(float(value) - wanted) <= 0.01 * wanted
