"""Work on a stream of its own, beside what the main stream does, until its result is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_Result = TypeVar("_Result")


class Branch(Generic[_Result]):
    """Work that begins behind what the current stream has been given so far; on a CPU it is done at once.

    What the work reads lives until `join`, since the main stream could otherwise use its memory anew.

    Args:
        beside: False does the work in the current stream.
    """

    def __init__(self, device: torch.device, work: Callable[[], _Result], *, beside: bool = True) -> None:
        self._work: Callable[[], _Result] | None = work
        self._stream = _side(device) if beside and device.type == "cuda" else None
        if self._stream is None:
            self._result = work()
            return
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._result = work()

    def join(self) -> _Result:
        """The result; the current stream waits for it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._work = None
        return self._result


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream | None:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
