"""How many observations a serialised batch holds, without unfolding its images."""

from __future__ import annotations

from taktline_protocol import worker_pb2

_ITEMS = worker_pb2.InferRequest.DESCRIPTOR.fields_by_name["items"].number
_VARINT_BYTES = 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def count_items(request: bytes) -> int:
    """Number of `items` of a serialised InferRequest.

    It steps from field to field of the outer message only: microseconds, whatever the images weigh. Bytes that are no
    message count as one item, so that they reach a replica and get its answer.
    """
    position, count, size = 0, 0, len(request)
    try:
        while position < size:
            key, position = _varint(request, position)
            number, kind = key >> 3, key & 7
            count += number == _ITEMS and kind == _BYTES
            if kind == _VARINT:
                _, position = _varint(request, position)
            elif kind == _BYTES:
                length, position = _varint(request, position)
                position += length
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            else:
                return 1
    except IndexError:
        return 1
    return count if position == size else 1


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(position, position + _VARINT_BYTES):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
    raise IndexError("a number is longer than any of a message")
