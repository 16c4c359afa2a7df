"""msgpack with NumPy arrays, data only: one decoder for the openpi and vla-eval layouts, one encoder for each.

The two layouts differ in the type of their marker keys: openpi writes them as msgpack bin, vla-eval as str. A decoded
array is a read-only view on the bytes of its frame. Nothing here can run code that a peer sent: dtypes come from a
closed list, and an array's bytes must be exactly as many as its shape says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from taktline_protocol import Array, ErrorCode, TaktlineError
from taktline_protocol.limits import Limits, check_body_size, check_structure_msgpack

MAX_RANK = 6
MAX_TEXT_DTYPE = 8
_ITEM_BYTES: dict[str, tuple[int, ...]] = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}
_DTYPES: dict[str, np.dtype[Any]] = {
    f"{order}{kind}{size}": np.dtype(f"{order}{kind}{size}")
    for kind, sizes in _ITEM_BYTES.items()
    for size in sizes
    for order in "<>|="
}
"""Every dtype string that may arrive. A lookup, since NumPy's own parser also reads objects, records and subarrays."""
_WIRE_DTYPES = {"uint8": "|u1", "int32": "<i4", "int64": "<i8", "float32": "<f4", "float64": "<f8"}
_ARRAY_KEYS = frozenset({"data", "dtype", "shape"})
_SCALAR_KEYS = frozenset({"data", "dtype"})
_IMAGE_FORMATS = ("raw", "jpeg", "png")


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedFrame:
    """An image that arrived encoded (vla-eval's `__image__`): its bytes stay as they are."""

    encoding: Literal["jpeg", "png"]
    data: bytes


Marked = Callable[[dict[str, Any]], Any]
"""Turns a map that carries a marker key into the value that it stands for; returns any other map as it is."""


def decode(frame: bytes, limits: Limits, marked: Marked | None = None) -> Any:
    """Decodes one frame into None, bool, int, float, str, bytes, list, dict with str keys, ndarray and EncodedFrame.

    Arrays have dtype kinds b, i, u or f only. Size, depth and number of values are bounded before anything is built.

    Args:
        marked: what a protocol's marked maps stand for; None reads the layouts of openpi and vla-eval.

    Raises:
        TaktlineError: `body_too_large` or `invalid_body`, nothing else.
    """
    return rebuild(unpack(frame, limits), marked)


def unpack(frame: bytes, limits: Limits) -> Any:
    """The first half of `decode`: msgpack values, what they mark left as it is. Raises TaktlineError like it."""
    check_body_size(len(frame), limits)
    check_structure_msgpack(frame, limits)
    try:
        return msgspec.msgpack.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise invalid_frame(f"the frame is no msgpack: {str(error)[:200]}") from error


def rebuild(value: Any, marked: Marked | None = None) -> Any:
    """The second half of `decode`: arrays and images. Raises TaktlineError like it."""
    return _rebuild(value, marked or _marked)


def encode_openpi(value: Any) -> bytes:
    """Encodes with openpi's layout: marker keys are bin. Raises TypeError for a value that has no place on the wire."""
    return _openpi.encode(value)


def packed_openpi(array: Array) -> dict[bytes, Any]:
    """What `encode_openpi` makes of an array, from its bytes as they are."""
    return {b"__ndarray__": True, b"data": array.data, b"dtype": _WIRE_DTYPES[array.dtype], b"shape": array.shape}


def encode_vla_eval(value: Any) -> bytes:
    """Encodes with vla-eval's layout: marker keys are str. Raises TypeError for a value with no place on the wire."""
    return _vla_eval.encode(value)


def _openpi_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        check_kind(value.dtype)
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.float64 | np.str_):
        return value.item()
    if isinstance(value, np.generic):
        check_kind(value.dtype)
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} has no place on the wire")


def _vla_eval_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        check_kind(value.dtype)
        return {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place on the wire")


_openpi = msgspec.msgpack.Encoder(enc_hook=_openpi_hook)
_vla_eval = msgspec.msgpack.Encoder(enc_hook=_vla_eval_hook)


def check_kind(dtype: np.dtype[Any]) -> None:
    """Raises TypeError for a dtype that no client could read safely."""
    if dtype.kind not in _ITEM_BYTES:
        raise TypeError(f"arrays of dtype {dtype} have no place on the wire")


def _rebuild(value: Any, marked: Marked) -> Any:
    """The walk is as deep as the frame, which the structure check has bounded."""
    kind = type(value)
    if kind is dict:
        return _rebuild_map(value, marked)
    if kind is list:
        return [_rebuild(element, marked) for element in value]
    if value is None or kind in (str, bytes, int, float, bool):
        return value
    raise invalid_frame(f"{kind.__name__} values (msgpack extensions) are not read here")


def _rebuild_map(value: dict[Any, Any], marked: Marked) -> Any:
    entries: dict[str, Any] = {}
    for key, element in value.items():
        if type(key) is bytes:
            try:
                key = key.decode()
            except UnicodeDecodeError as error:
                raise invalid_frame("a key is not UTF-8") from error
        if type(key) is not str:
            raise invalid_frame(f"keys must be text, not {type(key).__name__}")
        if key in entries:
            raise invalid_frame(f"key {key[:64]!r} appears twice")
        entries[key] = element
    found = marked(entries)
    if found is not entries:
        return found
    return {key: _rebuild(element, marked) for key, element in entries.items()}


def _marked(entries: dict[str, Any]) -> Any:
    if "__ndarray__" in entries:
        return array_of({key: value for key, value in entries.items() if key != "__ndarray__"})
    if "__npgeneric__" in entries:
        return _scalar_of({key: value for key, value in entries.items() if key != "__npgeneric__"})
    if "__image__" in entries:
        return _image_of({key: value for key, value in entries.items() if key != "__image__"})
    return entries


def array_of(entries: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """A read-only array over `data` with exactly `dtype` and `shape`. Raises TaktlineError `invalid_body`."""
    if entries.keys() != _ARRAY_KEYS:
        raise invalid_frame(f"an array has the keys {keys_shown(entries)}, not data, dtype and shape")
    data = entries["data"]
    dtype = dtype_of(entries["dtype"])
    shape = _shape_of(entries["shape"])
    if type(data) is not bytes:
        raise invalid_frame(f"the data of an array is {type(data).__name__}, not bytes")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise invalid_frame(f"an array of {dtype.str} and shape {list(shape)} needs {expected} bytes, not {len(data)}")
    if dtype.kind == "b":
        # Any byte but 0 and 1 in a boolean array is undefined behaviour in what reads it.
        data = (np.frombuffer(data, np.uint8) != 0).tobytes()
    array: np.ndarray[Any, np.dtype[Any]] = np.ndarray(shape, dtype, buffer=data)
    return array


def dtype_of(text: Any) -> np.dtype[Any]:
    """The dtype named by a NumPy type string of kind b, i, u or f. Raises TaktlineError `invalid_body`."""
    if type(text) is bytes and len(text) <= MAX_TEXT_DTYPE and text.isascii():
        text = text.decode()
    dtype = _DTYPES.get(text) if type(text) is str else None
    if dtype is None:
        raise invalid_frame(f"dtype {shown(text, 32)!r} is not read here: send booleans, integers or floats")
    return dtype


def _shape_of(shape: Any) -> tuple[int, ...]:
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise invalid_frame(f"the shape of an array is no list of at most {MAX_RANK} lengths")
    for length in shape:
        if type(length) is not int or not 0 <= length < 2**31:
            raise invalid_frame("a length in the shape of an array is not a whole number from 0 to 2^31 - 1")
    if math.prod(length or 1 for length in shape) >= 2**31:
        # Also where a length is 0 and no byte is needed: NumPy multiplies the other lengths all the same.
        raise invalid_frame(f"the shape {shape} of an array is out of all proportion")
    return tuple(shape)


def _scalar_of(entries: Mapping[str, Any]) -> bool | int | float:
    if entries.keys() != _SCALAR_KEYS:
        raise invalid_frame(f"a scalar has the keys {keys_shown(entries)}, not data and dtype")
    data = entries["data"]
    kind = dtype_of(entries["dtype"]).kind
    if type(data) not in (bool, int, float):
        raise invalid_frame(f"the data of a scalar is {type(data).__name__}, not a number")
    if kind == "b":
        return bool(data)
    if kind == "f":
        return float(data)
    if type(data) is float:
        raise invalid_frame("the data of an integer scalar is a float")
    return int(data)


def _image_of(entries: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[Any]] | EncodedFrame:
    encoding, data = entries.get("format"), entries.get("data")
    if encoding not in _IMAGE_FORMATS or type(data) is not bytes:
        raise invalid_frame(
            f"an image has format {shown(encoding, 32)!r}; it needs bytes as {', '.join(_IMAGE_FORMATS)}"
        )
    if encoding == "raw":
        return array_of({key: entries.get(key) for key in _ARRAY_KEYS})
    return EncodedFrame(encoding, data)


def shown(value: Any, most: int) -> str:
    """A value in a refusal: the first `most` characters of a text, of anything else its kind alone.

    Lists that share their elements stand in a few bytes for more text than any memory holds, and the text of a whole
    frame costs as much as the frame.
    """
    return value[:most] if type(value) is str else f"({type(value).__name__})"


def keys_shown(entries: Mapping[str, Any]) -> str:
    """The first few keys of a map in a refusal, each cut short."""
    return ", ".join(key[:32] for key in sorted(entries)[:8])


def invalid_frame(message: str) -> TaktlineError:
    """The error of a frame that cannot be read."""
    return TaktlineError(
        ErrorCode.INVALID_BODY, message, "encode the frame as your client's own packer does; see docs/compat.md"
    )
