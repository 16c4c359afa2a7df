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
