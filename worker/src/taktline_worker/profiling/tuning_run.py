"""One run of `taktline kernels tune`: policies opened shape by shape, measured, and the table written as it grows."""

from __future__ import annotations

import gc
import os
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from taktline_kernels.selector import TABLE_VARIABLE, default_selector

from taktline_worker.adapter import Profile
from taktline_worker.idle_threads import let_others_run
from taktline_worker.profiling.kernels import record
from taktline_worker.profiling.subject import Request, open_subject
from taktline_worker.profiling.tuning import Group, Tuned, Tuner, named
from taktline_worker.profiling.tuning_clock import GpuClock
from taktline_worker.profiling.tuning_table import merged, text_of

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How it is measured.

    Attributes:
        ops: operations to measure; all where none is named.
        runs: replays of each candidate, and turns of each phase.
        grids: also settings that no table names.
        complete: at the end, leave out rules that neither this run nor one before it has measured.
        limit_s: begin no further request after so long.
    """

    ops: tuple[str, ...] = ()
    runs: int = 9
    grids: bool = True
    complete: bool = False
    limit_s: float = 1e9


def run(requests: Iterable[Request], settings: Settings, path: Path, say: Say) -> list[Tuned]:
    """Measures and writes the table to `path`, again after every request."""
    began, device = time.monotonic(), torch.device("cuda", torch.cuda.current_device())
    let_others_run()  # as a worker does: what is measured here is what it will take
    selector = default_selector()
    name, base = selector.rules(device)
    tuner = Tuner(selector, GpuClock(device, settings.runs), base, grids=settings.grids)
    subjects, gpu = measured_on(name), torch.cuda.get_device_name(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    every = True
    for request in requests:
        every = every and time.monotonic() - began < settings.limit_s
        if not every:
            break
        subject = open_subject(request)
        for batch in request.batches:
            every = every and time.monotonic() - began < settings.limit_s
            if not every:
                break
            label = _label(request, subject, batch)
            say(f"[{time.monotonic() - began:.0f} s] {label}")
            with torch.inference_mode():
                calls = named(record(subject, batch), settings.ops)
                phases = {phase.name: phase.run for phase in subject.phases(batch)}
                for found in tuner.measure(Group(phases, calls)):
                    say(f"{found.call.text}: {found.best.label}: {found.figures}")
            del calls, phases
            gc.collect()
            subjects = [*(one for one in subjects if one != label), label]
            path.write_text(text_of(merged(tuner.results, base), gpu, subjects), encoding="utf-8")
        del subject
        gc.collect()
        torch.cuda.empty_cache()
    if every and settings.complete:
        rules = merged(tuner.results, base, complete=True)
        path.write_text(text_of(rules, gpu, subjects), encoding="utf-8")
    return tuner.results


def measured_on(table: str) -> list[str]:
    """What the table in force was measured on, as its file says; nothing where there is none."""
    if os.environ.get(TABLE_VARIABLE):
        text = Path(table).read_text(encoding="utf-8")
    else:
        file = resources.files("taktline_kernels").joinpath("tables", f"{table}.toml")
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return [str(one) for one in tomllib.loads(text).get("measured_on", [])]


def _label(request: Request, subject: Profile, batch: int) -> str:
    shape = ", ".join(f"{name} {value}" for name, value in subject.shape.items())
    layers = f", {request.layers} layers" if request.layers else ""
    return f"{subject.policy} {subject.precision}, batch {batch}, {shape}{layers}"
