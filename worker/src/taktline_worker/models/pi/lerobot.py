"""LeRobot folders: config.json and the two processor files, read into conventions, with every contradiction refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from taktline_worker.checkpoint import read_json, read_small_tensors, refuse
from taktline_worker.models.pi.config import CameraSlot, Family, PiArchitecture, PiConventions
from taktline_worker.models.pi.normalise import MODES, FloatArray, Mode, Normaliser, identity, make_normaliser
from taktline_worker.models.pi.sidecar import OPENPI_FIELDS, Sidecar, refuse_foreign_fields
from taktline_worker.rtc import SCHEDULES, Schedule

STATE, ACTION = "observation.state", "action"
IMAGE_PREFIX = "observation.images."
_EMPTY_CAMERA = f"{IMAGE_PREFIX}empty_camera_"
_DEFAULT_TOKENS = {"pi0": 48, "pi05": 200}

_USED = {
    "type", "n_obs_steps", "chunk_size", "n_action_steps", "max_state_dim", "max_action_dim", "num_inference_steps",
    "min_period", "max_period", "image_resolution", "empty_cameras", "tokenizer_max_length", "normalization_mapping",
    "input_features", "output_features", "use_relative_actions", "relative_exclude_joints", "action_feature_names",
    "rtc_config", "rtc_training_max_delay",
}  # fmt: skip
# Training, hardware and bookkeeping; sizes come from the tensors, not from the variants' names.
_HARMLESS = {
    "paligemma_variant", "action_expert_variant", "dtype", "device", "use_amp", "push_to_hub", "repo_id", "private",
    "tags", "license", "pretrained_path", "pretrained_revision", "gradient_checkpointing",
    "freeze_vision_encoder", "train_expert_only", "memory_frames", "memory_stride", "memory_temporal_attention_every",
}  # fmt: skip
_HARMLESS_PREFIXES = ("optimizer_", "scheduler_", "compile_", "time_sampling_")
# What these stand for changes the network's inputs; this release serves none of them.
_MUST_BE_OFF = (
    "use_visual_memory",
    "use_proprioceptive_memory",
    "use_peft",
    "adapt_to_pi_aloha",
)

_IGNORED_STEPS = {"to_batch_processor", "device_processor"}


def read_conventions(
    folder: Path, family: Family, architecture: PiArchitecture, sidecar: Sidecar
) -> tuple[PiConventions, str]:
    """Conventions of a LeRobot folder, and the tokenizer's name in it.

    Raises:
        TaktlineError: CHECKPOINT_INVALID or CONFIG_INVALID with what contradicts what.
    """
    refuse_foreign_fields(sidecar, OPENPI_FIELDS, "LeRobot")
    config = read_json(folder / "config.json")
    _check_config(config, family, architecture, sidecar)
    before, after = _steps(folder / "policy_preprocessor.json"), _steps(folder / "policy_postprocessor.json")
    _check_steps(family, before, after)
    state_dim = _width(config, "input_features", STATE, "STATE")
    action_dim = _width(config, "output_features", ACTION, "ACTION")
    for name, width, most in ((STATE, state_dim, "max_state_dim"), (ACTION, action_dim, "max_action_dim")):
        if width > architecture.action_width:
            raise refuse(
                f"{name} has {width} dimensions, the network {architecture.action_width} ({most})", "fix config.json"
            )
    token_step = before.get("tokenizer_processor", {}).get("config", {})
    budget = int(config.get("tokenizer_max_length", _DEFAULT_TOKENS[family]))
    if int(token_step.get("max_length", budget)) != budget:
        raise refuse(
            f"config.json allows {budget} prompt tokens, policy_preprocessor.json {token_step['max_length']}",
            "make tokenizer_max_length and max_length equal",
        )
    normaliser = partial(_normaliser, folder, config, sidecar)
    rtc_schedule, rtc_bound = _rtc_guidance(config)
    conventions = PiConventions(
        layout="lerobot",
        slots=_slots(config, before, sidecar),
        state_dim=state_dim,
        action_dim=action_dim,
        state_normaliser=normaliser(before, "normalizer_processor", STATE, state_dim),
        action_normaliser=normaliser(after, "unnormalizer_processor", ACTION, action_dim),
        prompt="state" if family == "pi05" else "text_newline",
        prompt_tokens=budget,
        state_prompt_width=_state_prompt_width(family, state_dim, sidecar),
        truncate_prompt=sidecar.truncate_prompt,
        resize="bilinear_legacy" if sidecar.legacy_letterbox else "bilinear",
        horizon=int(config.get("chunk_size", 50)),
        solver_steps=int(config.get("num_inference_steps", 10)),
        relative_mask=_relative_mask(config, before, after, state_dim, action_dim),
        min_period=float(config.get("min_period", 0.004)),
        max_period=float(config.get("max_period", 4.0)),
        control_period_s=(sidecar.control_period_ms or 0.0) / 1000.0,
        rtc_max_delay=_rtc_max_delay(config, family),
        rtc_schedule=rtc_schedule,
        rtc_max_guidance_weight=rtc_bound,
    )
    return conventions, str(token_step.get("tokenizer_name", ""))


def _rtc_max_delay(config: Mapping[str, Any], family: Family) -> int:
    delay = config.get("rtc_training_max_delay") or 0
    if not isinstance(delay, int) or delay < 0 or delay > int(config.get("chunk_size", 50)):
        raise refuse(f"config.json has rtc_training_max_delay {delay!r}", "it is a number of actions within a chunk")
    if delay and family != "pi05":
        raise refuse(
            f"config.json sets rtc_training_max_delay {delay}, which only π0.5 has a form for",
            "use a checkpoint without it",
        )
    return delay


def _rtc_guidance(config: Mapping[str, Any]) -> tuple[Schedule | None, float]:
    """Schedule and bound of the guidance that config.json states; None and 0 where it states none."""
    stated = config.get("rtc_config") or {}
    schedule = str(stated.get("prefix_attention_schedule") or "").lower()
    bound = float(stated.get("max_guidance_weight") or 0.0)
    if schedule not in ("", *SCHEDULES) or not 0.0 <= bound < float("inf"):
        raise refuse(
            f"config.json has rtc_config with schedule {schedule!r} and max_guidance_weight {bound}",
            f"the schedules are {', '.join(SCHEDULES)}; the weight is above 0",
        )
    return cast("Schedule | None", schedule or None), bound


def _check_config(config: Mapping[str, Any], family: Family, architecture: PiArchitecture, sidecar: Sidecar) -> None:
    if config.get("type") != family:
        raise refuse(
            f"config.json says type {config.get('type')!r}, the tensors are those of {family}",
            "the folder mixes two checkpoints: fetch it again",
        )
    active = [name for name in _MUST_BE_OFF if config.get(name)]
    if active:
        raise refuse(
            f"config.json sets {', '.join(active)}, which this release does not serve", "use a checkpoint without it"
        )
    unknown = [
        name
        for name, value in config.items()
        if value
        and name not in _USED | _HARMLESS | set(_MUST_BE_OFF) | set(sidecar.ignore_config_fields)
        and not name.startswith(_HARMLESS_PREFIXES)
    ]
    if unknown:
        raise refuse(
            f"config.json sets {', '.join(sorted(unknown))}, which this release does not know",
            "list them under ignore_config_fields in taktline.json once you know that they do not change inference",
        )
    size = [architecture.image_size] * 2
    facts = (
        ("n_obs_steps", config.get("n_obs_steps", 1), 1),
        ("image_resolution", list(config.get("image_resolution", size)), size),
        ("max_action_dim", config.get("max_action_dim", architecture.action_width), architecture.action_width),
        ("max_state_dim", config.get("max_state_dim", architecture.action_width), architecture.action_width),
    )
    for name, stated, actual in facts:
        if stated != actual and not (name == "max_state_dim" and family == "pi05"):
            raise refuse(f"config.json says {name} = {stated}, the tensors imply {actual}", "fix config.json")


def _steps(path: Path) -> dict[str, dict[str, Any]]:
    """Registry name -> step of a processor file."""
    if not path.is_file():
        raise refuse(
            f"{path.name} is missing, so the normalisation statistics are unknown",
            "copy the processor files of the training run; checkpoints older than they are must be migrated by LeRobot",
        )
    found: dict[str, dict[str, Any]] = {}
    for step in read_json(path).get("steps", []):
        name = step.get("registry_name")
        if name is None:
            raise refuse(f"{path} has a custom step {step.get('class')!r}", "only LeRobot's own steps are served")
        name = {"delta_actions_processor": "relative_actions_processor"}.get(name, name)
        if name in found:
            raise refuse(f"{path} has two {name} steps", "save the processors again")
        found[name] = step
    return found


def _check_steps(family: Family, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    prompt = {"pi05": "pi05_prepare_state_tokenizer_processor_step", "pi0": "pi0_new_line_processor"}[family]
    known_before = _IGNORED_STEPS | {
        "rename_observations_processor", "relative_actions_processor", "normalizer_processor", "tokenizer_processor",
        prompt,
    }  # fmt: skip
    known_after = _IGNORED_STEPS | {"unnormalizer_processor", "absolute_actions_processor"}
    for name, steps, known, needed in (
        ("policy_preprocessor.json", before, known_before, ("normalizer_processor", "tokenizer_processor", prompt)),
        ("policy_postprocessor.json", after, known_after, ("unnormalizer_processor",)),
    ):
        unknown = sorted(steps.keys() - known)
        missing = [step for step in needed if step not in steps]
        if unknown or missing:
            raise refuse(
                f"{name} has unknown steps {unknown} and lacks {missing} for {family}",
                "save the processors with the policy, by LeRobot's save_pretrained",
            )


def _width(config: Mapping[str, Any], group: str, name: str, kind: str) -> int:
    feature = config.get(group, {}).get(name)
    if not isinstance(feature, dict) or feature.get("type") != kind or len(feature.get("shape", [])) != 1:
        raise refuse(f"config.json describes no {kind} feature {name!r} under {group}", "fix config.json")
    return int(feature["shape"][0])


def _slots(config: Mapping[str, Any], before: Mapping[str, Any], sidecar: Sidecar) -> tuple[CameraSlot, ...]:
    """Cameras in the order of config.json, declared empty ones last; renamed ones under their names on the robot."""
    visual = [name for name, feature in config.get("input_features", {}).items() if feature.get("type") == "VISUAL"]
    empty = [f"{_EMPTY_CAMERA}{i}" for i in range(int(config.get("empty_cameras", 0)))]
    cameras = [name for name in visual if name not in empty]
    if not cameras:
        raise refuse("config.json describes no camera under input_features", "fix config.json")
    unknown = sorted(set(sidecar.optional_cameras) - set(cameras) - {_short(name) for name in cameras})
    if unknown:
        raise refuse(f"taktline.json calls {unknown} optional, the cameras are {cameras}", "correct optional_cameras")
    renames = before.get("rename_observations_processor", {}).get("config", {}).get("rename_map", {})
    sent_as = {new: old for old, new in renames.items()}
    slots = []
    for key in cameras:
        source = sent_as.get(key, key)
        optional = key in sidecar.optional_cameras or _short(key) in sidecar.optional_cameras
        slots.append(CameraSlot(key, tuple(dict.fromkeys((_short(source), source))), required=not optional))
    return (*slots, *(CameraSlot(key, (), required=False) for key in empty))


def _short(name: str) -> str:
    return name.removeprefix(IMAGE_PREFIX)


def _state_prompt_width(family: Family, state_dim: int, sidecar: Sidecar) -> int:
    width = sidecar.state_prompt_width
    if width and (family != "pi05" or width < state_dim):
        raise refuse(
            f"taktline.json sets state_prompt_width {width} for {family} with {state_dim} state dimensions",
            "remove it, or set the width that the prompt was padded to in training (32)",
        )
    return width


def _normaliser(
    folder: Path,
    config: Mapping[str, Any],
    sidecar: Sidecar,
    steps: Mapping[str, dict[str, Any]],
    step_name: str,
    feature: str,
    width: int,
) -> Normaliser:
    """What the step does to a feature; what LeRobot's own step would leave as it is, is refused or the identity."""
    step = steps[step_name]
    settings = step.get("config", {})
    kind = "STATE" if feature == STATE else "ACTION"
    mapping = settings.get("norm_map")
    if not isinstance(mapping, dict):
        raise refuse(
            f"{step_name} has no norm_map", "save the processors with the policy, by LeRobot's save_pretrained"
        )
    declared = config.get("normalization_mapping") or mapping
    if mapping.get("VISUAL", "IDENTITY") != "IDENTITY":
        raise refuse(f"VISUAL normalisation {mapping['VISUAL']} is not served", "π0 and π0.5 scale pixels to [-1, 1]")
    mode: Mode = mapping.get(kind, "IDENTITY")
    if declared.get(kind, mode) != mode:
        raise refuse(
            f"config.json normalises {kind} by {declared[kind]}, {step_name} by {mode}", "the two files must agree"
        )
    if mode not in MODES:
        raise refuse(f"{kind} normalisation {mode!r} is unknown", f"known modes: {', '.join(MODES)}")
    described = (settings.get("features") or {}).get(feature, {})
    if described.get("type", kind) != kind:
        raise refuse(f"{step_name} describes {feature} as {described['type']}, not {kind}", "correct its features")
    if mode == "IDENTITY":
        return identity()
    statistics = _statistics(folder, step).get(feature, {})
    if not statistics and sidecar.allow_missing_statistics:
        return identity()
    keys = settings.get("normalize_observation_keys")
    if kind == "STATE" and (not described or (keys is not None and feature not in keys)):
        listed = "features" if not described else "normalize_observation_keys"
        raise refuse(
            f"{step_name} normalises {kind} by {mode}, but {listed} leaves out {feature}, which is then not normalised",
            f"list it there, or set {kind} to IDENTITY in norm_map if that was meant",
        )
    if list(described.get("shape", [width])) != [width]:
        raise refuse(
            f"{step_name} describes {feature} as {described['shape']}, config.json as [{width}]", "fix config.json"
        )
    return make_normaliser(
        mode,
        statistics,
        feature=feature,
        width=width,
        eps=float(settings.get("eps", 1e-8)),
        always_add_eps=False,
        source=str(step.get("state_file", step_name)),
    )


def _statistics(folder: Path, step: Mapping[str, Any]) -> dict[str, dict[str, FloatArray]]:
    """Feature -> statistic -> values; keys are split at their last dot, as feature names hold dots themselves."""
    name = step.get("state_file")
    if name is None:
        return {}
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise refuse(f"state_file {name!r} lies outside the folder", "fetch the checkpoint again")
    found: dict[str, dict[str, FloatArray]] = {}
    for key, tensor in read_small_tensors(path).items():
        feature, _, statistic = key.rpartition(".")
        found.setdefault(feature, {})[statistic] = tensor.float().numpy().astype(np.float32)
    return found


def _relative_mask(
    config: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], state_dim: int, action_dim: int
) -> tuple[bool, ...]:
    """Action dimensions that the state is added to; empty when actions are absolute."""
    relative = before.get("relative_actions_processor", {}).get("config", {})
    absolute = after.get("absolute_actions_processor", {}).get("config", {})
    flags = {
        "policy_preprocessor.json": bool(relative.get("enabled", False)),
        "policy_postprocessor.json": bool(absolute.get("enabled", False)),
    }
    if "use_relative_actions" in config:
        flags["config.json"] = bool(config["use_relative_actions"])
    if len(set(flags.values())) > 1:
        raise refuse(f"use_relative_actions is on in some files and off in others: {flags}", "make the files agree")
    if not any(flags.values()):
        return ()
    names = relative.get("action_names") or config.get("action_feature_names")
    excluded = [str(token).lower() for token in relative.get("exclude_joints") or () if token]
    mask = [True] * action_dim
    for index, name in enumerate((names or ())[:action_dim]):
        mask[index] = not any(token in str(name).lower() for token in excluded)
    reach = max((index + 1 for index, on in enumerate(mask) if on), default=0)
    if reach > state_dim:
        raise refuse(
            f"action {reach - 1} is relative, but the state has {state_dim} dimensions", "fix action_feature_names"
        )
    return tuple(mask)
