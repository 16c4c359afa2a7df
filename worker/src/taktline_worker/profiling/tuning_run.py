"""One run of `taktline kernels tune`: policies opened shape by shape, measured, and the table written as it grows."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from taktline_kernels.selector import default_selector

from taktline_worker.adapter import Profile
from taktline_worker.idle_threads import let_others_run
from taktline_worker.profiling.kernels import record
from taktline_worker.profiling.subject import Request, check_batches, open_subject
from taktline_worker.profiling.tuning import Group, Tuned, Tuner, named
from taktline_worker.profiling.tuning_clock import GpuClock
from taktline_worker.profiling.tuning_table import merged, text_of

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be measured, as the command line has it: every policy with all views, prompts and batches."""

    policies: tuple[str, ...]
    batches: tuple[int, ...]
    precision: str = ""
    quantisation: str = ""
    views: tuple[int, ...] = (0,)
    prompt_tokens: tuple[int, ...] = (0,)
    layers: int = 0
    ops: tuple[str, ...] = ()
    runs: int = 9
    grids: bool = True
    complete: bool = False
    limit_s: float = 1e9

    def requests(self) -> Iterator[Request]:
        """One for each policy and shape of a row."""
        for policy, views, tokens in itertools.product(self.policies, self.views, self.prompt_tokens):
            yield Request(
                policy=policy,
                batches=check_batches(self.batches),
                device="cuda",
                precision=self.precision,
                views=views,
                prompt_tokens=tokens,
                quantisation=self.quantisation,  # type: ignore[arg-type]  # the command has checked it
                layers=self.layers,
            )


def run(wanted: Wanted, path: Path, say: Say) -> list[Tuned]:
    """Measures and writes the table to `path`, again after every request."""
    began, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    let_others_run()  # as a worker does: what is measured here is what it will take
    selector = default_selector()
    _, base = selector.rules(device)
    tuner = Tuner(selector, GpuClock(device, wanted.runs), say, base, grids=wanted.grids)
    subjects: list[str] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    for request in wanted.requests():
        if time.monotonic() - began > wanted.limit_s:
            break
        subject = open_subject(request)
        for batch in request.batches:
            if time.monotonic() - began > wanted.limit_s:
                break
            label = _label(request, subject, batch)
            say(f"[{time.monotonic() - began:.0f} s] {label}")
            with torch.inference_mode():
                calls = named(record(subject, batch), wanted.ops)
                phases = {phase.name: phase.run for phase in subject.phases(batch)}
                for _ in tuner.measure(Group(label, phases, calls)):
                    pass
            del calls, phases
            gc.collect()
            subjects.append(label)
            rules = merged(tuner.results, base, complete=wanted.complete)
            path.write_text(text_of(rules, torch.cuda.get_device_name(device), subjects), encoding="utf-8")
    return tuner.results


def _label(request: Request, subject: Profile, batch: int) -> str:
    shape = ", ".join(f"{name} {value}" for name, value in subject.shape.items())
    layers = f", {request.layers} layers" if request.layers else ""
    return f"{subject.policy} {subject.precision}, batch {batch}, {shape}{layers}"
