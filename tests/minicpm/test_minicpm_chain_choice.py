"""When the action head runs as a chain of kernels, as far as that is decided without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taktline_kernels.selector import KernelSelector
from taktline_worker.models.minicpm_robot.synthetic import PUBLISHED
from taktline_worker.profiling.kernels import selecting_by

kernels = pytest.importorskip("taktline_kernels.cuda.action_block")
chains = pytest.importorskip("taktline_worker.models.minicpm_robot.head_chain")


@pytest.mark.parametrize("refused", ["product", "attend", "ask"])
def test_kernels_that_cannot_be_loaded_leave_the_head_to_its_layers(
    refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def kernel(entry: str, defines: tuple[tuple[str, int], ...], *_: Any) -> None:
        if entry == refused and (entry != "ask" or dict(defines)["KEYS"] == kernels.MAX_KEYS):
            raise RuntimeError("no such driver")

    monkeypatch.setattr(kernels, "_kernel", kernel)
    head: Any = SimpleNamespace(blocks=[SimpleNamespace(fc1=SimpleNamespace(weight=torch.empty(3072, 1)))])
    assert chains.make_chain(head, PUBLISHED.head) is None
    assert "no such driver" in caplog.text


@pytest.mark.parametrize(
    ("rows", "slots", "covered"), [(1, 512, True), (1, 513, False), (2, 512, False), (2, 600, False)]
)
def test_a_row_that_the_chain_does_not_hold_is_named_once(
    rows: int, slots: int, covered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chains.HeadChain.__new__(chains.HeadChain)
    chain._named = False
    for _ in range(3):
        assert chain.covers(torch.ones(rows, 1, 1, slots, dtype=torch.bool)) is covered
    named = [one.getMessage() for one in caplog.records]
    assert len(named) == (rows == 1 and not covered)
    assert all(f"{slots} slots" in one for one in named)


def test_what_computes_the_head_is_explained(kit: Any, folder: Path) -> None:
    selector = KernelSelector()
    with selecting_by(selector):
        kit.runner(folder).run([kit.row(1, 5, 1, seed=6)])
    ((shape, choice),) = [(shape, choice) for op, shape, _, choice in selector.explain() if op == "head"]
    assert shape.startswith("batch=1 tokens=")
    assert (choice.kernel, choice.reason) == ("blocks", "the kernel chain is for one row, in bf16 on Hopper")
