"""The least time of a π policy on a GPU: each phase's operations over the matrix rate, or its bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

from taktline_worker.models.pi.config import PiArchitecture
from taktline_worker.models.pi.work import phase_work


@dataclass(frozen=True, slots=True)
class Roof:
    """What one GPU was measured to do: dense bf16 products on random data, and device-to-device copies."""

    flops: float
    bytes_per_s: float


H200 = Roof(flops=790e12, bytes_per_s=4.3e12)


def phase_floors_ms(
    a: PiArchitecture, roof: Roof, batch: int, views: int, prompt: int, horizon: int, steps: int
) -> dict[str, float]:
    """Floor of each phase in ms. The last prefix layer counts as its key and value only; weights are bf16.

    Args:
        a: dimensions.
        roof: ceilings.
        batch: rows.
        views: cameras.
        prompt: prompt tokens.
        horizon: action tokens.
        steps: solver steps.
    """
    work = phase_work(a, batch=batch, views=views, prompt=prompt, horizon=horizon, steps=steps)
    return {phase: part.floor_ms(roof.flops, roof.bytes_per_s) for phase, part in work.items()}
