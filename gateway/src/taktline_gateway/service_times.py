"""T_sync(B) of one worker: calibrated at its start, then kept up to date from every batch (design, section 3)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from taktline_protocol.messages import BucketTime

WINDOW = 128
MIN_SAMPLES = 8
NOISE = 0.005
"""Changes of a bucket's times below this share are not worth a new table."""

NETWORK_NOISE_S = 0.0005
OVERLAP_QUANTILE = 0.9
"""Sent too late, a batch leaves the engine idle; too early, it is decided knowing a little less."""


class ServiceTimes:
    """Median and tail of the time a batch takes on one worker, by batch size, in seconds.

    A batch of any size runs in the smallest bucket that holds it, so sizes of one bucket share their times. The
    calibration stands until a bucket has seen `MIN_SAMPLES` batches; then the last `WINDOW` of them speak. The tail is
    the 99th percentile by the lower rank, so one freak batch in a window moves nothing.

    Part of that time the engine is not needed: frames travel and are decoded before it begins, answers travel after it.
    `overlap_s` is how much, so long before the end of one batch may the next one be sent.

    A table that is too slow refuses the very requests that would correct it; `rescale` is the way out.
    """

    def __init__(self, calibration: Sequence[BucketTime], max_batch: int, actions: int = 0) -> None:
        """Raises ValueError on an empty calibration.

        Args:
            actions: how many a chunk has at this quality, where they are fewer than the policy's own; else 0.
        """
        if not calibration:
            raise ValueError("a worker without calibrated buckets cannot be scheduled")
        ordered = sorted(calibration, key=lambda time: time.batch)
        self.buckets = tuple(time.batch for time in ordered)
        self.max_batch = self._most(max_batch)
        self.actions = actions
        self._calibrated = {time.batch: (time.median_ms / 1e3, time.p99_ms / 1e3) for time in ordered}
        self._median: dict[int, float] = {}
        self._tail: dict[int, float] = {}
        self.network_s = self.overlap_s = 0.0
        self._begin(1.0)

    def limit(self, max_batch: int) -> None:
        """Batches have at most `max_batch` members from now on; what was measured stays known."""
        if self._most(max_batch) != self.max_batch:
            self.max_batch = self._most(max_batch)
            self._tabulate()

    def _most(self, max_batch: int) -> int:
        return max(1, min(max_batch, self.buckets[-1]))

    def record(self, batch: int, seconds: float) -> None:
        """Takes in one finished batch of `batch` members that took `seconds` from send to answer."""
        bucket = self.bucket(batch)
        window = self._windows[bucket]
        window.add(seconds)
        if window.count >= MIN_SAMPLES:
            median, tail = window.median(), window.tail()
            if (
                abs(median - self._median[bucket]) > NOISE * self._median[bucket]
                or abs(tail - self._tail[bucket]) > NOISE * self._tail[bucket]
            ):
                self._median[bucket], self._tail[bucket] = median, tail
                self._tabulate()

    def note_outside(self, batch: int, seconds: float) -> None:
        """Takes in how long the engine was not needed for one finished batch of `batch` members."""
        self._outside.add(seconds)
        self._outside_of[self.bucket(batch)].add(seconds)
        if self._outside.count < MIN_SAMPLES:
            return
        overlap_s = self._outside.quantile(OVERLAP_QUANTILE)
        if abs(overlap_s - self.overlap_s) > max(NETWORK_NOISE_S, 0.25 * self.overlap_s):
            self.overlap_s = overlap_s
            self._tabulate()

    def hidden_s(self, batch: int) -> float:
        """How much of the time of a batch of this size passes while the one before it runs; 0 where none is sent ahead.

        Larger batches hide more: more frames travel and are decoded.
        """
        if not self.overlap_s:
            return 0.0
        window = self._outside_of[self.bucket(batch)]
        outside_s = window.median() if window.count >= MIN_SAMPLES else self._outside.median()
        return min(outside_s, 0.5 * self.median[min(batch, self.max_batch)])  # never more than the engine itself takes

    def note_network(self, seconds: float) -> None:
        """Takes in what one finished batch took beyond the worker's own part.

        It is added to the calibrated times of buckets that have not been measured from here yet.
        """
        self._network.add(max(0.0, seconds))
        if self._network.count < MIN_SAMPLES:
            return
        network_s = self._network.median()
        if abs(network_s - self.network_s) > max(NETWORK_NOISE_S, 0.25 * self.network_s):
            for bucket, window in self._windows.items():
                if window.count < MIN_SAMPLES:
                    self._median[bucket] += network_s - self.network_s
                    self._tail[bucket] += network_s - self.network_s
            self.network_s = network_s
            self._tabulate()

    def rescale(self, seconds: float) -> None:
        """Starts anew from the calibration, scaled so that a batch of one takes `seconds`.

        For a trial that contradicts the table: its samples come from another time, and the calibration's own ratios
        between the buckets are the best that is known of the present one.
        """
        self._begin(seconds / self._calibrated[self.buckets[0]][0])

    def _begin(self, scale: float) -> None:
        self.network_s = self.overlap_s = 0.0
        self._network, self._outside = _Window(), _Window()
        self._outside_of = {batch: _Window() for batch in self.buckets}
        self._windows = {batch: _Window() for batch in self.buckets}
        self._median = {batch: scale * median for batch, (median, _) in self._calibrated.items()}
        self._tail = {batch: scale * max(times) for batch, times in self._calibrated.items()}
        self._tabulate()

    def bucket(self, batch: int) -> int:
        """The bucket that a batch of this size runs in."""
        return self.buckets[min(bisect_left(self.buckets, batch), len(self.buckets) - 1)]

    def median_s(self, batch: int) -> float:
        """Expected duration of a batch of 1..max_batch members."""
        return self.median[batch]

    def tail_s(self, batch: int) -> float:
        """99th percentile of the duration of a batch of 1..max_batch members."""
        return self.tail[batch]

    def largest_within(self, seconds: float, limit: int) -> int:
        """Largest batch of at most `limit` members whose tail fits in `seconds`; 0 where not even one does."""
        size = min(limit, self.max_batch)
        while size and self.tail[size] > seconds:
            # Step to the next smaller bucket: sizes within one bucket take equally long.
            smaller = bisect_left(self.buckets, size)
            size = min(size - 1, self.buckets[smaller - 1]) if smaller else 0
        return size

    def thrifty(self, batch: int) -> int:
        """First batch of the quickest way to serve `batch` members with no deadline among them.

        Padding is what makes this less than `batch`: five members in a bucket of eight can take longer than four and
        then one.
        """
        return self.thrifty_table[min(batch, self.max_batch)]

    @property
    def best_rate(self) -> float:
        """Highest throughput of the engine over the batch sizes, in observations a second (median times)."""
        return self._best_rate

    def _tabulate(self) -> None:
        # A larger batch is never predicted to be faster: noise between buckets must not invert the order.
        self.median, self.tail = [0.0], [0.0]
        median = tail = 0.0
        size = 1
        for bucket in self.buckets:
            median = max(median, self._median[bucket])
            tail = max(tail, self._tail[bucket], median)
            sizes = min(bucket, self.max_batch) + 1 - size
            self.median += [median] * sizes
            self.tail += [tail] * sizes
            size += sizes
            if size > self.max_batch:
                break
        # Of a normal distribution, in units of what lies between its median and its 99th percentile.
        self.variance = [(tail - median) ** 2 for median, tail in zip(self.median, self.tail, strict=True)]
        self.thrifty_table = [0]
        total = [0.0]
        parts: list[tuple[int, float]] = []
        for size, whole in enumerate(self.median[1:], 1):
            # Only full buckets and the whole can come first in a quickest way: padding in between buys nothing. Among
            # equally quick ways the one that begins with the largest batch serves more of them early.
            quickest, first = whole, size
            for part, seconds in parts:  # the largest first
                if seconds + total[size - part] < quickest:
                    quickest, first = seconds + total[size - part], part
            total.append(quickest)
            self.thrifty_table.append(first)
            if size in self.buckets:
                parts.insert(0, (size, whole))
        # What is hidden of a batch is no more than half of it. Of a bucket the largest batch is the most a second.
        self._best_rate = max(
            size / max(self.median[size] - self.overlap_s, 0.5 * self.median[size], 1e-9)
            for size in (*(bucket for bucket in self.buckets if bucket < self.max_batch), self.max_batch)
        )


class _Window:
    """The last durations of one bucket, also in sorted order."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def count(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        if len(self._recent) == WINDOW:
            self._sorted.pop(bisect_left(self._sorted, self._recent.popleft()))
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2]

    def tail(self) -> float:
        return self.quantile(0.99)

    def quantile(self, share: float) -> float:
        """By the lower rank."""
        return self._sorted[int(share * (len(self._sorted) - 1))]
