"""Which kernel each operation of a policy gets and why: the selector's decisions, recorded while a request runs."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from taktline_kernels import selector as selector_module
from taktline_kernels.gpu_table import GPU_KERNELS
from taktline_kernels.ops.dispatch import REGISTRY, Op
from taktline_kernels.selector import Choice, KernelSelector, Rule, Shape, decide, parse_table
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.adapter import Profile

_SHARED_BYTES = 227 << 10
"""Shared memory that a block may have on the GPUs that tables are shipped for."""

Key = tuple[str, tuple[tuple[str, int], ...], str]
"""(op, shape sorted by dimension, dtype)."""


@dataclass(slots=True)
class Recorded:
    """One kind of call.

    Attributes:
        calls: how often it was made in one request.
        again: makes the first of them again, on the same arguments; None where nothing but the choice was seen.
        op: the registered op; None for an operation that exists on a GPU only.
        phase: of the request, in which the first of them was made.
        depth: operations that the first of them was made inside of.
    """

    name: str
    shape: dict[str, int]
    dtype: torch.dtype
    device: torch.device
    choice: Choice
    calls: int = 1
    again: Callable[[], Any] | None = None
    op: Op | None = None
    phase: str = ""
    depth: int = 0

    @property
    def text(self) -> str:
        """Name and shape in words."""
        return " ".join((self.name, *(f"{name}={value}" for name, value in self.shape.items())))

    @property
    def key(self) -> Key:
        """What tells it from other kinds."""
        return key_of(self.name, self.shape, self.dtype)


def key_of(name: str, shape: Shape, dtype: torch.dtype) -> Key:
    """The identity of a kind of call."""
    return name, tuple(sorted(shape.items())), str(dtype).removeprefix("torch.")


class _Recorder(KernelSelector):
    """Decides as the selector that it stands for, and keeps what it was asked."""

    def __init__(self, behind: KernelSelector) -> None:
        super().__init__()
        self._behind = behind
        self.found: dict[Key, Recorded] = {}
        self._noted: set[Key] = set()
        self.inside: list[tuple[Op | None, Callable[[], Any]]] = []
        self.phase = ""

    def choose(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Choice:
        choice = self._behind.choose(op, shape, dtype, device)
        key = key_of(op, shape, dtype)
        if key in self.found:
            self.found[key].calls += 1
            return choice
        registered, again = self.inside[-1] if self.inside else (None, None)
        self.found[key] = Recorded(
            op, dict(shape), dtype, device, choice, 1, again, registered, self.phase, len(self.inside)
        )
        return choice

    def note(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device, choice: Choice) -> None:
        self._behind.note(op, shape, dtype, device, choice)
        key = key_of(op, shape, dtype)
        kept = self.found.get(key)
        if kept is None:
            self.found[key] = Recorded(op, dict(shape), dtype, device, choice)
            self._noted.add(key)
            return
        kept.choice = choice
        if key in self._noted:  # else the call has been counted where it asked
            kept.calls += 1


def record(subject: Profile, batch: int) -> list[Recorded]:
    """Runs one request of `batch` rows; returns the kinds of calls that asked the selector, in order of first use."""
    phases = subject.phases(batch)
    with _recording() as recorder, torch.inference_mode():
        for phase in phases:
            recorder.phase = phase.name
            phase.run()
    return list(recorder.found.values())


@contextmanager
def selecting_by(selector: KernelSelector) -> Iterator[None]:
    """Lets all ops ask `selector` for as long as this lasts. One thread only."""
    before = selector_module._default
    selector_module._default = selector
    try:
        yield
    finally:
        selector_module._default = before


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder = _Recorder(selector_module.default_selector())
    run = Op.run

    def recorded_run(self: Op, shape: Mapping[str, int], like: torch.Tensor, *args: Any) -> Any:
        recorder.inside.append((self, functools.partial(run, self, shape, like, *args)))
        try:
            return run(self, shape, like, *args)
        finally:
            recorder.inside.pop()

    fused = _gpu_functions()
    Op.run = recorded_run  # type: ignore[method-assign]
    for module, name, function in fused:
        setattr(module, name, _noting(recorder, function))
    try:
        with selecting_by(recorder):
            yield recorder
    finally:
        Op.run = run  # type: ignore[method-assign]
        for module, name, function in fused:
            setattr(module, name, function)


def _noting(recorder: _Recorder, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noted(*args: Any, **settings: Any) -> Any:
        recorder.inside.append((None, functools.partial(function, *args, **settings)))
        try:
            return function(*args, **settings)
        finally:
            recorder.inside.pop()

    return noted


def _gpu_functions() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The public fused operations of `taktline_kernels.gpu`; none without a GPU, which its kernels need to load."""
    if not torch.cuda.is_available():
        return []
    return _public_functions(importlib.import_module("taktline_kernels.gpu"))


def _public_functions(module: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
    """By `__all__`: an operation with one kernel may be another module's function."""
    return [
        (module, name, function)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if name in module.__all__
    ]


def packaged_table(name: str) -> tuple[Rule, ...]:
    """The rules of a table that the package ships.

    Raises:
        TaktlineError: CONFIG_INVALID naming those there are.
    """
    folder = resources.files("taktline_kernels").joinpath("tables")
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    if name not in known:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"there is no kernel table {name!r}",
            f"choose from {', '.join(known)}, or write one with taktline kernels tune",
        )
    return parse_table(folder.joinpath(f"{name}.toml").read_text(encoding="utf-8"))


def choice_by(rules: Sequence[Rule], table: str, call: Recorded) -> Choice:
    """What a GPU with these rules would run for a call: the selector's own decision (`selector.decide`)."""
    if call.name not in REGISTRY and call.name not in GPU_KERNELS:
        return call.choice  # what no table decides is as the engine has decided it
    return decide(table, rules, call.name, call.shape, call.dtype, lambda: _SHARED_BYTES)


def implementations(name: str) -> tuple[str, ...]:
    """Kernels that exist for an operation, the reference first where there is one."""
    if name in REGISTRY:
        return REGISTRY[name].implementations()
    return GPU_KERNELS.get(name, ())
