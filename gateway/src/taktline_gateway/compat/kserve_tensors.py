"""Tensors of the Open Inference Protocol v2, as JSON and in the binary extension: data only, bounded, both ways."""

from __future__ import annotations

import base64
import binascii
import math
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError
from taktline_protocol.images import sniff_encoding
from taktline_protocol.limits import Limits, check_structure_json

from taktline_gateway.compat.wire_arrays import MAX_RANK, EncodedFrame

JSON_ITEMS = 500_000
"""Three 224x224 images as lists of numbers; more, and faster, go through the binary extension."""
MAX_TENSORS = 64
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
Parameters = dict[str, Any]
Length = Annotated[int, Meta(ge=0, lt=2**31)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


class InputTensor(msgspec.Struct, kw_only=True):
    """One entry of `inputs`."""

    name: Name
    shape: Annotated[list[Length], Meta(max_length=MAX_RANK)]
    datatype: str
    parameters: Parameters = {}
    data: Any = None


class RequestedOutput(msgspec.Struct, kw_only=True):
    """One entry of `outputs` in a request."""

    name: Name
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, kw_only=True):
    """The JSON part of a request."""

    inputs: Annotated[list[InputTensor], Meta(max_length=MAX_TENSORS)]
    id: Annotated[str, Meta(max_length=256)] = ""
    parameters: Parameters = {}
    outputs: Annotated[list[RequestedOutput], Meta(max_length=MAX_TENSORS)] = []


_decoder = msgspec.json.Decoder(InferRequest)


def decode_request(body: bytes, header_length: int | None, limits: Limits) -> tuple[InferRequest, dict[str, Any]]:
    """Reads a request.

    Args:
        header_length: bytes of JSON before the binary data; None where the whole body is JSON.

    Returns:
        The JSON part, and by input name an ndarray, a str, or an EncodedFrame (BYTES that hold a JPEG or PNG).

    Raises:
        TaktlineError: `invalid_body`.
    """
    if header_length is not None and not 0 < header_length <= len(body):
        raise _invalid(f"Inference-Header-Content-Length is {header_length} in a body of {len(body)} bytes")
    head = body[:header_length]
    check_structure_json(head, msgspec.structs.replace(limits, items=JSON_ITEMS))
    try:
        request = _decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(f"the request is no inference request in JSON: {str(error)[:300]}") from error
    tensors: dict[str, Any] = {}
    position = len(head)
    for tensor in request.inputs:
        if tensor.name in tensors:
            raise _invalid(f"input {tensor.name!r} is there twice")
        size = tensor.parameters.get("binary_data_size")
        if size is None:
            tensors[tensor.name] = _from_json(tensor)
            continue
        if type(size) is not int or size < 0 or position + size > len(body):
            raise _invalid(f"input {tensor.name!r} declares binary data that is not there")
        tensors[tensor.name] = _from_binary(tensor, body[position : position + size])
        position += size
    if position != len(body):
        raise _invalid(f"{len(body) - position} bytes follow the last input")
    return request, tensors


def wants_binary(request: InferRequest, name: str) -> bool:
    """Whether output `name` is to be sent as binary data."""
    for output in request.outputs:
        if output.name == name:
            return output.parameters.get("binary_data") is True
    return request.parameters.get("binary_data_output") is True


def _from_json(tensor: InputTensor) -> Any:
    count = math.prod(tensor.shape)
    values = list(_flat(tensor.data))
    if len(values) != count:
        raise _mismatch(tensor, f"{len(values)} values")
    if tensor.datatype == "BYTES":
        return _one_text(tensor, values)
    dtype = _dtype(tensor)
    allowed: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    if any(type(value) not in allowed for value in values):
        raise _invalid(f"input {tensor.name!r} holds values that are not {tensor.datatype}")
    try:
        array = np.array(values, dtype=dtype)
    except (OverflowError, ValueError) as error:
        raise _invalid(f"input {tensor.name!r} holds values out of the range of {tensor.datatype}") from error
    return array.reshape(tensor.shape)


def _from_binary(tensor: InputTensor, data: bytes) -> Any:
    if tensor.datatype == "BYTES":
        return _one_text(tensor, _length_prefixed(tensor, data))
    dtype = _dtype(tensor)
    if math.prod(tensor.shape) * dtype.itemsize != len(data):
        raise _mismatch(tensor, f"{len(data)} bytes")
    if dtype.kind == "b":
        data = (np.frombuffer(data, np.uint8) != 0).tobytes()
    array: NDArray[Any] = np.ndarray(tuple(tensor.shape), dtype, buffer=data)
    return array


def _length_prefixed(tensor: InputTensor, data: bytes) -> list[bytes]:
    elements: list[bytes] = []
    position = 0
    count = math.prod(tensor.shape)
    while position < len(data) and len(elements) < count:
        length = int.from_bytes(data[position : position + 4], "little")
        position += 4
        elements.append(data[position : position + length])
        position += length
    if len(elements) != count or position != len(data):
        raise _mismatch(tensor, "another number of length-prefixed elements")
    return elements


def _one_text(tensor: InputTensor, values: list[Any]) -> Any:
    """The one element of a BYTES tensor: an image where it begins as one (base64 in JSON), else UTF-8 text."""
    if len(values) != 1 or type(values[0]) not in (str, bytes):
        raise _invalid(f"input {tensor.name!r} is BYTES of shape {tensor.shape}; one text or image is read")
    value = values[0]
    if isinstance(value, str):
        # The first bytes of a JPEG and of a PNG in base64; ordinary text does not begin so.
        if not value.startswith(("/9j/", "iVBORw0KGgo")):
            return value
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _invalid(f"input {tensor.name!r} begins as an image in base64 but is none") from error
    match sniff_encoding(value):
        case "jpeg":
            return EncodedFrame("jpeg", value)
        case "png":
            return EncodedFrame("png", value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise _invalid(f"input {tensor.name!r} is neither UTF-8 text nor a JPEG or PNG") from error


def _flat(data: Any) -> Any:
    if not isinstance(data, list):
        raise _invalid("the data of an input is a list, flat or nested by shape")
    stack = [iter(data)]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                if len(stack) >= MAX_RANK:
                    raise _invalid(f"the data of an input nests deeper than {MAX_RANK} levels")
                stack.append(iter(value))
                break
            yield value
        else:
            stack.pop()


def _dtype(tensor: InputTensor) -> np.dtype[Any]:
    dtype = _DTYPES.get(tensor.datatype)
    if dtype is None:
        raise _invalid(f"input {tensor.name!r} has datatype {tensor.datatype[:32]!r}; read are {', '.join(_DTYPES)}")
    return dtype


def _mismatch(tensor: InputTensor, found: str) -> TaktlineError:
    return _invalid(f"input {tensor.name!r} is {tensor.datatype[:32]} of shape {tensor.shape} but holds {found}")


def _invalid(message: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.INVALID_BODY, message, "compare it with the model's metadata, GET /v2/models/{model}"
    )
