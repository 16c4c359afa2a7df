"""Capturing work over static buffers as CUDA graphs that share one memory pool."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from taktline_kernels import compiling

from taktline_worker.graph_parts import Parts, captured

logger = logging.getLogger(__name__)

Stage = Callable[[int], None]
"""Something to call with the number of a stage."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured computation, in one graph or a few, and what it took.

    Attributes:
        capture_s: warm-up and capture, seconds.
        pool_bytes: growth of the graphs' shared memory pool.
    """

    graph: Parts
    capture_s: float
    pool_bytes: int


class GraphPool:
    """The graphs of one engine: only one of them runs at a time, so all keep their intermediates in one place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def compile(self, computes: Iterable[Callable[[], object]]) -> None:
        """Compiles the kernels that these launch, side by side; the first run of each would else wait for one by one.

        Args:
            computes: what will be captured. Kernels of ours launch nothing here, so that what PyTorch computes between
                them reads whatever lies there.
        """
        stream = self._begun()
        with torch.cuda.stream(stream), compiling.together(dry=True):
            for compute in computes:
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)

    @torch.inference_mode()
    def capture(self, compute: Callable[[], object], **shape: int) -> Captured:
        """Runs `compute` once to warm it up, then captures it. Capture the largest first: the pool then grows once.

        Args:
            compute: reads and writes buffers that stay where they are; allocates as it likes.
            shape: what the log line says of it.
        """
        device = self._device
        stream = self._begun()
        # What nothing uses any more must not hide what this graph takes: capturing gives it back.
        torch.cuda.empty_cache()
        started, before = time.monotonic(), torch.cuda.memory_reserved(device)
        with torch.cuda.stream(stream):
            compute()
            stream.synchronize()
            graph = captured(compute, self._pool, stream)
        torch.cuda.current_stream(device).wait_stream(stream)
        found = Captured(graph, time.monotonic() - started, torch.cuda.memory_reserved(device) - before)
        logger.info(
            "graph captured",
            extra={**shape, "capture_s": round(found.capture_s, 3), "pool_bytes": found.pool_bytes},
        )
        return found

    def _begun(self) -> torch.cuda.Stream:
        """The pool's stream, behind what the current one holds.

        One for all: the matrix libraries keep a workspace for every stream that they have seen.
        """
        if self._stream is None:
            gc.collect()  # a quarter of a second with a policy loaded; between two graphs nothing is left that needs it
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream


class Beside:
    """Two pieces of work on two streams, of which the second follows the first stage by stage; captured or not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None

    def run(self, leading: Callable[[Stage], None], following: Callable[[Stage], None]) -> None:
        """Issues both; what comes after on the current stream waits for both.

        Args:
            leading: runs on the current stream; it is handed a function that says that a stage is issued.
            following: runs beside it; it is handed a function that makes it wait for a stage.
        """
        main = torch.cuda.current_stream(self._device)
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side, stages = self._side, dict[int, torch.cuda.Event]()
        side.wait_stream(main)

        def issued(stage: int) -> None:
            stages[stage] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            stages[stage].record(main)

        leading(issued)
        with torch.cuda.stream(side):
            following(lambda stage: side.wait_event(stages[stage]))
        main.wait_stream(side)
