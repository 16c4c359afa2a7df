"""Rows put to places of a matrix, or added there: the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from taktline_kernels.ops.dispatch import REGISTRY
from taktline_kernels.ops.placing import place_rows
from torch import Tensor

kernel = pytest.importorskip("taktline_kernels.triton_impl.placing")


@pytest.mark.parametrize("add", [False, True], ids=["put", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "width"), [(5, 48), (1, 130), (0, 16)])
def test_rows_come_to_their_places(count: int, width: int, dtype: torch.dtype, add: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(count + width)

    def values(*shape: int) -> Tensor:
        # In quarters, so that no sum is rounded.
        return torch.randint(-32, 33, shape, generator=generator).float() / 4

    before = values(3, 4, width).to(dtype)
    places = torch.randperm(12, generator=generator)[:count]
    rows = values(count, width)

    def placed(run: object) -> Tensor:
        target = before.clone().to(device)
        run(target, places.to(device), rows.to(device))  # type: ignore[operator]
        return target.cpu()

    found = [
        placed(lambda *given: REGISTRY["place_rows"].reference(*given, add)),
        placed(lambda *given: place_rows(*given, add=add)),
        placed(lambda *given: kernel.place_rows(*given, add, {"num_warps": 1})),
    ]
    expected = before.clone().view(-1, width)
    for place, row in zip(places.tolist(), rows.to(dtype), strict=True):
        expected[place] = expected[place] + row if add else row
    assert all(torch.equal(one.view(-1, width), expected) for one in found)
