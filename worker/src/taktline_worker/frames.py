"""Camera frames seen before: what was made of a frame is kept under the digest of its bytes, in bounded memory."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from taktline_worker.observation import EncodedImage

T = TypeVar("T")

# A chance hit needs two frames that agree in 128 bits of BLAKE2.
_DIGEST_BYTES = 16

Key = bytes | int
"""Of a frame, or of frames that are told apart by their bytes."""


def frame_key(image: EncodedImage) -> bytes:
    """Digest of everything that decides a frame's pixels: encoding, shape and bytes."""
    digest = hashlib.blake2b(f"{image.encoding} {image.shape} ".encode(), digest_size=_DIGEST_BYTES)
    digest.update(image.data)
    return digest.digest()


class FrameCache(Generic[T]):
    """Values by frame key, the least recently used dropped first. Safe to share between threads.

    Args:
        limit_bytes: most memory of all values together; a value larger than that is not kept.

    Attributes:
        hits: look-ups that found a value.
        misses: look-ups that did not.
        bytes: memory of the values kept now.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.hits = 0
        self.misses = 0
        self.bytes = 0
        self._values: OrderedDict[Key, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> T | None:
        """The value of a frame; None where it is not kept (any more)."""
        with self._lock:
            found = self._values.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Key, value: T, size: int) -> None:
        """Keeps `value`, of `size` bytes; it must never be changed afterwards."""
        if size > self.limit_bytes:
            return
        with self._lock:
            replaced = self._values.pop(key, None)
            self.bytes += size - (0 if replaced is None else replaced[1])
            self._values[key] = (value, size)
            while self.bytes > self.limit_bytes:
                _, (_, dropped) = self._values.popitem(last=False)
                self.bytes -= dropped
