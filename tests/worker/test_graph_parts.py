"""A capture that is cut into graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from taktline_worker import graph_parts
from taktline_worker.graph_capture import GraphPool
from torch import Tensor


def test_outside_of_a_capture_a_cut_does_nothing() -> None:
    graph_parts.cut()


def test_graphs_begin_where_the_ones_before_end(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            self.number = len([one for one in happened if one == "made"])
            happened.append("made")

        def capture_begin(self, pool: Any = None) -> None:
            happened.append((self.number, "begins", pool))

        def capture_end(self) -> None:
            happened.append((self.number, "ends"))

        def replay(self) -> None:
            happened.append((self.number, "replayed"))

    class Context:
        def __init__(self, cuda_graph: Graph, pool: Any, stream: Any) -> None:
            self.cuda_graph, self.pool = cuda_graph, pool

        def __enter__(self) -> None:
            self.cuda_graph.capture_begin(self.pool)

        def __exit__(self, *_: object) -> None:
            self.cuda_graph.capture_end()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Context)

    def compute() -> None:
        happened.append("first")
        graph_parts.cut()
        happened.append("second")

    stream: Any = None
    graph_parts.captured(compute, "pool", stream).replay()
    one, two = (0, "begins", "pool"), (1, "begins", "pool")
    middle = ["first", (0, "ends"), "made", two, "second", (1, "ends")]
    assert happened == ["made", one, *middle, (0, "replayed"), (1, "replayed")]
    graph_parts.cut()  # behind the capture again nothing
    assert happened[-1] == (1, "replayed")


@pytest.mark.parametrize("fails", ["end", "begin", "compute"])
def test_the_first_error_is_told_and_no_stream_stays(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    streams = ["outside"]
    broken: list[Any] = []

    class Graph:
        def capture_begin(self, pool: Any = None) -> None:
            if pool and fails == "begin":  # at the cut: the context gives none here
                broken.append(self)
                raise RuntimeError("the first")

        def capture_end(self) -> None:
            if broken:
                raise RuntimeError("a broken capture cannot be ended")
            if fails == "end":
                broken.append(self)
                raise RuntimeError("the first")

    class Stream:
        def __init__(self, stream: str) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            self.before = streams[-1]
            streams.append(self.stream)

        def __exit__(self, *_: object) -> None:
            streams.append(self.before)

    class Context:  # as PyTorch's: nothing behind an end that fails
        def __init__(self, cuda_graph: Graph, pool: Any, stream: str) -> None:
            self.cuda_graph, self.stream = cuda_graph, Stream(stream)

        def __enter__(self) -> None:
            self.stream.__enter__()
            self.cuda_graph.capture_begin()

        def __exit__(self, *_: object) -> None:
            self.cuda_graph.capture_end()
            self.stream.__exit__()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Context)
    monkeypatch.setattr(torch.cuda, "stream", Stream)

    def compute() -> None:
        if fails == "compute":
            broken.append("by an operation that a capture refuses")
            raise RuntimeError("the first")
        graph_parts.cut()

    stream: Any = "captures"
    with pytest.raises(RuntimeError, match="the first"):
        graph_parts.captured(compute, "pool", stream)
    assert "captures" in streams
    assert streams[-1] == "outside"
    graph_parts.cut()  # nothing is being captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_what_one_graph_makes_the_next_one_reads() -> None:
    x, out = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")

    def compute() -> None:
        made: list[Tensor] = [x + 1.0, x * 3.0]
        graph_parts.cut()
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            more = made[0] * 2.0
        torch.cuda.current_stream().wait_stream(beside)
        graph_parts.cut()
        out.copy_(more + made[1])

    graph = GraphPool(torch.device("cuda")).capture(compute).graph
    assert len(graph.graphs) == 3  # type: ignore[attr-defined]
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 5.0 * value + 2.0))
