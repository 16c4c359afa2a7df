"""What was measured as a kernel table: rules of the table in force with new figures, and rules for what won anew."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from taktline_kernels.selector import Choice, Rule, covering

from taktline_worker.profiling.kernels import Key, Recorded, key_of
from taktline_worker.profiling.tuning import ALONE, WORTH, Candidate, Tuned, together

logger = logging.getLogger(__name__)

_MOST_FIGURES = 3
_OTHERS = "for shapes that no measured call has"
_COUNTS = frozenset({"batch", "cache", "frames", "keys", "lanes", "m", "prefix", "queries", "rows", "tokens"})
"""Dimensions that count rows of some kind: a kernel takes any number of them."""
_FEW_ROWS, _MANY_ROWS = 256, 10_000_000


def merged(results: Sequence[Tuned], base: Sequence[Rule], *, complete: bool = False) -> list[Rule]:
    """Rules that choose for every measured call what won for it.

    A rule of `base` that names the winners of the calls it decides stays and gets their figures. Where another kernel
    won, a rule for exactly this shape goes before it, or takes its place if it is for nothing else. An operation that
    has no rule for other shapes gets one for the numbers of rows between those that were measured. One that must run
    one kernel at every number of rows gets no rule where none ran at all that were measured, which is logged.

    Args:
        results: one for each kind of call.
        base: the table in force; empty on a GPU that has none.
        complete: leave out rules that no run has measured, but for an operation's last one, which is for all other
            shapes.
    """
    results = _agreed(results)
    decided: dict[int, list[Tuned]] = defaultdict(list)
    anew: list[Tuned] = []
    for result in results:
        place = covering(base, result.call.name, result.call.shape, result.call.dtype)
        if place is None:
            anew.append(result)
        else:
            decided[place].append(result)
    rules: list[Rule] = []
    for place, rule in enumerate(base):
        found = decided.get(place, [])
        same = [one for one in found if one.best.runs(Choice(rule.kernel, "", rule.config))]
        others = [one for one in found if one not in same]
        if others and not same and _only_for(rule, others) and len({one.best.label for one in others}) == 1:
            best = others[0].best
            rules.append(replace(rule, kernel=best.kernel, config=dict(best.config), measured=_figures(others)))
            continue
        rules += _exact(others)
        if same:
            rules.append(replace(rule, measured=_figures(same)))
        elif not complete or ALONE in rule.measured:
            rules.append(rule)
        elif not rule.bounds and not rule.dtype:
            rules.append(replace(rule, measured=_OTHERS))
    rules += _exact(anew)
    for name in dict.fromkeys(result.call.name for result in results):
        if not any(rule.op == name and not rule.bounds and not rule.dtype for rule in rules):
            rules += _between([one for one in results if one.call.name == name])
    return rules


def text_of(rules: Iterable[Rule], gpu: str, subjects: Sequence[str]) -> str:
    """The table as TOML.

    Args:
        gpu: device name.
        subjects: what was measured, in words.
    """
    lines = [
        "# Written by `taktline kernels tune`: the first rule that covers a call decides.",
        f"gpu = {_text(gpu)}",
        f'date = "{time.strftime("%Y-%m-%d")}"',
        f'torch = "{torch.__version__}"',
        "measured_on = [",
        *(f"  {_text(subject)}," for subject in subjects),
        "]",
    ]
    for rule in rules:
        lines += ["", "[[rule]]", f"op = {_text(rule.op)}", f"kernel = {_text(rule.kernel)}"]
        lines += [f"dtype = {_text(rule.dtype)}"] if rule.dtype else []
        lines += [_mapping("bounds", {name: f"[{low}, {high}]" for name, (low, high) in rule.bounds.items()})]
        lines += [_mapping("config", {name: int(value) for name, value in rule.config.items()})]
        lines += [f"measured = {_text(rule.measured)}"] if rule.measured else []
    return "\n".join(line for line in lines if line != _NOTHING) + "\n"


_NOTHING = "\0"


def _text(value: str) -> str:
    """A basic string of TOML, which JSON's strings are."""
    return json.dumps(value, ensure_ascii=False)


def _mapping(name: str, values: Mapping[str, object]) -> str:
    inside = ", ".join(f"{key} = {value}" for key, value in values.items())
    return f"{name} = {{ {inside} }}" if values else _NOTHING


def _only_for(rule: Rule, results: Sequence[Tuned]) -> bool:
    """Whether the rule decides no call but these, which it covers: none of its dimensions is free, nor its dtype."""
    points = bool(rule.dtype) and all(low == high for low, high in rule.bounds.values())
    return points and all(one.call.shape.keys() == rule.bounds.keys() for one in results)


def _exact(results: Sequence[Tuned]) -> list[Rule]:
    """Rules for shapes that were measured; one for all row counts where an operation may have only one kernel."""
    alike: dict[tuple[str, str, tuple[tuple[str, tuple[int, int]], ...]], list[Tuned]] = defaultdict(list)
    for result in results:
        call = result.call
        bounds = {name: (value, value) for name, value in call.shape.items()}
        if together(call.name) and "rows" in bounds:
            few = (one.call.shape["rows"] for one in results if _group(one.call) == _group(call))
            bounds["rows"] = (min(_FEW_ROWS, *few), _MANY_ROWS)
        alike[call.name, str(call.dtype).removeprefix("torch."), tuple(bounds.items())].append(result)
    return [
        Rule(name, same[0].best.kernel, dtype, dict(bounds), dict(same[0].best.config), _figures(same))
        for (name, dtype, bounds), same in alike.items()
    ]


def _agreed(results: Sequence[Tuned]) -> list[Tuned]:
    """The same, with one kernel for all row counts of an operation that may have only one: the least time of all.

    Without those of an operation of which no kernel ran at all of them.
    """
    groups: dict[Key, list[Tuned]] = defaultdict(list)
    for result in results:
        if together(result.call.name):
            groups[_group(result.call)].append(result)
    best: dict[Key, str] = {}
    for key, same in groups.items():
        label = _best_of_all(same)
        if all(_ran(label, one) for one in same):
            best[key] = label
        else:
            logger.warning("no kernel ran at every number of rows, so there is no rule for %s", same[0].call.text)
    return [
        _led_by(one, best[_group(one.call)]) if together(one.call.name) else one
        for one in results
        if not together(one.call.name) or _group(one.call) in best
    ]


def _group(call: Recorded) -> Key:
    """What calls have in common that differ in nothing but their number of rows."""
    return key_of(call.name, {name: value for name, value in call.shape.items() if name != "rows"}, call.dtype)


def _led_by(result: Tuned, label: str) -> Tuned:
    first = next(each for each in result.candidates if each.label == label)
    return replace(result, candidates=(first, *(each for each in result.candidates if each is not first)))


def _best_of_all(results: Sequence[Tuned]) -> str:
    """The candidate with the least time over all calls, of those that ran in each; what runs now if none clearly is."""
    sums: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for each in result.candidates:
            if each.us is not None:
                sums[each.label].append(each.us)
    whole = {label: sum(times) for label, times in sums.items() if len(times) == len(results)}
    now = results[0].call.choice
    label = Candidate(now.kernel, now.config, None).label
    least = min(whole, key=whole.__getitem__, default=label)
    return label if label in whole and whole[least] > (1.0 - WORTH) * whole[label] else least


def _between(results: Sequence[Tuned]) -> list[Rule]:
    """Rules for numbers of rows between those that were measured: the candidate with the least time over all of them.

    All other dimensions are as measured, since what a kernel takes hangs on them; an algorithm's number means something
    for its own shape only.
    """
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Tuned]] = defaultdict(list)
    for result in results:
        fixed = tuple((name, value) for name, value in result.call.shape.items() if name not in _COUNTS)
        groups[str(result.call.dtype).removeprefix("torch."), fixed].append(result)
    rules = []
    for (dtype, fixed), same in groups.items():
        first = same[0].call
        label = _best_of_all(same)
        best = next((each for each in same[0].candidates if each.label == label), None)
        if len(same) < 2 or best is None or "algorithm" in best.config or not all(_ran(label, one) for one in same):
            continue
        bounds = {name: (value, value) for name, value in fixed}
        for name in (name for name in first.shape if name in _COUNTS):
            sizes = [one.call.shape[name] for one in same]
            bounds[name] = (min(sizes), max(sizes))
        rules.append(Rule(first.name, best.kernel, dtype, bounds, dict(best.config), _figures(same)))
    return rules


def _ran(label: str, result: Tuned) -> bool:
    return any(each.label == label and each.us is not None for each in result.candidates)


def _figures(results: Sequence[Tuned]) -> str:
    """Of one rule: the shapes that it decides with what they took, the dearest ones where there are many."""
    if len(results) == 1:
        return f"{_shape(results[0].call)}: {results[0].figures}"
    ordered = sorted(results, key=lambda one: -(one.best.us or 0.0) * one.call.calls)
    text = " | ".join(f"{_shape(one.call)}: {one.figures}" for one in ordered[:_MOST_FIGURES])
    left = len(ordered) - _MOST_FIGURES
    return f"{text} | {left} more" if left > 0 else text


def _shape(call: Recorded) -> str:
    return " ".join(f"{name}={value}" for name, value in call.shape.items())
