"""Measures the kernels that could run each operation of a policy on this GPU, and says which one wins.

Two measurements. Each candidate alone, with its operands out of the GPU's cache, says who may be faster than what runs
now. Those run inside their phase (all layers of a tower in one graph, where kernels overlap and weights come from
memory) in turns with what runs now, and there it is decided.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

import torch
from taktline_kernels import compiling
from taktline_kernels.selector import REFERENCE, Choice, KernelSelector, Rule, Shape, parse_table
from taktline_protocol import ErrorCode, TaktlineError

from taktline_worker.profiling.kernels import Key, Recorded, implementations, key_of, selecting_by

Call = Callable[[], Any]

# Relative L2 distance from the choice of now that a candidate may have, by dtype: twice a rounding of its inputs.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
ALONE = "us alone"
"""What every figure of a rule says."""
# Alone a candidate must be faster by this share to be tried in its phase: below it is noise.
WORTH = 0.02
# So many of the fastest are tried there.
_FINALISTS = 3
# A gain in the phase counts from so many standard errors on.
_CERTAIN = 3.0
# Of cuBLASLt's algorithms for a shape, the first ones.
_ALGORITHMS = 8
# Settings that are tried besides those which the tables use.
_GRIDS: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {
    ("attention_cached", "hopper"): {"wide": (0, 1), "keys": (48, 64, 80), "split": (1, 2, 4, 8)},
    ("attention_cached", "triton"): {
        "block_m": (64, 128),
        "block_n": (32, 64),
        "splits": (1, 2, 4, 7, 13),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    },
    ("attention_suffix", "parts"): {"block_m": (64,), "block_n": (32,), "num_warps": (4,)},
    ("conv_silu_split", "triton"): {"block": (256, 512), "rows": (2, 4, 8), "num_warps": (4, 8)},
    ("gated_delta_rule", "triton"): {
        "chunk": (16, 32, 64),
        "value_block": (16, 32),
        "num_warps": (4, 8),
        "round_inside": (0, 1),
    },
    ("rms_norm_silu_gate", "triton"): {"heads": (1, 4, 8, 16), "num_warps": (1, 4, 8)},
    ("linear", "hopper"): {"columns": (64, 96, 128, 192), "stages": (4, 6)},
    ("product", "hopper"): {"columns": (64, 96, 128, 192), "stages": (4, 6)},
}


class Clock(Protocol):
    """How calls are timed; a test has its own."""

    def alone(self, call: Call, best_us: float | None) -> float:
        """Microseconds of a call by itself; no more exactly than needed once it is clearly slower than `best_us`."""

    def turns(self, calls: Sequence[Call]) -> list[list[float]]:
        """Milliseconds of every call, one list each: the n-th of all lists were measured side by side."""


@dataclass(frozen=True, slots=True)
class Group:
    """One request of a policy.

    Attributes:
        phases: by name, each a call over the whole of it.
        calls: the kinds of calls in it.
    """

    phases: Mapping[str, Call]
    calls: Sequence[Recorded]


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

    def runs(self, choice: Choice) -> bool:
        """Whether it is what the choice names."""
        return self.kernel == choice.kernel and dict(self.config) == dict(choice.config)


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate inside its phase, in turns with what runs now: medians of whole phases in milliseconds."""

    label: str
    phase: str
    ms: float
    now_ms: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """A kind of call, its candidates with the chosen one first, and how the finalists did inside their phase."""

    call: Recorded
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...] = ()

    @property
    def best(self) -> Candidate:
        """What the table will name."""
        return self.candidates[0]

    @property
    def figures(self) -> str:
        """What was measured, in words."""
        others = [each for each in self.candidates[1:] if each.us is not None]
        text = f"{self.best.us:.2f} {ALONE}" if self.best.us is not None else f"not measured {ALONE}"
        text += "".join(f", {each.label} {each.us:.2f}" for each in others[:2]) or ", nothing else ran"
        if self.trials:
            tried = min(self.trials, key=lambda trial: (trial.label != self.best.label, trial.ms))
            text += f"; {tried.phase} {tried.ms:.3f} ms with {tried.label}, {tried.now_ms:.3f} before"
        return text


class _Forced(KernelSelector):
    """One kind of call gets one candidate; all others what was found for them, or what they get anyway."""

    def __init__(self, found: Mapping[Key, Choice], behind: KernelSelector, key: Key, choice: Choice) -> None:
        super().__init__()
        self._found, self._behind, self._key, self._choice = found, behind, key, choice

    def choose(self, op: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Choice:
        key = key_of(op, shape, dtype)
        if key == self._key:
            return self._choice
        return self._found.get(key) or self._behind.choose(op, shape, dtype, device)


class Tuner:
    """Keeps what has been found while one request after the other is measured.

    Args:
        selector: decides for all that has not been measured; its choices are what a candidate has to beat.
        known: settings that tables name, beside those of the grids.
        grids: whether the grids are tried, too.
    """

    def __init__(
        self, selector: KernelSelector, clock: Clock, known: Sequence[Rule] = (), *, grids: bool = True
    ) -> None:
        self._selector, self._clock = selector, clock
        self._known, self._grids = (*known, *_shipped_rules()), grids
        self._found: dict[Key, Choice] = {}
        self.results: list[Tuned] = []

    def measure(self, group: Group) -> Iterator[Tuned]:
        """Measures every kind of call of a request that has not been measured, and keeps what wins.

        A candidate that fails, cannot be loaded or answers too far from what runs now is refused with the reason.
        """
        fresh = [call for call in group.calls if call.key not in self._found and call.again is not None]
        # What runs inside another operation comes first: that one's reference then runs the best of its parts.
        fresh.sort(key=lambda call: -call.depth)
        options = {call.key: self.candidates(call) for call in fresh}
        self._compile([(call, option) for call in fresh for option in options[call.key]], group.phases.values())
        for call in fresh:
            found = self._measure(call, options[call.key], group.phases.get(call.phase))
            if found is not None:
                self._found[call.key] = Choice(found.best.kernel, "measured", found.best.config)
                self.results.append(found)
                call.again = None  # what it holds is as large as the request
                yield found

    def candidates(self, call: Recorded) -> list[Candidate]:
        """What could run a call, each once and not yet measured; what runs now comes first."""
        options: list[tuple[str, Mapping[str, int]]] = [(call.choice.kernel, call.choice.config)]
        for kernel in implementations(call.name):
            settings: list[Mapping[str, int]] = [
                rule.config for rule in self._known if (rule.op, rule.kernel) == (call.name, kernel)
            ]
            settings += [{**one, "algorithm": n} for one in settings if "algorithm" in one for n in range(_ALGORITHMS)]
            grid = _GRIDS.get((call.name, kernel), {}) if self._grids else {}
            settings += (
                [dict(zip(grid, each, strict=True)) for each in itertools.product(*grid.values())] if grid else []
            )
            options += [(kernel, config) for config in settings or [{}]]
        seen = {(kernel, tuple(sorted(config.items()))): (kernel, dict(config)) for kernel, config in options}
        return [Candidate(kernel, config, None) for kernel, config in seen.values()]

    def _forced(self, call: Recorded, candidate: Candidate) -> _Forced:
        choice = Choice(candidate.kernel, "candidate", candidate.config)
        return _Forced(self._found, self._selector, call.key, choice)

    def _compile(self, options: Iterable[tuple[Recorded, Candidate]], phases: Iterable[Call]) -> None:
        """Compiles side by side what the candidates launch; then the phases make good what that left in buffers."""
        if not torch.cuda.is_available():
            return
        with compiling.together(dry=True):
            for call, candidate in options:
                if call.again is not None and _loads(call, candidate):
                    with selecting_by(self._forced(call, candidate)):
                        _attempt(call.again)
        for phase in phases:
            phase()

    def _measure(self, call: Recorded, options: Sequence[Candidate], phase: Call | None) -> Tuned | None:
        if len(options) < 2 or call.again is None:
            return None
        kept = _Kept(call.again)
        with selecting_by(self._forced(call, options[0])):
            expected = kept.results(call.again)
        found: list[Candidate] = []
        for option in options:
            best = min((each.us for each in found if each.us is not None), default=None)
            found.append(self._alone(call, option, kept, expected, best))
        now = found[0]
        good = sorted((each for each in found if each.us is not None), key=lambda each: each.us or 0.0)
        if not good:
            return None
        bar = now.us if now.us is not None else float("inf")
        finalists = [each for each in good if each is not now and (each.us or 0.0) < (1.0 - WORTH) * bar]
        winner = (finalists or [now])[0]
        trials: tuple[Trial, ...] = ()
        if now.us is not None and finalists and phase is not None and not together(call.name):
            winner, trials = self._in_phase(call, now, finalists[:_FINALISTS], phase)
        elif now.us is None:
            winner = good[0]
        refused = [each for each in found if each.us is None]
        return Tuned(call, (winner, *(each for each in good if each is not winner), *refused), trials)

    def _alone(
        self, call: Recorded, option: Candidate, kept: _Kept, expected: Sequence[torch.Tensor], best_us: float | None
    ) -> Candidate:
        assert call.again is not None
        if not _loads(call, option):
            # `run` would fall back to the reference, and its time would count as the kernel's.
            return dataclasses.replace(option, reason="cannot be loaded here")
        with selecting_by(self._forced(call, option)):
            reason = _attempt(call.again)
            if reason:
                return dataclasses.replace(option, reason=reason)
            distance = _distance(kept.results(call.again), expected)
            if not distance <= _TOLERANCE.get(call.dtype, 2e-2):
                return dataclasses.replace(option, reason=f"its result is {distance:.1e} away")
            times: list[float] = []
            reason = _attempt(lambda: times.append(self._clock.alone(call.again, best_us)))  # type: ignore[arg-type]
            return dataclasses.replace(option, us=times[0] if times else None, reason=reason)

    def _in_phase(
        self, call: Recorded, now: Candidate, finalists: Sequence[Candidate], phase: Call
    ) -> tuple[Candidate, tuple[Trial, ...]]:
        """The best of the finalists where it is faster beyond doubt, else what runs now."""

        def with_(candidate: Candidate) -> Call:
            def run() -> Any:
                with selecting_by(self._forced(call, candidate)):
                    return phase()

            return run

        times = self._clock.turns([with_(each) for each in (now, *finalists)])
        before = statistics.median(times[0])
        pairs = list(zip(finalists, times[1:], strict=True))
        trials = tuple(Trial(each.label, call.phase, statistics.median(ms), before) for each, ms in pairs)
        sure = [(gain, each) for each, ms in pairs if (gain := gained(times[0], ms)) > 0.0]
        return max(sure, key=lambda one: one[0])[1] if sure else now, trials


def gained(before: Sequence[float], after: Sequence[float]) -> float:
    """Median gain of turns measured side by side; 0 where a turn lost, noise explains it, or the medians disagree.

    Of normal noise alone, the best of three finalists passes in 0.4 % of cases with nine turns and in 1.1 % with seven
    (simulated); without asking every turn it would in 7 and 9 %, for the deviation of so few is itself uncertain.
    """
    gains = [old - new for old, new in zip(before, after, strict=True)]
    middle = statistics.median(gains)
    # Of a median, by the median deviation: 1.4826 for a normal spread, 1.2533 for the median's own.
    error = 1.4826 * 1.2533 * statistics.median(abs(one - middle) for one in gains) / len(gains) ** 0.5
    sure = min(gains) > 0.0 and middle > _CERTAIN * error and statistics.median(after) < statistics.median(before)
    return middle if sure else 0.0


def together(name: str) -> bool:
    """Whether an operation must run one kernel at every number of rows.

    A plan is the same to the bit however its candidates are cut over GPUs, so that the rows of a world model's frames
    may not decide what computes them.
    """
    return name.startswith("frame_")


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


class _Kept:
    """What an operation that writes to its arguments found there, so that every candidate finds the same."""

    def __init__(self, again: Call) -> None:
        self._tensors = list(_tensors(getattr(again, "args", ())))
        self._values: list[torch.Tensor] | None = None

    def results(self, again: Call) -> list[torch.Tensor]:
        """What it answers, or the arguments that it wrote to."""
        if self._values is None:
            copies = [tensor.clone() for tensor in self._tensors]
            found = [tensor.clone() for tensor in _tensors(again())]
            self._values = [] if found else copies
        else:
            for tensor, value in zip(self._tensors, self._values, strict=False):
                tensor.copy_(value)
            found = list(_tensors(again()))
        return found or [tensor.clone() for tensor in self._tensors]


def _shipped_rules() -> tuple[Rule, ...]:
    folder = resources.files("taktline_kernels").joinpath("tables")
    texts = [entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    return tuple(rule for text in texts for rule in parse_table(text))


def _loads(call: Recorded, candidate: Candidate) -> bool:
    if call.op is None or candidate.kernel == REFERENCE:
        return True
    try:
        call.op.load(candidate.kernel)
    except (ImportError, KeyError, AttributeError):
        return False
    return True


def _attempt(call: Call) -> str:
    """Makes a call; says in a line what it raised."""
    try:
        call()
    except Exception as error:  # kernels raise what their compilers do; the others go on
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ""


def _distance(values: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Relative L2 distance over all tensors of a result."""
    pairs = [(ours.double(), theirs.double()) for ours, theirs in zip(values, expected, strict=True)]
    error = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)
    size = sum(float(theirs.square().sum()) for _, theirs in pairs)
    return float((error / size) ** 0.5) if size else float(error**0.5)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from _tensors(getattr(value, item.name))
