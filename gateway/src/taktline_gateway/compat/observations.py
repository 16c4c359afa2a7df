"""From a client's keys to named cameras, one state vector and an instruction: by the route's mapping, or by convention.

The conventions are the published clients' own and are listed in docs/compat.md. What fits none of them is refused with
the keys that were seen; nothing is assigned by position or by likeness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from taktline_protocol import Array, ErrorCode, Image, PolicyInfo, TaktlineError
from taktline_protocol.deployment import ClientMapping, ClientProtocol

from taktline_gateway.compat.wire_arrays import EncodedFrame

PREFIXES = ("observation/images/", "observation/", "images/", "observation.images.", "observation.", "video.", "video/")
"""What clients put before a camera's own name."""
SAME_VIEW: tuple[frozenset[str], ...] = (
    frozenset({"base_0_rgb", "image", "exterior_image_1_left", "cam_high", "agentview"}),
    frozenset({"left_wrist_0_rgb", "wrist_image", "wrist_image_left", "cam_left_wrist", "wrist"}),
    frozenset({"right_wrist_0_rgb", "cam_right_wrist"}),
)
"""Names that the published DROID, LIBERO and ALOHA clients and checkpoints give one and the same view."""
NOT_READ = frozenset({"cam_low"})
"""ALOHA clients send it; openpi's policies do not read it either."""
STATE_KEYS: tuple[tuple[str, ...], ...] = (
    ("observation/state",),
    ("state",),
    ("states",),
    ("observation.state",),
    ("observation/joint_position", "observation/gripper_position"),
    ("joint_position", "gripper_position"),
)
"""The first of these that is there whole is the state; the keys of one entry are concatenated in its order."""
INSTRUCTION_KEYS = ("prompt", "task_description", "instruction", "task")
MAX_KEYS_SHOWN = 12


class ClientInput(msgspec.Struct, frozen=True):
    """What a policy reads, out of a client's observation."""

    images: dict[str, Image]
    state: Array
    instruction: str


def read_observation(
    observation: Any, mapping: ClientMapping, info: PolicyInfo, protocol: ClientProtocol
) -> ClientInput:
    """Reads one decoded client observation: a map whose nested keys are joined by `/`.

    Images are uint8 or float in [0, 1], (H, W, 3) or (3, H, W), or encoded frames. The state is float64 (D,).

    Raises:
        TaktlineError: `invalid_body`, `camera_missing`, `camera_unknown`, `image_corrupt`, `state_invalid`,
            `instruction_invalid`, or `worker_unavailable` where no worker has told the policy's cameras yet. Sizes
            are the gateway's to check, as of every observation.
    """
    if not isinstance(observation, dict):
        raise TaktlineError(
            ErrorCode.INVALID_BODY,
            f"the observation is {type(observation).__name__}, not a map",
            "send a map of named images, state and instruction",
        )
    leaves: dict[str, Any] = {}
    for key, value in _leaves(observation, ""):
        if key in leaves:
            raise TaktlineError(ErrorCode.INVALID_BODY, f"{key[:64]!r} is there twice", "send each key once")
        leaves[key] = value
    named = _mapped_images(leaves, mapping, protocol) if mapping.images else _conventional_images(leaves, info)
    images = {camera: image_of(camera, value) for camera, value in named.items()}
    return ClientInput(images, _state(leaves, mapping, protocol), _instruction(leaves, mapping, protocol))


def image_of(camera: str, value: Any) -> Image:
    """One frame in the gateway's own form. Raises TaktlineError `image_corrupt`."""
    if isinstance(value, EncodedFrame):
        return Image(value.encoding, value.data)
    if not isinstance(value, np.ndarray):
        raise _corrupt(camera, f"it is {type(value).__name__}")
    pixels = _rgb(camera, value)
    height, width, _ = pixels.shape
    own = pixels.base
    if isinstance(own, bytes) and len(own) == pixels.nbytes and pixels.flags.c_contiguous:
        # A frame that came as HWC uint8 is handed on as the very bytes that arrived.
        return Image("raw", own, (height, width, 3))
    return Image("raw", pixels.tobytes(), (height, width, 3))


def _rgb(camera: str, array: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8 (H, W, 3) of an array that is HWC or CHW, uint8 or float in [0, 1]."""
    while array.ndim > 3 and array.shape[0] == 1:
        array = array[0]  # a batch or a history of one
    if array.ndim != 3 or 3 not in (array.shape[0], array.shape[2]) or 0 in array.shape:
        raise _corrupt(camera, f"its shape {array.shape} is neither (height, width, 3) nor (3, height, width)")
    if array.shape[2] != 3:
        array = np.moveaxis(array, 0, 2)
    if array.dtype.kind == "f":
        if not (np.isfinite(array).all() and array.min() >= 0.0 and array.max() <= 1.0):
            raise _corrupt(camera, "its float values are not within [0, 1]")
        return (255 * array).astype(np.uint8)
    if array.dtype != np.uint8:
        raise _corrupt(camera, f"its dtype is {array.dtype}, not uint8 or float")
    return array


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, element in value.items():
        if isinstance(element, dict):
            yield from _leaves(element, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", element


def _mapped_images(leaves: Mapping[str, Any], mapping: ClientMapping, protocol: ClientProtocol) -> dict[str, Any]:
    missing = sorted(set(mapping.images) - set(leaves))
    if missing:
        raise TaktlineError(
            ErrorCode.CAMERA_MISSING,
            f"the observation has no {_shown(missing)}, which the route's mapping reads; it has {_shown(leaves)}",
            f"send it, or correct the route's clients.{protocol}.images",
        )
    return {camera: leaves[key] for key, camera in mapping.images.items()}


def _conventional_images(leaves: Mapping[str, Any], info: PolicyInfo) -> dict[str, Any]:
    cameras = [*info.cameras, *info.optional_cameras]
    if not cameras:
        # The names come from a worker, and none has been up since this gateway started.
        raise TaktlineError(
            ErrorCode.WORKER_UNAVAILABLE,
            f"no worker of policy {info.policy!r} is ready",
            "wait for GET /v1/policies/{policy} to say ready, or look at the worker's log",
            retry_after_ms=1000.0,
        )
    found: dict[str, Any] = {}
    for key, value in leaves.items():
        if not _looks_like_an_image(value):
            continue
        name = _short(key)
        camera = key if key in cameras else _camera_of(name, cameras)
        if camera is None and name in NOT_READ:
            continue
        if camera is None or camera in found:
            why = f"no camera for {key[:64]!r}" if camera is None else f"two images for its camera {camera!r}"
            raise TaktlineError(
                ErrorCode.CAMERA_UNKNOWN,
                f"policy {info.policy!r} has {why}; its cameras are {_shown(cameras)}",
                "name the images in the route's clients mapping, or the cameras in spec.model.cameras",
            )
        found[camera] = value
    missing = [camera for camera in info.cameras if camera not in found]
    if missing:
        raise TaktlineError(
            ErrorCode.CAMERA_MISSING,
            f"policy {info.policy!r} needs {_shown(missing)}; the observation has {_shown(leaves)}",
            _flat(leaves, missing) or "send an image for each camera, or name them in the route's clients mapping",
        )
    return found


def _flat(leaves: Mapping[str, Any], missing: list[str]) -> str | None:
    """What to do about an array that has a missing camera's name and is no image, as one without colours."""
    for key, value in leaves.items():
        if isinstance(value, np.ndarray) and _camera_of(_short(key), missing) is not None:
            return f"{key[:64]!r} is {value.dtype} of shape {value.shape}: send uint8 (height, width, 3)"
    return None


def _looks_like_an_image(value: Any) -> bool:
    return isinstance(value, EncodedFrame) or (
        isinstance(value, np.ndarray) and value.ndim >= 3 and (value.dtype == np.uint8 or value.dtype.kind == "f")
    )


def _short(key: str) -> str:
    for prefix in PREFIXES:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _camera_of(name: str, cameras: list[str]) -> str | None:
    own = [camera for camera in cameras if name in (camera, _short(camera))]
    if not own:
        own = [camera for view in SAME_VIEW if name in view for camera in cameras if _short(camera) in view]
    return own[0] if len(own) == 1 else None


def _state(leaves: Mapping[str, Any], mapping: ClientMapping, protocol: ClientProtocol) -> Array:
    if mapping.state:
        missing = [key for key in mapping.state if key not in leaves]
        if missing:
            raise _no_state(f"it has no {_shown(missing)}, which the route's mapping reads", leaves, protocol)
        keys = mapping.state
    else:
        keys = next((keys for keys in STATE_KEYS if all(key in leaves for key in keys)), ())
        if not keys:
            raise _no_state("none of the known state keys is there whole", leaves, protocol)
    return Array.from_numpy(np.concatenate([_vector(key, leaves[key], protocol) for key in keys]))


def _vector(key: str, value: Any, protocol: ClientProtocol) -> NDArray[np.float64]:
    numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    if not numeric and isinstance(value, list):
        numeric = all(type(number) in (int, float) for number in value)
    if not numeric and type(value) not in (int, float):
        raise _no_state(f"{key[:64]!r} is no vector of numbers", {}, protocol)
    vector = np.asarray(value, dtype=np.float64)
    while vector.ndim > 1 and vector.shape[0] == 1:
        vector = vector[0]
    if vector.ndim > 1:
        raise _no_state(f"{key[:64]!r} has shape {vector.shape}", {}, protocol)
    return np.atleast_1d(vector)


def _instruction(leaves: Mapping[str, Any], mapping: ClientMapping, protocol: ClientProtocol) -> str:
    keys = (mapping.instruction,) if mapping.instruction else INSTRUCTION_KEYS
    value = next((leaves[key] for key in keys if key in leaves), None)
    while isinstance(value, list) and len(value) == 1:
        value = value[0]  # a batch of one
    if value is None or value == "":
        value = mapping.default_instruction
    if not isinstance(value, str) or not value.strip():
        raise TaktlineError(
            ErrorCode.INSTRUCTION_INVALID,
            f"the observation has no text under {_shown(keys)}",
            f"send the task in words, or set the route's clients.{protocol}.default_instruction",
        )
    return value


def _no_state(reason: str, leaves: Mapping[str, Any], protocol: ClientProtocol) -> TaktlineError:
    seen = f"; the observation has {_shown(leaves)}" if leaves else ""
    return TaktlineError(
        ErrorCode.STATE_INVALID,
        f"the state cannot be read: {reason}{seen}",
        f"send the state as one vector, or list its keys in the route's clients.{protocol}.state",
    )


def _corrupt(camera: str, reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.IMAGE_CORRUPT,
        f"the image for camera {camera!r} cannot be read: {reason}",
        "send uint8 (height, width, 3) or (3, height, width)",
    )


def _shown(keys: Any) -> str:
    names = [repr(key[:64]) for key in keys]
    more = f" and {len(names) - MAX_KEYS_SHOWN} more" if len(names) > MAX_KEYS_SHOWN else ""
    return (", ".join(names[:MAX_KEYS_SHOWN]) or "nothing") + more
