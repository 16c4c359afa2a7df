"""When the action head runs as a chain of kernels, as far as that is decided without a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from taktline_kernels.selector import KernelSelector
from taktline_worker.models.groot import runner
from taktline_worker.models.groot.synthetic import PUBLISHED
from taktline_worker.profiling.kernels import selecting_by

few_tokens = pytest.importorskip("taktline_kernels.cuda.few_tokens")


def refused(*_: Any) -> None:
    raise RuntimeError("no such driver")


def test_kernels_that_cannot_be_loaded_leave_the_head_to_its_blocks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=(few_tokens.HIDDEN, 1536))
    head: Any = SimpleNamespace(blocks=[SimpleNamespace(fc1=SimpleNamespace(weight=weight))])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(few_tokens, "_kernel", refused)
    assert runner._head_chain(head, PUBLISHED.head) is None
    assert "no such driver" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "keys", "taken"), [(48, 256, True), (49, 256, False), (48, 257, False), (48, 272, False)]
)
def test_a_row_that_the_chain_does_not_take_is_named_once(
    tokens: int, keys: int, taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chains = importlib.import_module("taktline_worker.models.groot.chain")
    monkeypatch.setattr(few_tokens, "load", lambda: None)
    chain = chains.HeadChain(SimpleNamespace(tail_norms=[], blocks=[], projectors={}))
    memory = torch.empty(1, keys, 1, 4)
    for _ in range(3):
        assert chain.takes(tokens, [None, (memory, memory, memory)]) is taken
    named = [one.getMessage() for one in caplog.records]
    assert len(named) == (not taken)
    assert all(f"{tokens} action tokens" in one and f"{keys} keys" in one for one in named)


def test_what_computes_the_head_is_explained(kit: Any) -> None:
    selector = KernelSelector()
    _, rows = kit.case("case_b1")
    with selecting_by(selector):
        kit.runner().run(rows)
    ((shape, choice),) = [(shape, choice) for op, shape, _, choice in selector.explain() if op == "head"]
    assert shape.startswith("batch=1 tokens=")
    assert (choice.kernel, choice.reason) == ("blocks", "the kernel chain is for one row, in bf16 on Hopper")
