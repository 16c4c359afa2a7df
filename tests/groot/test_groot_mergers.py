"""Where the norms of the vision tower's mergers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from taktline_worker.models.groot.weights import VisionWeights


@pytest.mark.parametrize(("last", "others"), [(False, False), (True, True)])
def test_mergers_that_would_be_given_the_wrong_stream_are_refused(last: bool, others: bool) -> None:
    def tower(last: bool, others: bool) -> VisionWeights:
        merger: Any = SimpleNamespace(norm_first=last)
        other: Any = SimpleNamespace(norm_first=others)
        nothing: Any = None
        return VisionWeights(nothing, nothing, (), merger, {0: other})

    tower(True, False)
    with pytest.raises(ValueError, match="the last merger alone"):
        tower(last, others)
