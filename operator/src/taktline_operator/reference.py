"""The field reference of PolicyDeployment as Markdown, written from the CRD so that it cannot lag behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from taktline_operator import schema

Json = dict[str, Any]


def markdown() -> str:
    """Two tables, spec and status: field, type, default, what it means, and the rules that kubectl enforces."""
    properties = schema.object_schema()["properties"]
    parts = []
    for name in ("spec", "status"):
        rows = [_row(path, part, required) for path, part, required in _fields(properties[name], name, True)]
        parts.append(f"### {name}\n\n| field | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _fields(part: Json, path: str, required: bool) -> Iterator[tuple[str, Json, bool]]:
    yield path, part, required
    inner, mark = (part["items"], "[]") if part.get("type") == "array" else (part, "")
    for name, field in inner.get("properties", {}).items():
        yield from _fields(field, f"{path}{mark}.{name}", name in inner.get("required", []))


def _row(path: str, part: Json, required: bool) -> str:
    rules = [part, part["items"]] if part.get("type") == "array" else [part]
    sentences = [part.get("description", "")]
    rules = [rule for found in rules for rule in found.get("x-kubernetes-validations", [])]
    sentences += [f"*Refused otherwise: {rule['message']}.*" for rule in rules]
    if "enum" in part:
        sentences.append("One of " + ", ".join(f"`{value}`" for value in part["enum"]) + ".")
    if "minimum" in part:
        sentences.append(f"{part['minimum']} to {part['maximum']}.")
    default = f"`{part['default']}`" if part.get("default") not in (None, "", {}) else ""
    if required and not path.startswith("status") and path != "spec":
        default = "required"
    text = " ".join(" ".join(sentence.split()) for sentence in sentences if sentence).replace("|", "\\|")
    return f"| `{path}` | {_type(part)} | {default} | {text} |"


def _type(part: Json) -> str:
    if part.get("type") == "array":
        return f"list of {_type(part['items'])}"
    if part.get("type") == "object" and isinstance(part.get("additionalProperties"), dict):
        return f"map to {_type(part['additionalProperties'])}"
    if part.get("x-kubernetes-preserve-unknown-fields"):
        return "boolean, number, string or list of numbers"
    return "quantity" if part.get("x-kubernetes-int-or-string") else str(part.get("type"))
