"""Kernels compiled side by side before they are launched: a launch waits for one compiler, a machine has many cores.

Threads do it: NVRTC, LLVM and ptxas work without the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

logger = logging.getLogger(__name__)

_MAX_THREADS = 16
_LINE_SECONDS = 2.0
_current: ContextVar[Batch | None] = ContextVar("kernels being compiled", default=None)


class Batch:
    """Kernels that are compiled side by side.

    Attributes:
        dry: whether launches only say which kernels they would run.
    """

    def __init__(self, *, dry: bool) -> None:
        self.dry = dry
        begin = partial(torch.cuda.set_device, torch.cuda.current_device()) if torch.cuda.is_available() else None
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)) + 1)  # who waits for ptxas needs no core
        self._pool = ThreadPoolExecutor(threads, "compile", begin)
        # Compilers take the interpreter's lock now and then; who still launches would wait for it at every operation.
        self._begun = threading.Event()
        self._futures: list[Future[Any]] = []
        self._then: list[tuple[Future[Any], Callable[[], None]]] = []
        self._asked: set[Hashable] = set()

    def add(self, compile_it: Callable[[], object], load: Callable[[], None]) -> None:
        """Compiles at the end; `load` is called after it, in the thread that waits."""
        self._then.append((self._submit(compile_it), load))

    def first(self, launch: Hashable) -> bool:
        """Whether such a launch comes for the first time: most are repeated by layers and steps."""
        new = launch not in self._asked
        self._asked.add(launch)
        return new

    def submit(self, compile_it: Callable[[], Any]) -> Future[Any]:
        """As Triton's compile mode asks an executor; its kernels are loaded where they are compiled."""

        def ready() -> Any:
            kernel = compile_it()
            kernel.run  # noqa: B018 - what it returns is built and loaded at the first look
            return kernel

        return self._submit(ready)

    def finish(self) -> None:
        """Waits for all, and says how far they are.

        Raises:
            RuntimeError: the first kernel that cannot be compiled or loaded; not of a dry batch, whose kernels say it
                again when they are launched.
        """
        self._begun.set()
        began = said = time.monotonic()
        total = len(self._futures)
        for done, _ in enumerate(as_completed(self._futures), 1):
            if done == total or time.monotonic() - said > _LINE_SECONDS:
                said = time.monotonic()
                seconds = round(said - began, 1)
                logger.info("%d of %d kernels compiled or found", done, total, extra={"seconds": seconds})
        for future, load in self._then:
            try:
                future.result()
                load()
            except RuntimeError:
                if not self.dry:
                    raise

    def close(self) -> None:
        """Gives up what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._begun.set()
        self._pool.shutdown()

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        future = self._pool.submit(lambda: self._begun.wait() and call())
        self._futures.append(future)
        return future


def current() -> Batch | None:
    """The batch that kernels are added to now."""
    return _current.get()


@contextmanager
def together(*, dry: bool = False) -> Iterator[None]:
    """Compiles the kernels that are made meanwhile side by side; they are loaded when this ends.

    Args:
        dry: launch none, but compile what the launches name, Triton's kernels among them. What they would have written
            holds whatever lay there: compute over it only what no value can break.

    Raises:
        RuntimeError: at the end, for a kernel that cannot be compiled or loaded; not where `dry`.
    """
    batch = Batch(dry=dry)
    with ExitStack() as stack:
        if dry:
            from triton import AsyncCompileMode  # a machine without it has no kernels to launch

            stack.enter_context(AsyncCompileMode(batch, ignore_errors=True))
        stack.callback(batch.close)  # before Triton's mode ends, which waits for all that it has asked for
        token = _current.set(batch)
        try:
            yield
        finally:
            _current.reset(token)
        batch.finish()
