"""Tells whether an object must be written: a steady cluster costs no write."""

from __future__ import annotations

import copy
import re
from decimal import Decimal
from typing import Any

from taktline_operator import naming

Json = dict[str, Any]

_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal(10) ** -9,
    "u": Decimal(10) ** -6,
    "m": Decimal(10) ** -3,
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]|[KMGTPE]i)?")


def stamped(desired: Json) -> Json:
    """A copy of `desired` that carries the hash of its own content as an annotation."""
    metadata = copy.deepcopy(desired["metadata"])  # all that differs; the rest is shared, and written by nobody
    metadata.setdefault("annotations", {})[naming.ANNOTATION_APPLIED] = naming.content_hash(desired)
    return desired | {"metadata": metadata}


def needs_apply(desired: Json, live: Json | None) -> bool:
    """Whether applying `desired` would change `live`.

    True when the object is missing, when its content differs from the last apply (so a field that is wanted no longer
    is taken out), or when somebody changed a field that we set. Fields that others add are left alone.

    Args:
        desired: an object as `stamped` returns it.
    """
    return live is None or not covers(desired, live)


def covers(desired: Any, live: Any, path: tuple[str, ...] = ()) -> bool:
    """Whether every field of `desired` has the same value in `live`. List entries with names are matched by name."""
    if isinstance(desired, dict):
        if not isinstance(live, dict):
            return False
        return all(name in live and covers(value, live[name], (*path, name)) for name, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(live, list):
            return False
        if desired and all(isinstance(item, dict) and "name" in item for item in desired):
            named = {item.get("name"): item for item in live if isinstance(item, dict)}
            return all(item["name"] in named and covers(item, named[item["name"]], path) for item in desired)
        return len(desired) == len(live) and all(
            covers(item, other, path) for item, other in zip(desired, live, strict=True)
        )
    if len(path) >= 3 and path[-3] == "resources" and path[-2] in ("requests", "limits"):
        return quantity(desired) == quantity(live)
    return bool(desired == live)


def quantity(text: int | str) -> Decimal:
    """The value of a Kubernetes quantity: the API server rewrites `1000m` to `1`.

    Raises:
        ValueError: not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    number, suffix = match.groups()
    return Decimal(number) * _SUFFIXES[suffix or ""]
