"""One embodiment of a GR00T checkpoint: cameras, state and action parts with their statistics, and projector slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from taktline_worker.checkpoint import read_json, refuse
from taktline_worker.models.groot.rotations import compose_poses, relative_poses

PROCESSOR_FILE = "processor_config.json"
STATISTICS_FILE = "statistics.json"
EMBODIMENTS_FILE = "embodiment_id.json"
TOKENIZER_FILE = "tokenizer.json"

Scaling = Literal["range", "mean_std", "sin_cos"]
_CONSTANT = 1e-8


@dataclass(frozen=True, slots=True)
class StatePart:
    """One part of the state, float64 statistics (D,); `offset` and `scale` as in (x - offset) / scale.

    Attributes:
        constant: (D,) dimensions whose statistics do not vary: 0 in a range, passed through otherwise.
    """

    key: str
    width: int
    scaling: Scaling
    offset: NDArray[np.float64]
    scale: NDArray[np.float64]
    constant: NDArray[np.bool_]

    @property
    def model_width(self) -> int:
        """Numbers that the network reads of it."""
        return 2 * self.width if self.scaling == "sin_cos" else self.width

    def normalised(self, raw: NDArray[np.float64], clip: bool) -> NDArray[np.float64]:
        """(D,) in robot units -> (model width,)."""
        if self.scaling == "sin_cos":
            return np.concatenate((np.sin(raw), np.cos(raw)))
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = (raw - self.offset) / self.scale
        if self.scaling == "mean_std":
            return np.where(self.constant, raw, scaled)
        scaled = np.where(self.constant, 0.0, 2.0 * scaled - 1.0)
        return np.clip(scaled, -1.0, 1.0) if clip else scaled


@dataclass(frozen=True, slots=True)
class ActionPart:
    """One part of the action row.

    Attributes:
        low, high: float64 (D,) or (T, D), what -1 and 1 stand for; mean and standard deviation where `mean_std`.
        relative: `no`, `values` (added to the state part) or `pose` (composed with it: xyz and rot6d).
        reference: (first, last) of the raw state that a relative part starts from.
    """

    key: str
    width: int
    mean_std: bool
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    relative: Literal["no", "values", "pose"]
    reference: tuple[int, int]

    def decoded(self, rows: NDArray[np.float64], state: NDArray[np.float64]) -> NDArray[np.float64]:
        """(T, D) of the network -> robot units, absolute."""
        low, high = self._bounds(len(rows))
        bounded = rows if self.mean_std else (np.clip(rows, -1.0, 1.0) + 1.0) / 2.0
        values = bounded * high + low if self.mean_std else bounded * (high - low) + low
        if self.relative == "no":
            return values
        start = state[self.reference[0] : self.reference[1]]
        return values + start if self.relative == "values" else compose_poses(start, values)

    def encoded(self, actions: NDArray[np.float64], state: NDArray[np.float64]) -> NDArray[np.float64]:
        """(T, D) in robot units -> the network's, the inverse of `decoded`; 0 where a dimension does not vary."""
        low, high = self._bounds(len(actions))
        start = state[self.reference[0] : self.reference[1]]
        values = actions
        if self.relative != "no":
            values = actions - start if self.relative == "values" else relative_poses(start, actions)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if self.mean_std:
                return np.where(high == 0.0, 0.0, (values - low) / high)
            return np.where(high == low, 0.0, 2.0 * (values - low) / (high - low) - 1.0)

    def _bounds(self, rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        low, high = (one[:rows] if one.ndim == 2 else one for one in (self.low, self.high))
        return low, high


@dataclass(frozen=True, slots=True)
class ImageTransform:
    """How frames are scaled before the backbone's own preprocessor (areas, centre crop, areas again).

    Attributes:
        edge: length of the shortest edge, or None for `target`.
        target: exact (height, width) where there is no `edge`.
        crop: share of each side that is kept.
    """

    edge: int | None
    target: tuple[int, int]
    crop: float


@dataclass(frozen=True, slots=True)
class Embodiment:
    """Everything that depends on the robot.

    Attributes:
        cameras: checkpoint names in the order of the image tokens; "NAME@-15" is NAME fifteen frames ago.
        rows: actions that are decoded.
    """

    tag: str
    slot: int
    cameras: tuple[str, ...]
    state: tuple[StatePart, ...]
    actions: tuple[ActionPart, ...]
    rows: int
    transform: ImageTransform
    formalize_language: bool
    clip: bool
    exclude_state: bool

    @property
    def state_dim(self) -> int:
        """Numbers of the raw state."""
        return sum(part.width for part in self.state)

    @property
    def action_dim(self) -> int:
        """Numbers of an action in robot units."""
        return sum(part.width for part in self.actions)


def find(folder: Path, name: str) -> Path:
    """The file `name` in the folder or its `processor/`.

    Raises:
        TaktlineError: CHECKPOINT_INVALID, naming the file and where it is to be had.
    """
    for place in (folder / name, folder / "processor" / name):
        if place.is_file():
            return place
    source = (
        "it is not part of a GR00T checkpoint: copy it from nvidia/Cosmos-Reason2-2B, the backbone's repository"
        if name == TOKENIZER_FILE
        else "copy it from the published checkpoint"
    )
    raise refuse(f"{folder} holds no {name}, nor does its folder processor/", source)


def read_embodiment(folder: Path, tag: str, horizon: int) -> Embodiment:
    """The embodiment `tag`, or the only one where the tag is empty.

    Args:
        horizon: action tokens of the network.

    Raises:
        TaktlineError: CHECKPOINT_INVALID where a file, a field or the statistics of a part are missing.
    """
    options = read_json(find(folder, PROCESSOR_FILE)).get("processor_kwargs", {})
    modalities = options.get("modality_configs", {})
    statistics = read_json(find(folder, STATISTICS_FILE))
    slots = read_json(find(folder, EMBODIMENTS_FILE))
    known = sorted(modalities.keys() & statistics.keys() & slots.keys())
    if not tag and len(known) == 1:
        tag = known[0]
    if tag not in known:
        raise refuse(
            f"the checkpoint is for {', '.join(known) or 'no embodiment'}, "
            + (f"not for {tag!r}" if tag else "and none is chosen"),
            "set model.statistics (--statistics of taktline's commands) to the embodiment tag of these robots"
            if known
            else f"use {PROCESSOR_FILE}, {STATISTICS_FILE} and {EMBODIMENTS_FILE} of one checkpoint, unmixed",
        )
    try:
        return _embodiment(tag, int(slots[tag]), options, modalities[tag], statistics[tag], horizon)
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(
            f"{PROCESSOR_FILE} and {STATISTICS_FILE} do not describe embodiment {tag!r}: "
            f"{type(error).__name__} {error}",
            "use the files of one checkpoint, unmixed",
        ) from error


def _embodiment(
    tag: str,
    slot: int,
    options: Mapping[str, Any],
    modality: Mapping[str, Any],
    statistics: Mapping[str, Any],
    horizon: int,
) -> Embodiment:
    _refuse_unsupported(options)
    state = _state_parts(modality["state"], statistics["state"], options)
    places = _places(state)
    configs = modality["action"].get("action_configs") or [{}] * len(modality["action"]["modality_keys"])
    actions = tuple(
        _action_part(key, config, modality["action"], statistics, options, places)
        for key, config in zip(modality["action"]["modality_keys"], configs, strict=True)
    )
    rows = len(modality["action"]["delta_indices"])
    if rows > horizon:
        raise ValueError(f"{rows} actions are to be decoded, the network has {horizon}")
    return Embodiment(
        tag=tag,
        slot=slot,
        cameras=_cameras(modality["video"]),
        state=state,
        actions=actions,
        rows=rows,
        transform=_transform(options),
        formalize_language=options.get("formalize_language", True),
        clip=options.get("clip_outliers", True),
        exclude_state=options.get("exclude_state", False),
    )


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    if options.get("letter_box_transform"):
        raise ValueError("letter_box_transform is set, which this release does not reproduce")
    if not options.get("use_albumentations", options.get("use_albumentations_transforms", True)):
        raise ValueError("use_albumentations is false, whose resizing this release does not reproduce")


def _transform(options: Mapping[str, Any]) -> ImageTransform:
    target = tuple(options.get("image_target_size") or (256, 256))
    edge, crop = options.get("shortest_image_edge"), options.get("crop_fraction")
    if crop is None:
        crop = (options.get("image_crop_size") or target)[0] / target[0]
    return ImageTransform(edge, (target[0], target[1]), float(crop))


def _cameras(video: Mapping[str, Any]) -> tuple[str, ...]:
    """Times first, then views: all views of the oldest frame, then of the next."""
    deltas, keys = video["delta_indices"], video["modality_keys"]
    if any(delta > 0 for delta in deltas) or not deltas or not keys:
        raise ValueError(f"video has delta_indices {deltas} of {keys}")
    return tuple(key if delta == 0 else f"{key}@{delta}" for delta in deltas for key in keys)


def _state_parts(
    modality: Mapping[str, Any], statistics: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[StatePart, ...]:
    if list(modality["delta_indices"]) != [0]:
        raise ValueError(f"the state has delta_indices {modality['delta_indices']}, only the present one is read")
    angles = set(modality.get("sin_cos_embedding_keys") or ()) if options.get("apply_sincos_state_encoding") else set()
    gaussian = set(modality.get("mean_std_embedding_keys") or ())
    parts = []
    for key in modality["modality_keys"]:
        values = {name: np.asarray(array, np.float64) for name, array in statistics[key].items()}
        if key in gaussian:
            offset, scale, scaling = values["mean"], values["std"], "mean_std"
            constant = scale == 0.0
        else:
            low, high = _range(values, options)
            offset, scale, scaling = low, high - low, "sin_cos" if key in angles else "range"
            constant = np.isclose(low, high, rtol=0.0, atol=_CONSTANT)
        parts.append(StatePart(key, len(offset), scaling, offset, scale, constant))  # type: ignore[arg-type]
    return tuple(parts)


def _range(values: Mapping[str, NDArray[np.float64]], options: Mapping[str, Any]) -> tuple[Any, Any]:
    if options.get("use_percentiles", True):
        return values["q01"], values["q99"]
    return values["min"], values["max"]


def _places(state: Sequence[StatePart]) -> dict[str, tuple[int, int]]:
    places, start = {}, 0
    for part in state:
        places[part.key] = (start, start + part.width)
        start += part.width
    return places


def _action_part(
    key: str,
    config: Mapping[str, Any],
    modality: Mapping[str, Any],
    statistics: Mapping[str, Any],
    options: Mapping[str, Any],
    places: Mapping[str, tuple[int, int]],
) -> ActionPart:
    relative = bool(options.get("use_relative_action")) and config.get("rep") == "RELATIVE"
    mean_std = key in (modality.get("mean_std_embedding_keys") or ()) and not relative
    source = statistics["relative_action" if relative else "action"][key]
    values = {name: np.asarray(array, np.float64) for name, array in source.items()}
    if mean_std:
        low, high = values["mean"], values["std"]
    elif relative:  # always the whole range, also where percentiles are on; possibly a row for each action
        low, high = values["min"], values["max"]
    else:
        low, high = _range(values, options)
    kind: Literal["no", "values", "pose"] = "no"
    reference = (0, 0)
    if relative:
        reference = places[config.get("state_key") or key]
        kind = "pose" if config.get("type") == "EEF" else "values"
        if kind == "pose" and config.get("format") != "XYZ_ROT6D":
            raise ValueError(f"action part {key!r} is a relative pose in {config.get('format')}; XYZ_ROT6D is read")
        if kind == "pose" and (low.shape[-1] != 9 or reference[1] - reference[0] != 9):
            raise ValueError(f"action part {key!r} and its state are poses of 9 numbers, not {low.shape[-1]}")
    return ActionPart(key, low.shape[-1], mean_std, low, high, kind, reference)
