"""Work beside the main stream: at once on a CPU; on a GPU in order, captured or not."""

from __future__ import annotations

import pytest
import torch
from taktline_worker.branches import Branch

CPU = torch.device("cpu")


def test_on_a_cpu_the_work_is_done_at_once_and_once() -> None:
    done: list[int] = []

    def work() -> int:
        done.append(1)
        return len(done)

    branch = Branch(CPU, work)
    assert done == [1]
    assert (branch.join(), branch.join(), done) == (1, 1, [1])


def test_an_error_is_the_callers() -> None:
    def work() -> None:
        raise ValueError("no such slot")

    with pytest.raises(ValueError, match="no such slot"):
        Branch(CPU, work)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("beside", [False, True])
def test_a_branch_reads_what_was_before_and_is_read_behind_its_join(beside: bool) -> None:
    device = torch.device("cuda")
    given = torch.zeros(1 << 22, device=device)

    def compute() -> torch.Tensor:
        x = given
        for _ in range(20):
            x = x + 1.0
        branch = Branch(device, lambda: x * 2.0, beside=beside)
        other = x
        for _ in range(20):
            other = other + 1.0
        return branch.join() + other

    for seed in range(3):
        given.fill_(float(seed))
        assert torch.equal(compute(), 2.0 * (given + 20.0) + given + 40.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    for seed in range(3):
        given.fill_(float(seed))
        graph.replay()
        assert torch.equal(found, 2.0 * (given + 20.0) + given + 40.0)
