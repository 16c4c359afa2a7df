"""openpi's PyTorch folders: config.json, assets/<asset>/norm_stats.json and a preset, read into conventions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from taktline_worker.checkpoint import read_json, refuse
from taktline_worker.engine_options import config_error
from taktline_worker.models.pi.config import CameraSlot, Family, PiArchitecture, PiConventions
from taktline_worker.models.pi.normalise import FloatArray, Mode, make_normaliser
from taktline_worker.models.pi.presets import PRESETS, SLOTS, Preset
from taktline_worker.models.pi.sidecar import LEROBOT_FIELDS, Sidecar, refuse_foreign_fields

STATISTICS_FILE = "norm_stats.json"
_EPS = 1e-6
_KNOWN = {"action_dim", "action_horizon", "paligemma_variant", "action_expert_variant", "precision", "pi05",
          "max_token_len", "discrete_state_input", "dtype"}  # fmt: skip
_T = TypeVar("_T")


def read_conventions(
    folder: Path,
    family: Family,
    architecture: PiArchitecture,
    sidecar: Sidecar,
    statistics: str,
    solver_steps: int = 10,
) -> PiConventions:
    """Conventions of an openpi folder.

    Args:
        statistics: asset id where assets/ holds several; empty takes the only one.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with what is missing or contradicts what.
    """
    refuse_foreign_fields(sidecar, LEROBOT_FIELDS, "openpi")
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    _check_config(config, family, architecture)
    preset = _preset(sidecar, family)
    path = _statistics_path(folder, statistics)
    values = _read_statistics(path)
    mode: Mode = sidecar.normalisation or ("MEAN_STD" if family == "pi0" else "QUANTILES")
    state_dim = sidecar.state_dim or (preset.state_dim if preset else None) or _length(values, "state", path)
    action_dim = sidecar.action_dim or (preset.action_dim if preset else None) or _length(values, "actions", path)
    with_state = family == "pi05" and _chosen(
        "state_in_prompt",
        sidecar.state_in_prompt,
        preset.state_in_prompt if preset else config.get("discrete_state_input"),
    )
    for name, width in (("state", state_dim), ("actions", action_dim)):
        if not 0 < width <= architecture.action_width or width > _length(values, name, path):
            raise refuse(
                f"{path} has {_length(values, name, path)} dimensions for {name}, the robot {width}, the network "
                f"{architecture.action_width}",
                "choose the statistics of this robot (model.statistics names the asset)",
            )
    mask = _chosen("relative_mask", sidecar.relative_mask, preset.relative_mask if preset else None)
    if len(mask) > min(state_dim, action_dim):
        raise refuse(
            f"relative_mask has {len(mask)} entries, more than the robot's dimensions", "correct taktline.json"
        )
    horizon = _horizon(sidecar, preset, config)
    return PiConventions(
        layout="openpi",
        slots=_slots(sidecar, preset),
        state_dim=state_dim,
        action_dim=action_dim,
        state_normaliser=make_normaliser(
            mode, values["state"], feature="state", width=0, eps=_EPS, always_add_eps=True, source=str(path)
        ),
        action_normaliser=make_normaliser(
            mode, values["actions"], feature="actions", width=0, eps=_EPS, always_add_eps=True, source=str(path)
        ),
        prompt="state" if with_state else "text_then_newline",
        prompt_tokens=sidecar.prompt_tokens
        or (preset.prompt_tokens if preset else None)
        or int(config.get("max_token_len", 48 if family == "pi0" else 200)),
        truncate_prompt=sidecar.truncate_prompt,
        resize="pil",
        horizon=horizon,
        solver_steps=solver_steps,
        relative_mask=tuple(mask) if any(mask) else (),
        adapt_to_pi=_chosen("adapt_to_pi", sidecar.adapt_to_pi, preset.adapt_to_pi if preset else None),
        accumulate_time=True,
        control_period_s=(sidecar.control_period_ms or 0.0) / 1000.0,
    )


def _check_config(config: Mapping[str, Any], family: Family, architecture: PiArchitecture) -> None:
    unknown = sorted(name for name, value in config.items() if value and name not in _KNOWN)
    if unknown:
        raise refuse(f"config.json sets {', '.join(unknown)}, which this release does not know", "remove what is stale")
    if config.get("action_dim", architecture.action_width) != architecture.action_width:
        raise refuse(
            f"config.json says action_dim {config['action_dim']}, the tensors {architecture.action_width}",
            "fix config.json",
        )
    if "pi05" in config and bool(config["pi05"]) != (family == "pi05"):
        raise refuse(f"config.json says pi05 = {config['pi05']}, the tensors are those of {family}", "fix config.json")


def _preset(sidecar: Sidecar, family: Family) -> Preset | None:
    if sidecar.preset is None:
        return None
    preset = PRESETS.get(sidecar.preset)
    if preset is None:
        raise config_error(f"preset {sidecar.preset!r} is unknown", f"known presets: {', '.join(sorted(PRESETS))}")
    if preset.family != family:
        raise config_error(
            f"preset {sidecar.preset} is for {preset.family}, the tensors are those of {family}",
            f"choose one of {', '.join(sorted(name for name, p in PRESETS.items() if p.family == family))}",
        )
    return preset


def _chosen(name: str, stated: _T | None, default: _T | None) -> _T:
    """A convention that no file of an openpi folder tells: stated, or known from the preset, never assumed."""
    value = stated if stated is not None else default
    if value is None:
        raise config_error(
            f"nothing in the folder says {name}",
            f'add a preset to taktline.json ({{"preset": "pi05_droid"}}), or state {name} there',
        )
    return value


def _horizon(sidecar: Sidecar, preset: Preset | None, config: Mapping[str, Any]) -> int:
    # A preset is explicit; config.json is what the converter wrote, often the default of its config class.
    horizon = sidecar.action_horizon or (preset.horizon if preset else None) or config.get("action_horizon")
    return int(_chosen("action_horizon", None, horizon))


def _slots(sidecar: Sidecar, preset: Preset | None) -> tuple[CameraSlot, ...]:
    cameras = _chosen("cameras", sidecar.cameras, preset.cameras if preset else None)
    wrong = sorted(set(cameras.values()) - set(SLOTS))
    if wrong or len(set(cameras.values())) != len(cameras) or not cameras:
        raise config_error(
            f"cameras maps {cameras}, of which {wrong or 'two names share one slot, or none is named'}",
            f"map each robot camera to one of {', '.join(SLOTS)}",
        )
    names = {slot: name for name, slot in cameras.items()}
    optional = preset.optional_slots if preset else ()
    return tuple(
        CameraSlot(slot, (names[slot], slot) if slot in names else (), slot in names and slot not in optional)
        for slot in SLOTS
    )


def _statistics_path(folder: Path, asset: str) -> Path:
    root = folder / "assets"
    found = sorted(root.rglob(STATISTICS_FILE)) if root.is_dir() else []
    if (folder / STATISTICS_FILE).is_file():
        found.append(folder / STATISTICS_FILE)
    ids = {str(path.parent.relative_to(root)) if path.is_relative_to(root) else "": path for path in found}
    if not found:
        raise refuse(f"{folder} holds no assets/<asset>/{STATISTICS_FILE}", "copy the assets folder of the checkpoint")
    if asset:
        if asset not in ids:
            raise refuse(f"statistics {asset!r} are not in {root}", f"found: {', '.join(sorted(ids))}")
        return ids[asset]
    if len(found) > 1:
        raise refuse(f"{root} holds several statistics: {', '.join(sorted(ids))}", "name one as model.statistics")
    return found[0]


def _read_statistics(path: Path) -> dict[str, dict[str, FloatArray]]:
    content = read_json(path).get("norm_stats")
    if not isinstance(content, dict):
        raise refuse(f"{path} has no norm_stats object", "fetch it again")
    found: dict[str, dict[str, FloatArray]] = {}
    for feature, entry in content.items():
        try:
            found[feature] = {
                name: np.asarray(values, np.float64) for name, values in entry.items() if values is not None
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise refuse(f"{path} holds no lists of numbers for {feature!r}", "fetch it again") from error
    return found


def _length(values: Mapping[str, Mapping[str, FloatArray]], feature: str, path: Path) -> int:
    try:
        mean = values[feature]["mean"]
        return int(mean.shape[0])
    except (KeyError, IndexError):
        raise refuse(f"{path} has no {feature}.mean", "take the statistics of the same training run") from None
