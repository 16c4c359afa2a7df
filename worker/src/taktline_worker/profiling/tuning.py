"""Measures the kernels that could run each operation of a policy on this GPU, and writes the winners as a table."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from taktline_kernels.selector import REFERENCE, Choice, KernelSelector, Rule, Shape, parse_table
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.profiling.kernels import Key, Recorded, implementations, key_of, selecting_by

Measure = Callable[[Callable[[], Any]], float]
"""Microseconds of a call."""

# Relative L2 distance from the choice of now that a candidate may have, by dtype: twice a rounding of its inputs.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# A candidate must be faster by this share to replace what runs now: below it is noise.
_WORTH = 0.02
# Settings that are tried besides those which any shipped table uses.
_GRIDS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("attention_cached", "hopper"): {"wide": (0, 1), "keys": (48, 64, 80), "split": (1, 2, 4, 8)},
    ("attention_cached", "triton"): {
        "block_m": (64, 128),
        "block_n": (32, 64),
        "splits": (1, 2, 4, 7, 13),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    },
    ("conv_silu_split", "triton"): {"block": (256, 512), "rows": (2, 4, 8), "num_warps": (4, 8)},
    ("gated_delta_rule", "triton"): {
        "chunk": (16, 32, 64),
        "value_block": (16, 32),
        "num_warps": (4, 8),
        "round_inside": (0, 1),
    },
    ("rms_norm_silu_gate", "triton"): {"heads": (1, 4, 8, 16), "num_warps": (1, 4, 8)},
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel with its settings; `us` is None where it was refused, and `reason` says why."""

    kernel: str
    config: Mapping[str, int]
    us: float | None
    reason: str = ""

    @property
    def label(self) -> str:
        """Kernel and settings in words."""
        settings = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"{self.kernel} {settings}".strip()


@dataclass(frozen=True, slots=True)
class Tuned:
    """A kind of call with its candidates, the fastest good one first."""

    call: Recorded
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """What the table will name."""
        return self.candidates[0]


class _Forced(KernelSelector):
    """One kind of call gets one candidate; all others what they got before."""

    def __init__(self, behind: Mapping[Key, Choice], key: Key, choice: Choice) -> None:
        super().__init__()
        self._behind, self._key, self._choice = behind, key, choice

    def choose(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Choice:
        key = key_of(op, shape, dtype)
        return self._choice if key == self._key else self._behind.get(key, Choice(REFERENCE, "not recorded"))


def tune(calls: Sequence[Recorded], measure: Measure, say: Callable[[str], None]) -> list[Tuned]:
    """Measures every candidate of every kind of call that has more than one.

    A candidate that fails, cannot be loaded or answers too far from what runs now is refused with the reason.
    """
    behind = {call.key: call.choice for call in calls}
    results = []
    for number, call in enumerate(calls, 1):
        options = list(candidates(call))
        if call.again is None or len(options) < 2:
            continue
        shape = " ".join(f"{name}={value}" for name, value in call.shape.items())
        say(f"{number}/{len(calls)} {call.name} {shape}: {len(options)} candidates")
        with selecting_by(_Forced(behind, call.key, call.choice)):
            expected = call.again()
        found = [_try(call, kernel, config, behind, expected, measure) for kernel, config in options]
        good = sorted((each for each in found if each.us is not None), key=lambda each: each.us or 0.0)
        if not good:
            continue
        now = next(
            (each for each in good if each.kernel == call.choice.kernel and each.config == call.choice.config), None
        )
        if now is not None and now.us is not None and (good[0].us or 0.0) > (1.0 - _WORTH) * now.us:
            good.remove(now)
            good.insert(0, now)
        results.append(Tuned(call, (*good, *(each for each in found if each.us is None))))
    return results


def named(calls: Sequence[Recorded], operations: Sequence[str]) -> list[Recorded]:
    """Those of the calls that are one of `operations`; all where none is named.

    Raises:
        TaktlineError: CONFIG_INVALID naming what the policy runs, for an operation that it does not.
    """
    known = sorted({call.name for call in calls})
    if unknown := [name for name in operations if name not in known]:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"the policy runs no operation {unknown[0]!r} in these batches",
            f"choose from {', '.join(known)}",
        )
    return [call for call in calls if not operations or call.name in operations]


def candidates(call: Recorded) -> Iterator[tuple[str, dict[str, int]]]:
    """(kernel, settings) that could run a call, each once; what runs now comes first."""
    seen: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
    shipped = [rule for rule in _shipped_rules() if rule.op == call.name]
    options: list[tuple[str, Mapping[str, int]]] = [(call.choice.kernel, call.choice.config)]
    for kernel in implementations(call.name):
        settings: list[Mapping[str, int]] = [rule.config for rule in shipped if rule.kernel == kernel]
        grid = _GRIDS.get((call.name, kernel), {})
        settings += (
            [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())] if grid else []
        )
        options += [(kernel, config) for config in settings or [{}]]
    for kernel, config in options:
        key = (kernel, tuple(sorted(config.items())))
        if key not in seen:
            seen.add(key)
            yield kernel, dict(config)


def _shipped_rules() -> tuple[Rule, ...]:
    folder = resources.files("taktline_kernels").joinpath("tables")
    texts = [entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(rule for text in texts for rule in parse_table(text))


def _try(
    call: Recorded,
    kernel: str,
    config: dict[str, int],
    behind: Mapping[Key, Choice],
    expected: Any,
    measure: Measure,
) -> Candidate:
    assert call.again is not None
    try:
        if call.op is not None and kernel != REFERENCE:
            call.op.load(kernel)  # `run` would fall back to the reference, and its time would count as the kernel's
        with selecting_by(_Forced(behind, call.key, Choice(kernel, "candidate", config))):
            distance = _distance(call.again(), expected)
            if not distance <= _TOLERANCE.get(call.dtype, 2e-2):
                return Candidate(kernel, config, None, f"its result is {distance:.1e} away")
            return Candidate(kernel, config, measure(call.again))
    except (ImportError, KeyError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        # What kernels raise for shapes or settings that they are not made for; the others go on.
        return Candidate(kernel, config, None, f"{type(error).__name__}: {error}".splitlines()[0][:120])


def _distance(value: Any, expected: Any) -> float:
    """Relative L2 distance over all tensors of a result."""
    pairs = list(zip(_tensors(value), _tensors(expected), strict=True))
    error = sum(float((ours.double() - theirs.double()).square().sum()) for ours, theirs in pairs)
    size = sum(float(theirs.double().square().sum()) for _, theirs in pairs)
    return float((error / size) ** 0.5) if size else float(error**0.5)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value.to(torch.float32) if value.element_size() == 1 else value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors(getattr(value, item.name))


def table(results: Sequence[Tuned], gpu: str, subject: str) -> str:
    """The table as TOML: each measured shape exactly, then for each op what won most often, for shapes in between.

    Args:
        gpu: device name, for the heading.
        subject: what was measured, for the heading.
    """
    lines = [
        f"# Kernel table of {gpu}: the first rule that covers a call decides.",
        f"# Measured by `taktline kernels tune` on {time.strftime('%Y-%m-%d')} with torch {torch.__version__}:",
        f"# {subject}.",
    ]
    winners: dict[str, Counter[tuple[str, tuple[tuple[str, int], ...]]]] = {}
    for result in results:
        call, best = result.call, result.best
        others = [each for each in result.candidates[1:] if each.us is not None]
        measured = f"{best.us:.2f} us" + (
            f"; next {others[0].label} {others[0].us:.2f}" if others else "; nothing else ran"
        )
        bounds = ", ".join(f"{name} = [{value}, {value}]" for name, value in sorted(call.shape.items()))
        lines += ["", "[[rule]]", f'op = "{call.name}"', f'kernel = "{best.kernel}"']
        lines += [f'dtype = "{str(call.dtype).removeprefix("torch.")}"', f"bounds = {{ {bounds} }}"]
        lines += _config_line(best.config)
        lines.append(f'measured = "{measured}"')
        winners.setdefault(call.name, Counter())[best.kernel, tuple(sorted(best.config.items()))] += call.calls
    for name, counts in winners.items():
        (kernel, config), _ = counts.most_common(1)[0]
        lines += [
            "",
            "# Other shapes.",
            "[[rule]]",
            f'op = "{name}"',
            f'kernel = "{kernel}"',
            *_config_line(dict(config)),
        ]
        lines.append('measured = "the choice of most calls above"')
    return "\n".join(lines) + "\n"


def _config_line(config: Mapping[str, int]) -> list[str]:
    if not config:
        return []
    return [f"config = {{ {', '.join(f'{name} = {value}' for name, value in config.items())} }}"]
