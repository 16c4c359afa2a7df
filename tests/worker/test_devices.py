"""Small tensors that reach a device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from taktline_worker.devices import Staged

SHAPES = {
    "lengths": ((3,), torch.int32),
    "tokens": ((5,), torch.int64),
    "actions": ((2, 3, 4), torch.float32),
    "none": ((0, 4), torch.float32),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_letter_holds_arrives_where_graphs_read_it(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    staged = Staged(SHAPES, torch.device(device))
    assert {name: (tuple(one.shape), one.dtype) for name, one in staged.tensors.items()} == SHAPES
    assert all(one.data_ptr() % 16 == 0 and not one.any() for one in staged.tensors.values())
    addresses = {name: one.data_ptr() for name, one in staged.tensors.items()}
    first, second = staged.letter(), staged.letter()
    first.arrays["lengths"][:] = [1, 2, 3]
    first.arrays["tokens"][:] = 2**40 + np.arange(5)
    first.arrays["actions"][:] = [[[0.0]], [[0.5]]]
    first.send()
    assert staged.tensors["lengths"].tolist() == [1, 2, 3]
    assert staged.tensors["tokens"].tolist() == [2**40 + n for n in range(5)]
    assert staged.tensors["actions"][0].tolist() == [[0.0] * 4] * 3
    assert staged.tensors["actions"][1].tolist() == [[0.5] * 4] * 3
    second.arrays["tokens"][:] = [0, 0, 7, 0, 0]
    second.arrays["lengths"][:] = 0
    second.send()
    assert staged.tensors["tokens"].tolist() == [0, 0, 7, 0, 0]
    assert not staged.tensors["lengths"].any()
    assert {name: one.data_ptr() for name, one in staged.tensors.items()} == addresses
