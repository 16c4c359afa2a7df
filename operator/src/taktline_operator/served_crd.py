"""Compares the CRD that the cluster serves with the one this operator needs: an older one prunes what it writes.

Helm upgrades no CRD that it did not template, and people forget. A status field that the API server silently drops
would make the operator decide the same thing for ever, so it does not start on such a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taktline_operator import schema

Json = dict[str, Any]

PATH = f"/openapi/v3/apis/{schema.GROUP}/{schema.VERSION}"  # every service account may read it


def fields(part: Json, path: str = "") -> Iterator[str]:
    """Paths of all fields of an OpenAPI schema."""
    if part.get("type") == "array" or "items" in part:
        yield from fields(part.get("items", {}), f"{path}[]")
        return
    for name, field in part.get("properties", {}).items():
        if not path and name not in ("spec", "status"):
            continue
        inner = f"{path}.{name}" if path else name
        yield inner
        yield from fields(field, inner)


def missing(document: Json) -> list[str]:
    """Fields that this operator knows and the served CRD does not; only the outermost of a missing part.

    Args:
        document: the API server's OpenAPI v3 document of our group and version.
    """
    schemas = document.get("components", {}).get("schemas", {})
    served = next(
        (
            found
            for found in schemas.values()
            for kind in found.get("x-kubernetes-group-version-kind", [])
            if kind.get("kind") == schema.KIND
        ),
        None,
    )
    if served is None:
        return []  # not published yet, or by an API server that publishes none: the list has shown that the kind exists
    known = set(fields(served))
    lacking = [path for path in fields(schema.object_schema()) if path not in known]
    return [path for path in lacking if not any(path.startswith((f"{outer}.", f"{outer}[")) for outer in lacking)]
