"""A batch's JPEGs in native threads: decoded from the moment at which they come, without the interpreter's lock.

`jpeg/threads.c` is compiled once a process. It reads ordinary files and gives the bits that libjpeg-turbo gives; of
others it says no. That it does so here is tried before the first frame.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from taktline_worker.compiled import library_of
from taktline_worker.cores import usable_cores

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("jpeg") / "threads.c"
_DECODED, _REFUSED = 1, 2
_AWAKE_US = 500
"""So long a thread that waits for a frame stays awake, where there are processors to spare."""
_SPARE_CORES = 4
_END_LIMIT_S = 5.0
_MOST_THREADS = 9
"""For three cameras' frames, each with one that reads and two that paint."""


class _Job(ctypes.Structure):
    """`Job` of the C file."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("painters", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("room", ctypes.c_void_p),
        ("key", ctypes.c_int64),
        ("left", ctypes.c_int32),
        ("bad", ctypes.c_int32),
    )


class JpegBatch:
    """Files that may be decoded together.

    Attributes:
        shapes: (H, W, 3) of each; None for what is no ordinary JPEG.
        keys: of each, the same for the same bytes and mostly another for others.
    """

    __slots__ = ("files", "jobs", "keys", "shapes")

    def __init__(self, jobs: ctypes.Array[_Job], files: tuple[bytes | memoryview, ...]) -> None:
        self.jobs, self.files = jobs, files
        self.shapes = [None if job.state else (job.height, job.width, 3) for job in jobs]
        self.keys = [job.key for job in jobs]


class Memory(NamedTuple):
    """Where a frame goes: uint8 of its shape, contiguous on the CPU, and its address."""

    pixels: Tensor
    address: int


_under_way: deque[tuple[JpegBatch, object]] = deque()
"""Batches and what they need, until all of their frames have ended, whoever has forgotten them."""
_lock = threading.Lock()
_process = os.getpid()


def _forked() -> None:
    """In a child, which has none of its parent's threads, and their locks in any state."""
    global _lock, _process
    _lock, _process = threading.Lock(), os.getpid()
    _under_way.clear()
    jpeg_threads.cache_clear()


os.register_at_fork(after_in_child=_forked)


def _has_ended(batch: JpegBatch) -> bool:
    return all(job.state for job in batch.jobs)


@atexit.register
def _end() -> None:
    """Memory is not to be given back under threads that write to it."""
    until = time.monotonic() + _END_LIMIT_S
    while not all(_has_ended(batch) for batch, _ in list(_under_way)) and time.monotonic() < until:
        time.sleep(0.001)


class BegunFrame:
    """A JPEG that is being decoded, or that has been before.

    Attributes:
        pixels: uint8 (H, W, 3), RGB, once `decoded` has said so.
        key: `JpegBatch.keys` of its file.
    """

    __slots__ = ("_job", "_threads", "key", "pixels")

    def __init__(self, pixels: Tensor, key: int, threads: JpegThreads | None = None, job: _Job | None = None) -> None:
        self.pixels, self.key, self._threads, self._job = pixels, key, threads, job

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, 3)."""
        height, width, channels = self.pixels.shape
        return height, width, channels

    @property
    def was_known(self) -> bool:
        """Whether there is nothing to be decoded."""
        return self._job is None

    def decoded(self) -> bool:
        """Waits; False where the file is damaged or out of the ordinary."""
        if self._job is None or self._threads is None:
            return True
        return bool((self._job.state or self._threads.wait(self._job)) == _DECODED)


class JpegThreads:
    """Native threads, which stay until the process ends: `jpeg_threads` gives the ones that decode for everybody.

    In a child of the process they are not there: all files are refused.

    Raises:
        OSError: they cannot be had here, and why.
    """

    def __init__(self, threads: int) -> None:
        self._process = _process
        with library_of(_SOURCE) as path:
            # What is quickly done keeps the interpreter's lock: another thread would hold it for milliseconds.
            self._quick, self._waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
            self._sizes, self._begin = self._quick.taktline_jpeg_sizes, self._quick.taktline_jpeg_begin
            self._wait, start = self._waiting.taktline_jpeg_wait, self._quick.taktline_jpeg_threads
        self._sizes.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
        self._begin.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._awake_us = _AWAKE_US if usable_cores() >= _SPARE_CORES else 0
        if start(threads) < 1:
            raise OSError("no thread can be started")
        self._try_out()

    def batch(self, files: tuple[bytes | memoryview, ...]) -> JpegBatch:
        """Files that are not empty, and what their headers say."""
        jobs = (_Job * len(files))()
        if self._process == _process:
            self._sizes(files, jobs, len(files))
        else:
            for job in jobs:
                job.state = _REFUSED
        return JpegBatch(jobs, files)

    def begin(self, batch: JpegBatch, memory: Sequence[Memory | None]) -> list[BegunFrame | None]:
        """Begins to decode files, each into memory of its shape; those with None are left out."""
        begun: list[BegunFrame | None] = []
        if self._process != _process:
            return [None] * len(memory)
        for job, key, taken in zip(batch.jobs, batch.keys, memory, strict=True):
            if taken is None:
                job.state = _REFUSED
                begun.append(None)
            else:
                job.out = taken.address
                begun.append(BegunFrame(taken.pixels, key, self, job))
        with _lock:
            while _under_way and _has_ended(_under_way[0][0]):
                _under_way.popleft()
            _under_way.append((batch, memory))
        self._begin(batch.jobs, len(memory))
        return begun

    def wait(self, job: _Job) -> int:
        """The state of a job that has ended, or never will in this process."""
        if self._process != _process:
            return _REFUSED
        return int(self._wait(ctypes.byref(job), self._awake_us))

    def _try_out(self) -> None:
        """Raises OSError where a frame's bits are not libjpeg-turbo's."""
        picture = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
        picture[:24] = np.arange(56)[:, None]  # smooth, too
        files = tuple(
            simplejpeg.encode_jpeg(picture, quality, "RGB", colours)
            for colours in ("444", "422", "420")
            for quality in (50, 95)
        )
        batch = self.batch(files)
        memory = [None if shape is None else new_memory(shape) for shape in batch.shapes]
        for data, frame in zip(files, self.begin(batch, memory), strict=True):
            wanted = simplejpeg.decode_jpeg(data, "RGB")
            if frame is None or not frame.decoded() or not np.array_equal(frame.pixels.numpy(), wanted):
                raise OSError("they decode to other bits than libjpeg-turbo")


def new_memory(shape: tuple[int, int, int]) -> Memory:
    """Of a frame of (H, W, 3), on the heap."""
    pixels = torch.empty(shape, dtype=torch.uint8)
    return Memory(pixels, pixels.data_ptr())


@functools.cache
def jpeg_threads() -> JpegThreads | None:
    """Those of this process, one a core, at most 9.

    None where they cannot be had, which is logged: the interpreter's decode then.
    """
    try:
        return JpegThreads(min(_MOST_THREADS, usable_cores()))
    except OSError as error:
        logger.warning("JPEGs are decoded by the interpreter's threads, which is slower: %s", error)
        return None
