"""What the tests of every engine share: one thread for its arithmetic, one pool for its frames, one distance."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Arithmetic on one thread: tests that run side by side would only wait for each other's."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[ThreadPoolExecutor]:
    """What decodes and fits frames."""
    with ThreadPoolExecutor(2) as executor:
        yield executor


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """Distance of two tensors over the length of the second, in float64."""
    return float((value.double() - reference.double()).norm() / reference.double().norm())
