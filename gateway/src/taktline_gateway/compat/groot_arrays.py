"""Arrays of the two generations of GR00T's ZeroMQ protocol, data only: `.npy` bytes, and the msgpack-numpy layout.

The older generation sends {"__ndarray_class__": true, "as_npy": a .npy file}; the current one a map with bin keys nd,
type, kind, shape and data, whose public decoder unpickles on request. Neither NumPy's file reader nor a pickle is used
here: a header is matched against the one form that plain arrays have.
"""

from __future__ import annotations

import io
import re
from enum import Enum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from taktline_protocol.limits import Limits

from taktline_gateway.compat.wire_arrays import array_of, check_kind, decode, invalid_frame, keys_shown

_NPY = re.compile(
    rb"\{'descr': '([<>|=][biuf][1248])', 'fortran_order': (True|False), 'shape': \(([0-9, ]{0,80})\), \} *\n"
)
_MAX_HEADER = 512


class Generation(Enum):
    """Which layout a client speaks."""

    NPY = "npy"
    MSGPACK_NUMPY = "msgpack-numpy"


def decode_groot(frame: bytes, limits: Limits) -> tuple[Any, Generation | None]:
    """Decodes a request; also tells the generation of its last array, None where it holds none.

    Raises:
        TaktlineError: `body_too_large` or `invalid_body`, nothing else.
    """
    seen: list[Generation] = []

    def marked(entries: dict[str, Any]) -> Any:
        if "__ndarray_class__" in entries:
            seen.append(Generation.NPY)
            if entries.keys() != {"__ndarray_class__", "as_npy"}:
                raise invalid_frame(f"a .npy array has the keys {keys_shown(entries)}")
            return npy_array(entries["as_npy"])
        if "nd" in entries:
            seen.append(Generation.MSGPACK_NUMPY)
            return _msgpack_numpy(entries)
        return entries

    return decode(frame, limits, marked), seen[-1] if seen else None


def npy_array(data: Any) -> NDArray[Any]:
    """The array of a `.npy` file of version 1 or 2, read-only. Raises TaktlineError `invalid_body`."""
    if type(data) is not bytes or data[:6] != b"\x93NUMPY" or data[6:8] not in (b"\x01\x00", b"\x02\x00"):
        raise invalid_frame("the array is no .npy file of version 1 or 2")
    width = 2 if data[6] == 1 else 4
    length = int.from_bytes(data[8 : 8 + width], "little")
    start = 8 + width + length
    header = _NPY.fullmatch(data[8 + width : start]) if length <= _MAX_HEADER else None
    if header is None:
        raise invalid_frame("the .npy header is not that of a plain array of booleans, integers or floats")
    shape = [int(text) for text in header[3].split(b",") if text.strip().isdigit()]
    fortran = header[2] == b"True"
    array = array_of({"data": data[start:], "dtype": header[1].decode(), "shape": shape[::-1] if fortran else shape})
    return array.T if fortran else array


def encode_groot(value: Any, generation: Generation) -> bytes:
    """Encodes a reply in a client's generation. Raises TypeError for what has no place on the wire."""
    return _encoders[generation].encode(value)


def _msgpack_numpy(entries: dict[str, Any]) -> Any:
    is_array = entries.pop("nd")
    if entries.pop("kind", b"") not in (b"", ""):
        raise invalid_frame("arrays of objects or records are not read here")
    if is_array is True:
        if entries.keys() != {"type", "shape", "data"}:
            raise invalid_frame(f"an array has the keys {keys_shown(entries)}, not type, shape and data")
        return array_of({"data": entries["data"], "dtype": entries["type"], "shape": entries["shape"]})
    if is_array is False and entries.keys() == {"type", "data"}:
        return array_of({"data": entries["data"], "dtype": entries["type"], "shape": []}).item()
    raise invalid_frame("a map with `nd` is neither an array nor a scalar")


def _npy_hook(value: Any) -> Any:
    array = _checked(value)
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def _msgpack_numpy_hook(value: Any) -> Any:
    array = _checked(value)
    return {
        b"nd": True,
        b"type": array.dtype.str,
        b"kind": b"",
        b"shape": array.shape,
        b"data": array.tobytes(),
    }


def _checked(value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} has no place on the wire")
    check_kind(value.dtype)
    return value


_encoders = {
    Generation.NPY: msgspec.msgpack.Encoder(enc_hook=_npy_hook),
    Generation.MSGPACK_NUMPY: msgspec.msgpack.Encoder(enc_hook=_msgpack_numpy_hook),
}
