"""Time of a call on a CPU or a GPU, and the machine's own ceilings that such times are judged by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of single calls, in ascending order."""

    ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """The middle one."""
        return self.ms[len(self.ms) // 2]

    @property
    def p99_ms(self) -> float:
        """The 99th percentile; the largest where there are fewer than a hundred."""
        return self.ms[min(len(self.ms) - 1, int(0.99 * len(self.ms)))]


@dataclass(frozen=True, slots=True)
class Roofs:
    """Ceilings of one device: matrix products on random data, and copies from and to its own memory."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on products, not memory, are the limit."""
        return self.flops_per_s / self.bytes_per_s


def measure(call: Call, device: torch.device, *, warm_up: int = 3, runs: int = 50, limit_s: float = 1e9) -> Times:
    """Times single calls: CUDA events on a GPU, the wall clock on a CPU.

    Args:
        warm_up: calls beforehand that are not counted.
        runs: calls to count.
        limit_s: after so long no further call is made, once three are counted.
    """
    for _ in range(warm_up):
        call()
    times: list[float] = []
    began = time.monotonic()
    while len(times) < runs and (len(times) < 3 or time.monotonic() - began < limit_s):
        times.append(_event_ms(call, device) if device.type == "cuda" else _clock_ms(call))
    return Times(tuple(sorted(times)))


def capture(call: Call, device: torch.device, warm_up: int = 2) -> Call:
    """A replay of `call` as one CUDA graph, which leaves out the host's part; on a CPU the call itself."""
    if device.type != "cuda":
        return call
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.inference_mode():
        for _ in range(warm_up):
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay


def measure_roofs(device: torch.device, dtype: torch.dtype) -> Roofs:
    """Measures the ceilings now, in about a second. A busy machine has lower ones, as it has for the engine."""
    gpu = device.type == "cuda"
    side, mebibytes = (8192, 1024) if gpu else (1024, 256)
    generator = torch.Generator(device=device).manual_seed(0)
    left = torch.randn(side, side, device=device, generator=generator).to(dtype)
    right = torch.randn(side, side, device=device, generator=generator).to(dtype)
    product = torch.empty_like(left)
    matrix = measure(lambda: torch.mm(left, right, out=product), device, runs=20, limit_s=1.0 if gpu else 0.2)
    source = torch.ones(mebibytes * 2**18, device=device)
    target = torch.empty_like(source)
    copied = measure(lambda: target.copy_(source), device, runs=20, limit_s=1.0 if gpu else 0.2)
    return Roofs(2.0 * side**3 / (1e-3 * matrix.ms[0]), 2.0 * source.numel() * 4 / (1e-3 * copied.ms[0]))


def _event_ms(call: Call, device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        begin.record()
        call()
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end))


def _clock_ms(call: Call) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)
