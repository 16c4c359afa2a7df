"""The action head as a chain of kernels: the published width and fewer layers, against the same blocks op by op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from taktline_worker.models.groot.batch import lay_out
from taktline_worker.models.groot.config import GrootArchitecture
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
