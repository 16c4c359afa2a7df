"""Memory for camera frames that a GPU copies from by itself, used again for the next ones."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from taktline_worker.jpeg_threads import Memory

logger = logging.getLogger(__name__)

PINNED_FRAME_BYTES = 1920 * 1080 * 3
"""The largest frame that is decoded into pinned memory: larger ones shall not fill the host with locked pages."""
KEPT_BYTES = 256 << 20
"""Most memory that waits for frames of its shape; of the shape that has not been taken for longest goes first."""
STOCK_BYTES, STOCK = 16 << 20, 24
"""Of a pinned shape that is taken again a thread gets so many ahead, once there are less than half of them: nobody
waits for it. It gets one shape at a time."""
_REMEMBERED = 64
"""Shapes taken last, which are taken again."""

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
        """Those taken or come back last are the last ones; none is empty."""
        self._bytes = 0
        self._lock = threading.Lock()
        self._back: deque[Tensor] = deque()
        """Come back, and not counted yet: that happens wherever a frame is forgotten, with this lock held or not."""
        self._taken: dict[Shape, None] = {}
        """Shapes, the one taken last at the end."""
        self._stocked: set[Shape] = set()
        """The shape of which more is being got, if any."""
        self._said = False

    def take(self, shape: Shape) -> Tensor:
        """uint8 of `shape` (H, W, 3), contiguous, with any content; nobody else has it."""
        with self._lock:
            self._count_back()
            free = self._free.pop(shape, [])
            memory = free.pop() if free else None
            if free:
                self._free[shape] = free
            self._bytes -= 0 if memory is None else memory.numel()
            again = self._taken.pop(shape, self) is None
            self._taken[shape] = None
            if len(self._taken) > _REMEMBERED:
                del self._taken[next(iter(self._taken))]
            short = again and not self._stocked and len(free) < _stock(shape) // 2 and is_pinned(shape)
            if short:
                self._stocked.add(shape)
        if short:
            try:
                threading.Thread(target=self._get_more, args=(shape,), name="frame memory", daemon=True).start()
            except RuntimeError as error:
                self._got_none(shape, error)
        if memory is None:
            memory = new_frame(shape)
        frame = memory.view(shape)
        weakref.finalize(frame, self._come_back, memory).atexit = False
        return frame

    def _come_back(self, memory: Tensor) -> None:
        self._back.append(memory)
        if self._lock.acquire(blocking=False):  # else whoever has it, or takes it next, counts it
            try:
                self._count_back()
            finally:
                self._lock.release()

    def _get_more(self, shape: Shape) -> None:
        try:
            for _ in range(_stock(shape)):
                memory = new_frame(shape)
                with self._lock:
                    self._keep(memory)
        except Exception as error:  # whoever needs a frame asks for it, and is told
            self._got_none(shape, error)
        finally:
            self._stocked.discard(shape)

    def _got_none(self, shape: Shape, error: Exception) -> None:
        self._stocked.discard(shape)
        if not self._said:
            self._said = True
            logger.warning("no memory of %s is got ahead for frames, which then wait for it: %s", shape, error)

    def _count_back(self) -> None:
        while self._back:
            self._keep(self._back.popleft())

    def _keep(self, memory: Tensor) -> None:
        if memory.numel() > self._kept_bytes:
            return
        while self._bytes + memory.numel() > self._kept_bytes:
            oldest = next(iter(self._free))
            self._bytes -= self._free[oldest].pop().numel()
            if not self._free[oldest]:
                del self._free[oldest]
        self._free.setdefault((memory.shape[0], memory.shape[1], memory.shape[2]), []).append(memory)
        self._bytes += memory.numel()


class FramesAhead:
    """Memory of the next frames, got while nobody waits for it. Safe to share between threads."""

    def __init__(self, memory: FrameMemory) -> None:
        self._memory = memory
        self._ahead: dict[Shape, list[Memory]] = {}

    def __contains__(self, shape: Shape) -> bool:
        """Whether frames of this shape came last."""
        return shape in self._ahead

    def take(self, shape: Shape) -> Memory:
        """As `FrameMemory.take`."""
        try:
            return self._ahead[shape].pop()
        except LookupError:
            return self._one(shape)

    def look_ahead(self, shapes: Sequence[Shape]) -> None:
        """Gets memory for frames of these shapes, and forgets what it has for others; for none it changes nothing."""
        if not shapes:
            return
        wanted, there = Counter(shapes), self._ahead
        self._ahead = {shape: there.get(shape, []) for shape in wanted}  # the very lists: others take from them
        for shape, count in wanted.items():
            ahead = self._ahead[shape]
            while len(ahead) < count:
                ahead.append(self._one(shape))

    def _one(self, shape: Shape) -> Memory:
        pixels = self._memory.take(shape)
        return Memory(pixels, pixels.data_ptr())


def new_frame(shape: Shape) -> Tensor:
    """uint8 of `shape` that nobody else has, pinned where there is a GPU and it is no larger than most."""
    return torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned(shape))


def _stock(shape: Shape) -> int:
    return min(STOCK, STOCK_BYTES // (shape[0] * shape[1] * shape[2] + 1))


def is_pinned(shape: Shape) -> bool:
    """Whether a GPU copies frames of this shape by itself."""
    return shape[0] * shape[1] * shape[2] <= PINNED_FRAME_BYTES and _has_gpu()


_has_gpu = functools.cache(torch.cuda.is_available)  # it asks the driver anew each time, for milliseconds
