"""A batch's request in protobuf's wire format, put together so that a camera frame is copied once.

Through the generated classes a frame is copied when it is set, when its item joins the request and when the request is
serialised; with two 224x224 frames a request that was a third of a gateway's time. The bytes are the same message
(fields may come in any order), which a test holds against the generated classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from taktline_protocol import worker_pb2
from taktline_protocol.messages import Image

_FIELDS = worker_pb2.DESCRIPTOR.message_types_by_name
Chunks = tuple[bytes, ...]
"""Pieces of a message, in order; frames are among them as they came."""


def _tag(message: str, field: str) -> bytes:
    """The key of a length-delimited field."""
    number: int = _FIELDS[message].fields_by_name[field].number
    return _varint(number << 3 | 2)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_ITEMS = _tag("InferRequest", "items")
_IMAGES = _tag("InferItem", "images")
_ENCODING, _DATA, _SHAPE = (_tag("Image", field) for field in ("encoding", "data", "shape"))
_KEY, _VALUE = b"\x0a", b"\x12"  # of every map entry


def image_chunks(images: Mapping[str, Image]) -> Chunks:
    """The `images` of an InferItem."""
    chunks: list[bytes] = []
    for camera, image in images.items():
        name, encoding, data = camera.encode(), image.encoding.encode(), image.data
        before = _ENCODING + _varint(len(encoding)) + encoding + _DATA + _varint(len(data))
        after = b""
        if image.shape is not None:
            shape = b"".join(map(_varint, image.shape))
            after = _SHAPE + _varint(len(shape)) + shape
        key = _KEY + _varint(len(name)) + name + _VALUE + _varint(len(before) + len(data) + len(after))
        entry = len(key) + len(before) + len(data) + len(after)
        chunks += (_IMAGES + _varint(entry) + key + before, data, after)
    return tuple(chunks)


def encode_request(request: worker_pb2.InferRequest, items: Iterable[tuple[worker_pb2.InferItem, Chunks]]) -> bytes:
    """The whole request: `request` without its items, then each item, its images apart from it."""
    parts = [request.SerializeToString()]
    for item, images in items:
        small = item.SerializeToString()
        parts += (_ITEMS, _varint(len(small) + sum(map(len, images))), small, *images)
    return b"".join(parts)
