"""Evaluates the CRD's CEL rules where no API server does it, with the list functions that Kubernetes adds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel
from celpy.celparser import CELParseError
from celpy.evaluation import CELEvalError


def _is_sorted(values: list[Any]) -> celtypes.BoolType:
    return celtypes.BoolType(all(a <= b for a, b in pairwise(values)))


# Kubernetes' list library, as far as our rules use it.
_FUNCTIONS: dict[str, Callable[..., Any]] = {"isSorted": _is_sorted}


@lru_cache(maxsize=256)
def _program(rule: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule), functions=_FUNCTIONS)


def holds(rule: str, value: Any) -> bool:
    """Whether `rule` is true with `self` bound to `value` (plain JSON data).

    What was found is remembered: policies of one site are alike in most of their parts, and come again at each restart.

    Raises:
        ValueError: the rule does not compile or cannot be evaluated on this value.
    """
    return _holds(rule, json.dumps(value, sort_keys=True))


@lru_cache(maxsize=2048)  # a few MB at most
def _holds(rule: str, text: str) -> bool:
    try:
        return bool(_program(rule).evaluate({"self": json_to_cel(json.loads(text))}))
    except (CELEvalError, CELParseError) as error:
        raise ValueError(f"rule {rule!r} cannot be evaluated: {error}") from error
