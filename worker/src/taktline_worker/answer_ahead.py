"""A batch's response in protobuf's wire format, of which only what its end tells is put together at its end.

After twelve milliseconds of waiting for the GPU whatever runs is slow: making and serialising the message then takes a
tenth of a millisecond. The bytes are the same message (fields may come in any order), which a test holds against the
generated classes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from taktline_protocol import worker_pb2

from taktline_worker.engine import BatchResult

_FIELDS = worker_pb2.InferResponse.DESCRIPTOR.fields_by_name
_DOUBLES = ("preprocess_ms", "engine_ms", "postprocess_ms", "total_ms", "waited_ms")
_KEYS = tuple(_FIELDS[name].number << 3 | 1 for name in _DOUBLES)
_BUCKET = _FIELDS["bucket"].number << 3
_TIMES = struct.Struct("<" + "Bd" * len(_KEYS) + "BB")
_FLOAT32 = np.dtype("<f4")
_MOST_BUCKET = 0x7F
"""Which a byte holds."""


class AnswerAhead:
    """The response to items of which each gets float32 actions of one shape."""

    def __init__(self, request_ids: Sequence[str], shape: tuple[int, int], revision: str) -> None:
        """`shape` is (horizon, action_dim)."""
        self._shape = shape
        size = 4 * shape[0] * shape[1]
        tensor = worker_pb2.Tensor(dtype="float32", shape=shape, data=bytes(size))
        heads = []
        for request_id in request_ids:
            result = worker_pb2.InferResult(request_id=request_id, actions=tensor)
            # Written in the order of their numbers, the actions' bytes come last.
            heads.append(worker_pb2.InferResponse(results=[result]).SerializeToString()[:-size])
        self._heads = heads
        self._revision = worker_pb2.InferResponse(revision=revision).SerializeToString()

    def serialised(self, result: BatchResult, total_ms: float) -> bytes | None:
        """The message; None where an outcome is something else, or of another shape."""
        parts: list[bytes] = []
        for head, outcome in zip(self._heads, result.outcomes, strict=True):
            if not isinstance(outcome, np.ndarray) or outcome.shape != self._shape or outcome.dtype != _FLOAT32:
                return None
            parts += (head, outcome.tobytes())
        if result.bucket > _MOST_BUCKET:
            return None
        preprocess, engine, postprocess, total, waited = _KEYS
        times = _TIMES.pack(
            preprocess,
            result.preprocess_ms,
            engine,
            result.engine_ms,
            postprocess,
            result.postprocess_ms,
            total,
            total_ms,
            waited,
            result.waited_ms,
            _BUCKET,
            result.bucket,
        )
        return b"".join((*parts, times, self._revision))
