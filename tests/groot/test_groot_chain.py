"""The action head as a chain of kernels: the published width and fewer layers, against the same blocks op by op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from taktline_worker.models.groot.batch import lay_out
from taktline_worker.models.groot.config import GrootArchitecture
from taktline_worker.models.groot.graphs import GrootGraphs
from taktline_worker.models.groot.runner import GrootRunner
from taktline_worker.models.groot.synthetic import PUBLISHED, random_row, random_tensors
from taktline_worker.models.groot.weights import pack_weights
from torch import Tensor

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
SMALL = replace(
    PUBLISHED,
    vision=replace(PUBLISHED.vision, depth=3, deepstack=(0, 1, 2)),
    text=replace(PUBLISHED.text, layers=4),
    head=replace(PUBLISHED.head, layers=8, vl_layers=1),
)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def runner(tensors: dict[str, Tensor], dtype: torch.dtype, a: GrootArchitecture = SMALL) -> Any:
    return GrootRunner(pack_weights(tensors, a, [0], dtype, torch.device("cuda")), a)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("images", "tokens", "slots"), [(2, 156, 160), (4, 277, 288), (2, 180, 192)])
def test_actions_are_as_near_to_fp32_as_those_of_the_blocks_op_by_op(images: int, tokens: int, slots: int) -> None:
    tensors = random_tensors(SMALL, torch.device("cuda"))
    chained, exact = (runner(tensors, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert chained._chain is not None
    assert exact._chain is None
    plain = runner(tensors, torch.bfloat16)
    plain._chain = None
    found = {"chain": 0.0, "plain": 0.0}
    for seed in range(3):
        batch = lay_out([random_row(SMALL, images, tokens, seed)], SMALL, slots).to(chained.device)
        expected = exact.compute(batch)
        first = chained.compute(batch)
        assert all(torch.equal(first, chained.compute(batch)) for _ in range(3))
        found["chain"] += distance(first, expected)
        found["plain"] += distance(plain.compute(batch), expected)
    assert found["chain"] <= 1.1 * found["plain"], found


@pytest.mark.gpu
@needs_hopper
def test_it_runs_for_one_robot_whose_keys_come_by_sixteen() -> None:
    tensors = random_tensors(SMALL, torch.device("cuda"))
    own = runner(tensors, torch.bfloat16)
    called = []
    chain = own._chain

    class Counted:
        takes, rows = staticmethod(chain.takes), staticmethod(chain.rows)

        def __call__(self, *args: Any) -> Tensor:
            called.append(1)
            answer: Tensor = chain(*args)
            return answer

    own._chain = Counted()
    row = random_row(SMALL, 2, 156)
    for rows, slots, times in (([row], 160, 4), ([row, row], 160, 0), ([row], 0, 0)):
        called.clear()
        own.compute(lay_out(rows, SMALL, slots).to(own.device))
        assert len(called) == times


@pytest.mark.gpu
@needs_hopper
def test_replays_in_several_graphs_are_the_eager_answer_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain across the graphs of a request; batches of one and of four in turn, which share their memory."""
    own = runner(random_tensors(SMALL, torch.device("cuda")), torch.bfloat16)
    stepped: list[int] = []
    step = type(own._chain).__call__

    def counted(chain: Any, *given: Any) -> Tensor:
        stepped.append(1)
        answer: Tensor = step(chain, *given)
        return answer

    monkeypatch.setattr(type(own._chain), "__call__", counted)
    graphs = GrootGraphs(own, random_row(SMALL, 2, 156), (1, 4))
    graphs.capture()
    assert all(len(one.graph.graphs) == 3 for one in graphs.captured.values())  # type: ignore[attr-defined]
    for turn, count in enumerate((1, 4, 1, 3, 1)):
        rows = [random_row(SMALL, 2, 150 + 2 * turn + index, 10 * turn + index) for index in range(count)]
        bucket = graphs.bucket_for(rows)
        assert bucket is not None
        stepped.clear()
        replayed = [graphs.run(rows) for _ in range(2)]
        assert not stepped  # what ran was captured
        padded = rows + rows[:1] * (bucket.rows - count)
        expected = own.compute(lay_out(padded, SMALL, bucket.slots).to(own.device, own.weights.dtype))
        assert len(stepped) == (SMALL.head.solver_steps if count == 1 else 0)
        assert all(torch.equal(one, expected[:count].float().cpu()) for one in replayed)
