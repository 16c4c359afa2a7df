"""Profile and sweep of one engine: measured rows in the form that all benchmarks share, and what they mean."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from taktline_worker.adapter import Phase, Profile
from taktline_worker.profiling.timing import Roofs, Times, capture, measure, measure_roofs

Say = Callable[[str], None]

WARM_UP = 10
RUNS = 50


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase of a batch.

    Attributes:
        share: of the phases' sum.
        mfu: share of the peak rate of products that the phase reached, whatever its intensity.
        intensity: operations a byte.
        floor_ms: the least time under the measured roofs.
        of_roof: share of the rate that the roofs allow at this intensity.
    """

    name: str
    ms: float
    share: float
    gflop: float
    mbytes: float
    tflops: float
    mfu: float
    intensity: float
    floor_ms: float
    of_roof: float


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch size; the form of `benchmarks/results`.

    Attributes:
        median_ms: T_sync of the whole request; p99_ms likewise, over n runs.
        floor_ms: sum of the phases' floors.
        details: t_amort_ms = T_sync / batch; q_per_s = batch / T_sync; phases; the roofs that were measured.
    """

    bench: str
    policy: str
    shape: dict[str, int]
    batch: int
    dtype: str
    gpus: int
    median_ms: float
    p99_ms: float
    n: int
    floor_ms: float
    versions: dict[str, str]
    date: str
    command: str
    peer: str = ""
    peer_median_ms: float | None = None
    ratio: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def t_amort_ms(self) -> float:
        """T_sync over the batch: a price, never a latency."""
        return self.median_ms / self.batch

    @property
    def q_per_s(self) -> float:
        """Observations a second at full batches."""
        return 1e3 * self.batch / self.median_ms

    @property
    def title(self) -> str:
        """What was measured, and on what, in one line."""
        where = self.versions.get("gpu") or f"CPU, threads: {self.versions.get('threads')}"
        shape = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.shape.items())
        return f"{self.policy}, {self.dtype} on {where}: {shape}"

    @property
    def phases(self) -> list[PhaseRow]:
        """The phases, where they were measured."""
        return [PhaseRow(**phase) for phase in self.details.get("phases", [])]


def profile(
    subject: Profile, batches: Sequence[int], say: Say, *, runs: int = RUNS, limit_s: float = 10.0
) -> list[BatchRow]:
    """Measures every batch whole and by phase, and the machine's roofs.

    Args:
        say: called with one line as each step begins.
        limit_s: seconds after which a measurement ends with the runs it has, three at least.
    """
    roofs = _roofs(subject, say)
    rows = []
    for batch in batches:
        say(f"batch {batch}: whole request")
        times = _whole(subject, batch, runs, limit_s)
        phases: list[PhaseRow] = []
        device = torch.device(subject.device)
        measured: list[tuple[Phase, float]] = []
        for phase in subject.phases(batch):
            say(f"batch {batch}: {phase.name}")
            call = capture(phase.run, device) if subject.captured else phase.run
            measured.append((phase, measure(call, device, runs=runs, limit_s=limit_s).median_ms))
        total = sum(ms for _, ms in measured)
        phases = [_phase_row(phase, ms, total, roofs) for phase, ms in measured]
        rows.append(_row("profile", subject, batch, times, phases, roofs))
    return rows


def sweep(
    subject: Profile, batches: Sequence[int], say: Say, *, runs: int = RUNS, limit_s: float = 10.0
) -> list[BatchRow]:
    """T_sync of whole requests by batch; arguments as `profile`."""
    roofs = _roofs(subject, say)
    rows = []
    for batch in batches:
        say(f"batch {batch}")
        times = _whole(subject, batch, runs, limit_s)
        floors = [
            _phase_row(phase, times.median_ms, times.median_ms, roofs).floor_ms for phase in subject.phases(batch)
        ]
        rows.append(_row("engine", subject, batch, times, [], roofs, sum(floors)))
    return rows


def _roofs(subject: Profile, say: Say) -> Roofs:
    say("the machine's roofs")
    return measure_roofs(torch.device(subject.device), torch.float32 if subject.precision == "fp32" else torch.bfloat16)


def _whole(subject: Profile, batch: int, runs: int, limit_s: float) -> Times:
    device = torch.device(subject.device)
    warm_up = WARM_UP if device.type == "cuda" else 1
    return measure(subject.whole(batch), device, warm_up=warm_up, runs=runs, limit_s=limit_s)


def _phase_row(phase: Phase, ms: float, total_ms: float, roofs: Roofs) -> PhaseRow:
    intensity = phase.flops / phase.bytes
    rate = phase.flops / (1e-3 * ms)
    floor_ms = 1e3 * max(phase.flops / roofs.flops_per_s, phase.bytes / roofs.bytes_per_s)
    return PhaseRow(
        name=phase.name,
        ms=ms,
        share=ms / total_ms,
        gflop=phase.flops / 1e9,
        mbytes=phase.bytes / 1e6,
        tflops=rate / 1e12,
        mfu=rate / roofs.flops_per_s,
        intensity=intensity,
        floor_ms=floor_ms,
        of_roof=floor_ms / ms,
    )


def _row(
    bench: str,
    subject: Profile,
    batch: int,
    times: Times,
    phases: Sequence[PhaseRow],
    roofs: Roofs,
    floor_ms: float | None = None,
) -> BatchRow:
    return BatchRow(
        bench=bench,
        policy=subject.policy,
        shape=dict(subject.shape),
        batch=batch,
        dtype=subject.precision,
        gpus=1 if torch.device(subject.device).type == "cuda" else 0,
        median_ms=times.median_ms,
        p99_ms=times.p99_ms,
        n=len(times.ms),
        floor_ms=sum(phase.floor_ms for phase in phases) if floor_ms is None else floor_ms,
        versions=versions(subject.device),
        date=time.strftime("%Y-%m-%d"),
        command=" ".join(["taktline", *sys.argv[1:]]),
        details={
            "t_amort_ms": times.median_ms / batch,
            "q_per_s": 1e3 * batch / times.median_ms,
            "roofs": {"flops_per_s": roofs.flops_per_s, "bytes_per_s": roofs.bytes_per_s},
            **({"phases": [asdict(phase) for phase in phases]} if phases else {}),
        },
    )


def versions(device: str) -> dict[str, str]:
    """What a result depends on besides the code."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.device(device).type == "cuda":
        found |= {"cuda": torch.version.cuda or "", "gpu": torch.cuda.get_device_name(torch.device(device))}
    else:
        found |= {"cpu": platform.processor() or platform.machine(), "threads": str(torch.get_num_threads())}
    return found
