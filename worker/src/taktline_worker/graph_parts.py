"""A capture in several CUDA graphs, which are replayed one behind the other.

On some machines the launch of one graph of a thousand kernels takes more than half a millisecond, and until then the
GPU waits. It has something to do where a few kernels are a graph of their own before the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

_open: _Capture | None = None


class Replayed(Protocol):
    """What a capture gives."""

    def replay(self) -> None:
        """Launch it on the current stream."""


class Parts:
    """Graphs, in the order in which they are replayed."""

    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        self.graphs = tuple(graphs)

    def replay(self) -> None:
        """See `Replayed`."""
        for graph in self.graphs:
            graph.replay()


class _Capture:
    """A capture under way: the context ends whichever graph it holds last."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool = pool
        self.graphs = [torch.cuda.CUDAGraph()]
        self.context = torch.cuda.graph(self.graphs[0], pool=pool, stream=stream)

    def cut(self) -> None:
        self.graphs[-1].capture_end()
        self.graphs.append(torch.cuda.CUDAGraph())
        self.context.cuda_graph = self.graphs[-1]
        self.graphs[-1].capture_begin(pool=self._pool)


def captured(compute: Callable[[], object], pool: Any, stream: torch.cuda.Stream) -> Parts:
    """The graphs of `compute` on this stream, cut where it calls `cut`.

    Args:
        pool: of their intermediates, as `torch.cuda.graph` takes it.

    Raises:
        Exception: the first error; a capture that it broke cannot be ended, and says so less well.
    """
    global _open
    capture = _Capture(pool, stream)
    first: BaseException | None = None
    try:
        # A capture that cannot be ended leaves its stream the current one, unless who stands outside ends that.
        with torch.cuda.stream(stream), capture.context:
            _open = capture
            try:
                compute()
            except BaseException as error:
                first = error
                raise
            finally:
                _open = None
    except Exception as error:
        if first is None or error is first:
            raise
        raise first from first.__cause__
    return Parts(capture.graphs)


def cut() -> None:
    """Ends the graph that is being captured and begins the next; does nothing outside of a capture.

    What works beside the capture's stream must have been joined.
    """
    if _open is not None:
        _open.cut()
