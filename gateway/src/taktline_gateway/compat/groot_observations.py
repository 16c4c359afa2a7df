"""GR00T's observations and actions: nested or flat keys, a batch dimension, actions in named parts. Pure functions."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ActionChunk, ErrorCode, PolicyInfo, TaktlineError
from taktline_protocol.deployment import ClientMapping

from taktline_gateway.compat.observations import INSTRUCTION_KEYS

MAX_ROBOTS = 64
"""Observations in one request; each goes through the queue on its own."""
DEFAULT_ACTION = "actions"
_MODALITIES = ("video", "state", "language", "annotation")


def joined_keys(observation: Any) -> dict[str, Any]:
    """A nested or flat observation under keys `video/NAME`, `state/NAME`, and so on. Raises `invalid_body`."""
    if not isinstance(observation, dict):
        raise _invalid(f"the observation is {type(observation).__name__}, not a map")
    found: dict[str, Any] = {}
    for key, value in observation.items():
        modality, dot, name = key.partition(".")
        if modality in _MODALITIES and isinstance(value, dict):
            entries = {f"{modality}/{inner}": element for inner, element in value.items()}
        elif modality in _MODALITIES and dot:
            entries = {f"{modality}/{name}": value}
        else:
            entries = {key: value}
        if entries.keys() & found.keys():
            raise _invalid(f"{key[:64]!r} is there twice, nested and flat")
        found.update(entries)
    return found


def is_flat(observation: dict[str, Any]) -> bool:
    """Whether its keys are `video.NAME` rather than maps; the answer's keys follow."""
    return any(key.startswith(("video.", "state.")) for key in observation)


def rows_of(observation: dict[str, Any]) -> list[dict[str, Any]]:
    """One observation a robot, out of arrays (B, T, ...) and texts [B] or [B][1] under joined keys.

    Raises:
        TaktlineError: `invalid_body` where the batch is empty, too large, or not the same for all keys.
    """
    sizes = {key: _batch(value) for key, value in observation.items() if _batch(value) is not None}
    counts = set(sizes.values())
    if len(counts) != 1:
        shown = ", ".join(f"{key[:64]} {size}" for key, size in sorted(sizes.items())[:12])
        raise _invalid(f"the batch dimension differs or is missing: {shown or 'no array'}")
    count = counts.pop()
    if count is None or not 1 <= count <= MAX_ROBOTS:
        raise _invalid(f"the batch holds {count} observations; 1 to {MAX_ROBOTS} are read")
    return [{key: value[row] if key in sizes else value for key, value in observation.items()} for row in range(count)]


def mapping_of(row: dict[str, Any], mapping: ClientMapping) -> ClientMapping:
    """The route's mapping, completed by what one row makes plain: its only state, its only text.

    Raises:
        TaktlineError: `state_invalid` where several states could be meant in several orders.
    """
    changes: dict[str, Any] = {}
    if not mapping.state:
        states = [key for key in row if key.startswith("state/")]
        if len(states) > 1:
            raise TaktlineError(
                ErrorCode.STATE_INVALID,
                f"the observation has {len(states)} states and no order: {', '.join(sorted(states))[:300]}",
                "list them in the policy's order in the route's clients.groot.state",
            )
        changes["state"] = tuple(states)
    if not mapping.instruction:
        texts = [key for key in row if key.startswith(("language/", "annotation/")) or key in INSTRUCTION_KEYS]
        if len(texts) == 1:
            changes["instruction"] = texts[0]
    return msgspec.structs.replace(mapping, **changes)


def joined_mapping(mapping: ClientMapping) -> ClientMapping:
    """The same mapping under joined keys: people may write a flat client's `video.NAME` for `video/NAME`."""

    def joined(key: str) -> str:
        modality, dot, name = key.partition(".")
        return f"{modality}/{name}" if dot and modality in _MODALITIES else key

    return msgspec.structs.replace(
        mapping,
        images={joined(key): camera for key, camera in mapping.images.items()},
        state=tuple(joined(key) for key in mapping.state),
        instruction=joined(mapping.instruction),
        actions={name.removeprefix("action."): width for name, width in mapping.actions.items()},
    )


def action_map(chunks: list[ActionChunk], mapping: ClientMapping, *, flat: bool) -> dict[str, NDArray[np.float32]]:
    """float32 (B, H, width) for each named part of the action row; one part of all where the route names none.

    Raises:
        TaktlineError: `config_invalid` where the parts are wider than the row.
    """
    rows = np.stack([chunk.actions.to_numpy() for chunk in chunks]).astype(np.float32, copy=False)
    parts = mapping.actions or {DEFAULT_ACTION: rows.shape[2]}
    if sum(parts.values()) > rows.shape[2]:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"the route's action parts are {sum(parts.values())} wide, the policy's rows {rows.shape[2]}",
            "correct the widths in the route's clients.groot.actions",
        )
    named: dict[str, NDArray[np.float32]] = {}
    start = 0
    for name, width in parts.items():
        named[f"action.{name}" if flat else name] = np.ascontiguousarray(rows[:, :, start : start + width])
        start += width
    return named


def modality_config(info: PolicyInfo, mapping: ClientMapping) -> dict[str, Any]:
    """GR00T's modality configuration of a policy, under the markers of both generations."""
    names = {
        "video": ([0], [key.partition("/")[2] or key for key in mapping.images] or list(info.cameras)),
        "state": ([0], [key.partition("/")[2] or key for key in mapping.state] or ["state"]),
        "action": (list(range(info.horizon)), list(mapping.actions) or [DEFAULT_ACTION]),
        "language": ([0], [mapping.instruction.partition("/")[2] or mapping.instruction or "task"]),
    }
    return {
        modality: {
            "__ModalityConfig_class__": True,
            "__ModalityConfig__": True,
            "as_json": {"delta_indices": deltas, "modality_keys": keys},
        }
        for modality, (deltas, keys) in names.items()
    }


def _batch(value: Any) -> int | None:
    if isinstance(value, np.ndarray) and value.ndim:
        return int(value.shape[0])
    return len(value) if isinstance(value, list) else None


def _invalid(message: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.INVALID_BODY, message, "send video, state and language as GR00T's own client does; see docs/compat.md"
    )
