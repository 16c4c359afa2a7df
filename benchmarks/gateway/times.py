"""T_sync(B) of published and measured engines, for the scheduling benchmark: measured points, linear between them."""

from __future__ import annotations

import dataclasses
import math
import random

from taktline_protocol.messages import BucketTime

from benchmarks.gateway.pace import MANIPULATION, Pace, imagined_chunks

BUCKETS = (1, 2, 4, 8, 16, 32)
TAIL_SIGMA = 0.03
"""Spread of a batch's duration: log-normal around the median, so p99 is 7% above it."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine's batch times: (batch, ms) points as published or measured.

    Attributes:
        sigma: the spread of a batch's duration.
        buckets: the batch sizes that it is built for.
        pace: how its robots ask.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    source: str
    sigma: float = TAIL_SIGMA
    buckets: tuple[int, ...] = BUCKETS
    pace: Pace = MANIPULATION

    def median_s(self, batch: int) -> float:
        """Duration of a batch of this size, padded to its bucket."""
        size = next(bucket for bucket in self.buckets if bucket >= batch)
        for (low, low_ms), (high, high_ms) in zip(self.points, self.points[1:], strict=False):
            if size <= high:
                return (low_ms + (high_ms - low_ms) * (size - low) / (high - low)) / 1e3
        raise ValueError(f"{self.name} has no time for a batch of {batch}")

    def draw_s(self, batch: int, rng: random.Random) -> float:
        """One run of a batch of this size."""
        return self.median_s(batch) * math.exp(rng.gauss(0.0, self.sigma))

    def table(self) -> list[BucketTime]:
        """What a worker's calibration would report."""
        tail = math.exp(2.326 * self.sigma)
        return [
            BucketTime(batch=batch, median_ms=1e3 * self.median_s(batch), p99_ms=1e3 * tail * self.median_s(batch))
            for batch in self.buckets
        ]

    @property
    def capacity_hz(self) -> float:
        """Best throughput over the buckets."""
        return max(batch / self.median_s(batch) for batch in self.buckets)

    @property
    def most(self) -> int:
        """The largest bucket that a request with the usual largest budget can be served in."""
        return max(batch for batch in self.buckets if batch == 1 or 1e3 * self.median_s(batch) <= self.pace.high_ms)


ENGINES = (
    Engine("pi05", ((1, 22.59), (32, 319.94)), "PhyAI paper, section 5.3, Hopper, bf16: B=1 and B=32"),
    Engine(
        "gr00t-n1.7",
        ((1, 20.49), (8, 62.5), (32, 230.50)),
        "PhyAI paper, section 5.3, RTX 5090, bf16: B=1, B=32, and B=8 at 92.2% of B=32's throughput",
    ),
    Engine(
        "pi05-h200",
        ((1, 10.4636), (2, 20.0260), (4, 32.5260), (8, 57.1936), (16, 105.5621), (32, 204.4825)),
        "engine_pi05.json: 3 views, 1 prompt token, horizon 50, 10 steps",
    ),
    Engine(
        "gr00t-n1.7-h200",
        ((1, 5.8757), (2, 9.2468), (4, 11.9476), (8, 17.6090), (16, 31.1511), (32, 57.5535)),
        "engine_groot.json: 2 images, 156 tokens, horizon 40, 4 steps",
        pace=dataclasses.replace(MANIPULATION, duration_s=10.0),
    ),
    Engine(
        "cosmos3-nano-h200",
        ((1, 628.150), (2, 1223.635), (4, 2420.873), (8, 4959.834), (16, 9790.220)),
        "engine_cosmos3_nano_batches.json: the official preset, 4 steps, 8 passes",
        buckets=(1, 2, 4, 8, 16),
        pace=imagined_chunks(32, 15.0, robots=(2, 4, 8, 32, 128, 512), duration_s=1800.0),
    ),
)
"""Our own on an H200 are those of benchmarks/results/h200 in bf16, as of when the rows of results/cpu were played,
and stay until those are played again: some cases turn on a tenth of a millisecond. A test holds them against the files.
"""
