"""Kernel selector: (op, shape, dtype, device) -> implementation, by measured rules kept per GPU in the package."""

from __future__ import annotations

import functools
import logging
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch

from taktline_kernels.gpu_table import GPU_KERNELS, default_settings, takes

logger = logging.getLogger(__name__)

REFERENCE = "torch"

# A table file that replaces the shipped ones, as `taktline kernels tune` writes it.
TABLE_VARIABLE = "TAKTLINE_KERNEL_TABLE"

# Substring of the device name that the driver reports -> table file. The first match wins.
GPU_TABLES: tuple[tuple[str, str], ...] = (("H200", "h200"),)

Shape = Mapping[str, int]


@dataclass(frozen=True)
class Rule:
    """One line of a table: the kernel for every call of `op` inside the bounds, and what was measured.

    Attributes:
        bounds: dimension name -> (smallest, largest) inclusive; dimensions not named are free.
        config: compile-time settings handed to the kernel.
        measured: the figures the rule rests on, shown by `explain`.
    """

    op: str
    kernel: str
    dtype: str = ""
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    config: Mapping[str, int] = field(default_factory=dict)
    measured: str = ""

    def matches(self, shape: Shape, dtype: torch.dtype) -> bool:
        """Say whether this rule covers the call."""
        if self.dtype and self.dtype != str(dtype).removeprefix("torch."):
            return False
        return all(name in shape and low <= shape[name] <= high for name, (low, high) in self.bounds.items())


@dataclass(frozen=True)
class Choice:
    """The implementation of one call, its settings, and the reason in words."""

    kernel: str
    reason: str
    config: Mapping[str, int] = field(default_factory=dict)


def parse_table(text: str) -> tuple[Rule, ...]:
    """Read a table: `[[rule]]` entries, in order of preference.

    Raises:
        ValueError: an entry lacks `op` or `kernel`, or a bound is not a pair.
    """
    rules = []
    for entry in tomllib.loads(text).get("rule", []):
        if "op" not in entry or "kernel" not in entry:
            raise ValueError(f"a rule needs op and kernel: {entry}")
        bounds: dict[str, tuple[int, int]] = {}
        for name, pair in entry.get("bounds", {}).items():
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"bound {name} of {entry['op']} must be [smallest, largest]: {pair}")
            bounds[name] = (int(pair[0]), int(pair[1]))
        rules.append(
            Rule(
                op=entry["op"],
                kernel=entry["kernel"],
                dtype=entry.get("dtype", ""),
                bounds=bounds,
                config=dict(entry.get("config", {})),
                measured=entry.get("measured", ""),
            )
        )
    return tuple(rules)


NO_TABLE = (
    "no kernel table for this GPU: operations that have a torch reference run it, and those that exist on a GPU only"
    " their default kernels, of Triton and cuBLAS; taktline kernels tune measures a table"
)


def covering(rules: Sequence[Rule], op: str, shape: Shape, dtype: torch.dtype) -> int | None:
    """Place of the rule that decides a call: the first one that covers it and whose kernel is written for it."""
    for place, rule in enumerate(rules):
        if rule.op == op and rule.matches(shape, dtype) and takes(op, rule.kernel, shape, dtype):
            return place
    return None


def decide(
    name: str, rules: Sequence[Rule], op: str, shape: Shape, dtype: torch.dtype, shared_bytes: Callable[[], int]
) -> Choice:
    """What a GPU runs for a call: all that anyone asks, runs or explains comes from here.

    Args:
        name: of the table, or of a GPU that has none.
        rules: the table's; empty where there is none.
        shared_bytes: tells the shared memory that a block of the GPU may have.
    """
    place = covering(rules, op, shape, dtype)
    if place is not None:
        rule = rules[place]
        return Choice(rule.kernel, f"table {name}: {rule.measured or 'rule without a figure'}", rule.config)
    why = f"no rule of table {name} covers it" if rules else f"no table for {name}"
    kernels = GPU_KERNELS.get(op)
    if kernels is None:
        return Choice(REFERENCE, why)
    if len(kernels) == 1:
        why = "the operation's one kernel"
    return Choice(kernels[-1], f"{why}; default settings", default_settings(op, shared_bytes))


def _shared_bytes(device: torch.device) -> int:
    properties = torch.cuda.get_device_properties(device)
    room: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # PyTorch's stubs lack it
    return room


class KernelSelector:
    """Chooses by the first rule of the device's table that covers a call; `decide` says what runs without one.

    The choice of a call depends on nothing but its shape, dtype and device, so one bucket always runs one kernel.
    """

    def __init__(self, tables: Mapping[str, tuple[Rule, ...]] | None = None) -> None:
        self._tables: dict[str, tuple[Rule, ...]] = dict(tables or {})
        self._device_table: dict[str, str] = {}
        self._choices: dict[tuple[Any, ...], Choice] = {}
        self._named = os.environ.get(TABLE_VARIABLE, "")
        self._said: set[str] = set()

    def choose(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Choice:
        """Return the implementation for one call. Cheap after the first call of its kind."""
        own = os.environ.get(TABLE_VARIABLE, "")
        if own != self._named:  # what another table has decided says nothing about this one's kernels
            self._named = own
            self._choices.clear()
        key = (op, tuple(sorted(shape.items())), dtype, device.type, device.index)
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self._decide(op, shape, dtype, device)
        return choice

    def note(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device, choice: Choice) -> None:
        """Keep what the caller has decided by itself, for `explain`: where a setting leaves no choice."""
        self._choices[(op, tuple(sorted(shape.items())), dtype, device.type, device.index)] = choice

    def explain(self) -> list[tuple[str, str, str, Choice]]:
        """List what was chosen so far: op, shape, dtype, choice."""
        rows = []
        for (op, shape, dtype, *_), choice in sorted(self._choices.items(), key=lambda item: str(item[0])):
            text = " ".join(f"{name}={value}" for name, value in shape)
            rows.append((op, text, str(dtype).removeprefix("torch."), choice))
        return rows

    def _decide(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Choice:
        if device.type != "cuda":
            return Choice(REFERENCE, f"{device.type} runs the torch reference")
        name, rules = self.rules(device)
        choice = decide(name, rules, op, shape, dtype, functools.partial(_shared_bytes, device))
        if rules and choice.kernel == REFERENCE and covering(rules, op, shape, dtype) is None:
            self._say(f"{name}/{op}", "no rule covers this call; it runs the torch reference", op, name)
        return choice

    def rules(self, device: torch.device) -> tuple[str, tuple[Rule, ...]]:
        """Name of the table in force for a CUDA device and its rules; the device's own name and none without a table.

        Raises:
            OSError: the file that `TABLE_VARIABLE` names cannot be read.
            ValueError: it is no table.
        """
        own = os.environ.get(TABLE_VARIABLE, "")
        if own:
            if own not in self._tables:
                with open(own, encoding="utf-8") as file:
                    self._tables[own] = parse_table(file.read())
            return own, self._tables[own]
        gpu = torch.cuda.get_device_name(device)
        table = self._device_table.get(gpu)
        if table is None:
            table = next((file for part, file in GPU_TABLES if part in gpu), "")
            self._device_table[gpu] = table
            if not table:
                self._say(gpu, NO_TABLE, "", gpu)
        if table and table not in self._tables:
            text = resources.files("taktline_kernels").joinpath("tables", f"{table}.toml").read_text(encoding="utf-8")
            self._tables[table] = parse_table(text)
        return (table or gpu), self._tables.get(table, ())

    def _say(self, key: str, message: str, op: str, table: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning(message, extra={"op": op, "table": table})


_default = KernelSelector()


def default_selector() -> KernelSelector:
    """Return the selector that the ops use."""
    return _default
