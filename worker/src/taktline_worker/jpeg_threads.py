"""A batch's JPEGs in native threads: decoded from the moment at which they come, without the interpreter's lock.

`jpeg/threads.c` is compiled once a process, by the compiler that Triton needs, too. It reads ordinary files and gives
the bits that libjpeg-turbo gives; of others it says no. That it does so here is tried before the first frame.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("jpeg") / "threads.c"
_COMPILE_LIMIT_S = 60.0
_FLAGS = ("-O3", "-std=gnu11", "-fwrapv", "-shared", "-fPIC", "-pthread", "-w")
_DECODED, _REFUSED = 1, 2
_AWAKE_US = 500
"""So long a thread that waits for a frame stays awake, where there are processors to spare."""
_SPARE_CORES = 4
_END_LIMIT_S = 5.0
_MOST_THREADS = 8


class _Job(ctypes.Structure):
    """`Job` of the C file."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("split", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("room", ctypes.c_void_p),
    )


class JpegBatch:
    """Files that may be decoded together.

    Attributes:
        shapes: (H, W, 3) of each; None for what is no ordinary JPEG.
    """

    def __init__(
        self, jobs: ctypes.Array[_Job], files: Sequence[bytes | memoryview], shapes: list[tuple[int, int, int] | None]
    ) -> None:
        self.jobs, self.files, self.shapes = jobs, files, shapes


_under_way: deque[tuple[JpegBatch, object]] = deque()
"""Batches and what they need, until all of their frames have ended, whoever has forgotten them."""
_lock = threading.Lock()
_process = os.getpid()


def _forked() -> None:
    """In a child, which has none of its parent's threads, and their locks in any state."""
    global _lock, _process
    _lock, _process = threading.Lock(), os.getpid()
    _under_way.clear()


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
    """A JPEG that is being decoded.

    Attributes:
        pixels: uint8 (H, W, 3), RGB, once `decoded` has said so.
    """

    __slots__ = ("_job", "_threads", "pixels")

    def __init__(self, threads: JpegThreads, job: _Job, pixels: Tensor) -> None:
        self._threads, self._job, self.pixels = threads, job, pixels

    def decoded(self) -> bool:
        """Waits; False where the file is damaged or out of the ordinary."""
        state = self._job.state or self._threads.wait(self._job)
        return bool(state == _DECODED)


class JpegThreads:
    """Native threads of this process; they decode for everybody, at least `threads` of them.

    In a child of the process they are not there: all files are refused.

    Raises:
        OSError: they cannot be had here, and why.
    """

    def __init__(self, threads: int) -> None:
        self._process = _process
        path = _compiled()
        try:
            # What is quickly done keeps the interpreter's lock: another thread would hold it for milliseconds.
            self._quick, self._waiting = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
            self._sizes, self._begin = self._quick.taktline_jpeg_sizes, self._quick.taktline_jpeg_begin
            self._wait, start = self._waiting.taktline_jpeg_wait, self._quick.taktline_jpeg_threads
        except AttributeError as error:
            raise OSError(f"the C compiler's library is another one: {error}") from error
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)
        self._sizes.argtypes = self._begin.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._awake_us = _AWAKE_US if _cores() >= _SPARE_CORES else 0
        if start(threads) < 1:
            raise OSError("no thread can be started")
        self._try_out()

    def batch(self, files: Sequence[bytes | memoryview]) -> JpegBatch:
        """Files that are not empty, and what their headers say."""
        jobs = (_Job * len(files))()
        for job, data in zip(jobs, files, strict=True):
            job.data, job.size = int(np.frombuffer(data, np.uint8).__array_interface__["data"][0]), len(data)
        if self._process == _process:
            self._sizes(ctypes.addressof(jobs), len(files))
        else:
            for job in jobs:
                job.state = _REFUSED
        return JpegBatch(jobs, files, [None if job.state else (job.height, job.width, 3) for job in jobs])

    def begin(self, batch: JpegBatch, memory: Sequence[Tensor | None]) -> list[BegunFrame | None]:
        """Begins to decode files, each into uint8 of its shape, contiguous on the CPU; those with None are left out."""
        begun: list[BegunFrame | None] = []
        if self._process != _process:
            return [None] * len(memory)
        for job, pixels in zip(batch.jobs, memory, strict=True):
            if pixels is None:
                job.state = _REFUSED
                begun.append(None)
            else:
                job.out = pixels.data_ptr()
                begun.append(BegunFrame(self, job, pixels))
        with _lock:
            while _under_way and _has_ended(_under_way[0][0]):
                _under_way.popleft()
            _under_way.append((batch, memory))
        self._begin(ctypes.addressof(batch.jobs), len(memory))
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
        files = [
            simplejpeg.encode_jpeg(picture, quality, "RGB", colours)
            for colours in ("444", "422", "420")
            for quality in (50, 95)
        ]
        batch = self.batch(files)
        memory = [None if shape is None else torch.empty(shape, dtype=torch.uint8) for shape in batch.shapes]
        for data, frame in zip(files, self.begin(batch, memory), strict=True):
            wanted = simplejpeg.decode_jpeg(data, "RGB")
            if frame is None or not frame.decoded() or not np.array_equal(frame.pixels.numpy(), wanted):
                raise OSError("they decode to other bits than libjpeg-turbo")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def jpeg_threads() -> JpegThreads | None:
    """One thread a core, at most 8; None where they cannot be had, which is logged: the interpreter's decode then."""
    try:
        return JpegThreads(min(_MOST_THREADS, _cores()))
    except OSError as error:
        logger.warning("JPEGs are decoded by the interpreter's threads, which is slower: %s", error)
        return None


def _compiled() -> Path:
    """The library, alone in a folder. Raises OSError where it cannot be made."""
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError(f"there is no C compiler{f' {named!r}' if named else ''}")
    folder = Path(tempfile.mkdtemp(prefix="taktline-jpeg-"))
    said = ""
    for tuned in (["-march=native"], []):  # not every compiler knows what it runs on
        command = [compiler, *_FLAGS, *tuned, "-o", str(folder / "jpeg.so"), str(_SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_COMPILE_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            said = "it does not end"
            break
        except OSError as error:
            said = str(error)
            break
        if done.returncode == 0:
            return folder / "jpeg.so"
        said = done.stderr.decode(errors="replace")[-300:]
    shutil.rmtree(folder, ignore_errors=True)
    raise OSError(f"{compiler} fails on {_SOURCE.name}: {said}")
