"""Capturing work over static buffers as CUDA graphs that share one memory pool."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

WARM_UP_RUNS = 2


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured graph and what it took.

    Attributes:
        capture_s: warm-up and capture, seconds.
        pool_bytes: growth of the graphs' shared memory pool.
    """

    graph: torch.cuda.CUDAGraph
    capture_s: float
    pool_bytes: int


class GraphPool:
    """The graphs of one engine: only one of them runs at a time, so all keep their intermediates in one place."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def capture(self, compute: Callable[[], object], **shape: int) -> Captured:
        """Runs `compute` to warm it up, then captures it. Capture the largest first: the pool then grows once.

        Args:
            compute: reads and writes buffers that stay where they are; allocates as it likes.
            shape: what the log line says of it.
        """
        device = self._device
        # What nothing uses any more must not hide what this graph takes: capturing gives it back.
        gc.collect()
        torch.cuda.empty_cache()
        started, before = time.monotonic(), torch.cuda.memory_reserved(device)
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                compute()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        found = Captured(graph, time.monotonic() - started, torch.cuda.memory_reserved(device) - before)
        logger.info(
            "graph captured",
            extra={**shape, "capture_s": round(found.capture_s, 3), "pool_bytes": found.pool_bytes},
        )
        return found
