"""Counters and histograms that only one event loop changes: a request touches a score of them, so they take no lock."""

from __future__ import annotations

from bisect import bisect_left

from prometheus_client import Counter, Histogram

Exemplar = dict[str, str]
"""What leads from a sample to one request: its trace id, or its request id where nothing is traced."""


class _Number:
    """A value of a series that only the loop changes: prometheus_client's own takes a lock each time."""

    __slots__ = ("_exemplar", "amount")

    def __init__(self) -> None:
        self.amount = 0.0
        self._exemplar: object = None

    def inc(self, amount: float) -> None:
        """Adds."""
        self.amount += amount

    def get(self) -> float:
        """The value of now."""
        return self.amount

    def set_exemplar(self, exemplar: object) -> None:
        """Keeps the last one."""
        self._exemplar = exemplar

    def get_exemplar(self) -> object:
        """The last one."""
        return self._exemplar


class LoopCounter(Counter):
    """prometheus_client's without a lock."""

    def _metric_init(self) -> None:
        super()._metric_init()
        self._value = _Number()

    def inc(self, amount: float = 1, exemplar: Exemplar | None = None) -> None:
        """Adds."""
        if exemplar or amount < 0:  # rare: leave both to the library
            super().inc(amount, exemplar)
            return
        self._value.amount += amount


class LoopHistogram(Histogram):
    """prometheus_client's without a lock, and without looking for the bucket from the first one on.

    A request has ten values to place.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._sum = _Number()
        self._buckets = [_Number() for _ in self._upper_bounds]

    def observe(self, amount: float, exemplar: Exemplar | None = None) -> None:
        """Counts one value."""
        if exemplar or amount != amount:  # rare: leave both to the library
            super().observe(amount, exemplar)
            return
        self._sum.amount += amount
        self._buckets[bisect_left(self._upper_bounds, amount)].amount += 1
