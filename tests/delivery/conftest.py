"""A mirror and a cache for the tests of deliveries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from taktline_worker.delivery.cache import Cache
from taktline_worker.delivery.remote import Patience

from tests.delivery.mirror import Mirror, serving

HASTE = Patience(connect_s=5.0, stall_s=20.0, base_s=0.001, cap_s=0.01)


def content(size: int, seed: int = 0) -> bytes:
    """Reproducible bytes that do not compress."""
    return random.Random(seed).randbytes(size)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    """A mirror that serves nothing yet."""
    with serving(Mirror()) as started:
        yield started


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """An empty cache."""
    return Cache(tmp_path / "cache")
