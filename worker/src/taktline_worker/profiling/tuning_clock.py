"""Times of kernels on a GPU: one operation out of the cache, and whole phases in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from taktline_worker.profiling.timing import capture, measure

Call = Callable[[], Any]

_CACHE_FLOATS = 24 << 20
"""That are read between two calls: more than the L2 of any GPU that is served on holds."""
_GRAPH_US = 400.0
_FIRST_CALLS, _MOST_CALLS = 4, 16
_HOPELESS = 1.3


class GpuClock:
    """CUDA events around replays of graphs, which leave out the host's part.

    Args:
        runs: replays of each candidate, and turns of each phase.
    """

    def __init__(self, device: torch.device, runs: int) -> None:
        self._device, self._runs = device, runs
        self._numbers = torch.zeros(_CACHE_FLOATS, device=device)
        self._sum = torch.zeros((), device=device)
        self._cold_us: dict[int, float] = {}

    def alone(self, call: Call, best_us: float | None) -> float:
        """Microseconds of a call whose operands lie in memory, not in the cache."""
        if best_us is None:
            # The first of its kind comes after compilers and other idle time: it also brings the clocks up again.
            estimate = capture(lambda: self._cold(call, _FIRST_CALLS), self._device, warm_up=1)
            best_us = self._us(estimate, _FIRST_CALLS, 8)
        calls = max(2, min(_MOST_CALLS, int(_GRAPH_US / (best_us + 30.0))))
        replay = capture(lambda: self._cold(call, calls), self._device, warm_up=1)
        first = self._us(replay, calls, 3)
        if first > _HOPELESS * best_us:
            return first
        return self._us(replay, calls, self._runs)

    def turns(self, calls: Sequence[Call]) -> list[list[float]]:
        """Milliseconds of every call as one graph, turn by turn; who begins a turn changes."""
        replays = [capture(call, self._device, warm_up=1) for call in calls]
        times: list[list[float]] = [[] for _ in calls]
        for replay in replays:
            replay()
        for turn in range(self._runs):
            for place in range(len(calls)):
                index = (turn + place) % len(calls)
                times[index].append(measure(replays[index], self._device, warm_up=0, runs=1).median_ms)
        return times

    def _cold(self, call: Call | None, calls: int) -> None:
        for _ in range(calls):
            torch.sum(self._numbers, dim=0, out=self._sum)
            if call is not None:
                call()

    def _us(self, replay: Call, calls: int, runs: int) -> float:
        if calls not in self._cold_us:
            nothing = capture(lambda: self._cold(None, calls), self._device)
            self._cold_us[calls] = 1e3 * measure(nothing, self._device, runs=15).median_ms
        times = measure(replay, self._device, warm_up=1, runs=runs).ms
        return max(0.01, (1e3 * statistics.median(times) - self._cold_us[calls]) / calls)
