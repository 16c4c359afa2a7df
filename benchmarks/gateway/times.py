"""T_sync(B) of published engines, for the scheduling benchmark: measured points, linear between them."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

from taktline_protocol.messages import BucketTime

BUCKETS = (1, 2, 4, 8, 16, 32)
TAIL_SIGMA = 0.03
"""Spread of a batch's duration: log-normal around the median, so p99 is 7% above it."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine's batch times: (batch, ms) points as published or measured; `sigma` is the spread of a batch."""

    name: str
    points: tuple[tuple[int, float], ...]
    source: str
    sigma: float = TAIL_SIGMA

    def median_s(self, batch: int) -> float:
        """Duration of a batch of this size, padded to its bucket."""
        size = next(bucket for bucket in BUCKETS if bucket >= batch)
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
            for batch in BUCKETS
        ]

    @property
    def capacity_hz(self) -> float:
        """Best throughput over the buckets."""
        return max(batch / self.median_s(batch) for batch in BUCKETS)


MEASURED = Path(__file__).resolve().parent.parent / "results" / "h200" / "engine_pi05.json"


def measured_pi05() -> Engine:
    """Our own π0.5 on an H200: three views, a prompt of one token, as the committed run has it."""
    shape = {"views": 3, "prompt_tokens": 1, "horizon": 50, "steps": 10}
    rows = [row for row in json.loads(MEASURED.read_text()) if row["shape"] == shape and row["bench"] == "engine"]
    points = {row["batch"]: row["median_ms"] for row in reversed(rows)}
    return Engine("pi05-h200", tuple(sorted(points.items())), "benchmarks/results/h200/engine_pi05.json, 3 views")


ENGINES = (
    Engine("pi05", ((1, 22.59), (32, 319.94)), "PhyAI paper, section 5.3, Hopper, bf16: B=1 and B=32"),
    Engine(
        "gr00t-n1.7",
        ((1, 20.49), (8, 62.5), (32, 230.50)),
        "PhyAI paper, section 5.3, RTX 5090, bf16: B=1, B=32, and B=8 at 92.2% of B=32's throughput",
    ),
    measured_pi05(),
)
