"""Memory for camera frames that a GPU copies from by itself, used again for the next ones."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque

import torch
from torch import Tensor

PINNED_FRAME_BYTES = 1920 * 1080 * 3
"""The largest frame that is decoded into pinned memory: larger ones shall not fill the host with locked pages."""
KEPT_BYTES = 256 << 20
"""Most memory that waits for frames of its shape."""
STOCK_BYTES, STOCK = 16 << 20, 24
"""Of a pinned shape a thread gets so many ahead, once there are less than half of them: nobody waits for it."""

Shape = tuple[int, int, int]


class FrameMemory:
    """Frames' memory, by shape. Safe to share between threads.

    PyTorch keeps pinned memory, too, but asking it for some takes a thread that has rested half as long as decoding a
    small frame, with the interpreter's lock held, so that no other frame of the row is begun meanwhile.

    A frame's memory comes back when nobody refers to the frame any more: no row that runs, and no cache. Whoever lets
    a device read it keeps it until that has ended.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._free: dict[Shape, list[Tensor]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        self._back: deque[Tensor] = deque()
        """Come back, and not counted yet: that happens wherever a frame is forgotten, with this lock held or not."""
        self._stocked: set[Shape] = set()
        """Shapes of which more is being got."""

    def take(self, shape: Shape) -> Tensor:
        """uint8 of `shape` (H, W, 3), contiguous, with any content; nobody else has it."""
        with self._lock:
            while self._back:
                self._keep(self._back.popleft())
            free = self._free.get(shape)
            memory = free.pop() if free else None
            self._bytes -= 0 if memory is None else memory.numel()
            short = shape not in self._stocked and len(free or ()) < _stock(shape) // 2 and is_pinned(shape)
            if short:
                self._stocked.add(shape)
        if short:
            threading.Thread(target=self._get_more, args=(shape,), name="frame memory", daemon=True).start()
        if memory is None:
            memory = new_frame(shape)
        frame = memory.view(shape)
        weakref.finalize(frame, self._back.append, memory).atexit = False
        return frame

    def _get_more(self, shape: Shape) -> None:
        try:
            self._back.extend(new_frame(shape) for _ in range(_stock(shape)))
        finally:
            self._stocked.discard(shape)

    def _keep(self, memory: Tensor) -> None:
        if self._bytes + memory.numel() > self._kept_bytes:  # sizes come and go: start over with those of now
            self._free, self._bytes = {}, 0
        self._free.setdefault((memory.shape[0], memory.shape[1], memory.shape[2]), []).append(memory)
        self._bytes += memory.numel()


def new_frame(shape: Shape) -> Tensor:
    """uint8 of `shape` that nobody else has, pinned where there is a GPU and it is no larger than most."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned(shape))


def _stock(shape: Shape) -> int:
    return min(STOCK, STOCK_BYTES // (shape[0] * shape[1] * shape[2] + 1))


def is_pinned(shape: Shape) -> bool:
    """Whether a GPU copies frames of this shape by itself."""
    return shape[0] * shape[1] * shape[2] <= PINNED_FRAME_BYTES and _has_gpu()


_has_gpu = functools.cache(torch.cuda.is_available)  # it asks the driver anew each time, for milliseconds
