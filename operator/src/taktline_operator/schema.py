"""Checks a PolicyDeployment against the CRD as the API server would: types, bounds, defaults, list keys, CEL rules."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_operator import cel

GROUP = "taktline.dev"
VERSION = "v1alpha1"
KIND = "PolicyDeployment"
PLURAL = "policydeployments"

Json = dict[str, Any]

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def crd_text() -> str:
    """The CustomResourceDefinition as YAML text."""
    return resources.files("taktline_operator").joinpath("policydeployments.yaml").read_text()


@lru_cache(maxsize=1)
def crd() -> Json:
    """The CustomResourceDefinition, parsed. Callers must not change it."""
    parsed: Json = yaml.safe_load(crd_text())
    return parsed


def object_schema() -> Json:
    """The OpenAPI schema of a whole PolicyDeployment."""
    schema: Json = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def validated(body: Json) -> Json:
    """Return a copy of `body` with the CRD's defaults filled in.

    Raises:
        TaktlineError: CONFIG_INVALID, its message listing every problem with the path of its field.
    """
    if body.get("apiVersion") != f"{GROUP}/{VERSION}" or body.get("kind") != KIND:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"this is {body.get('apiVersion')} {body.get('kind')}, not a {GROUP}/{VERSION} {KIND}",
            f"start the file with `apiVersion: {GROUP}/{VERSION}` and `kind: {KIND}`",
        )
    result = copy.deepcopy(body)
    metadata = result.pop("metadata", {})  # the API server owns its shape
    problems: list[str] = []
    schema = object_schema()
    properties = {name: part for name, part in schema["properties"].items() if name != "metadata"}
    _checked(result, schema | {"properties": properties, "x-kubernetes-validations": []}, "", problems)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        problems.append("metadata.name: required")
        metadata = {}
    else:
        problems += _broken_rules(schema, {"metadata": metadata}, "metadata.name")
    if problems:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"PolicyDeployment {metadata.get('name', '')!r}: " + "; ".join(problems),
            "correct the fields named above (`kubectl explain pd.spec` describes them)",
        )
    result["metadata"] = metadata
    return result


def _checked(value: Any, schema: Json, path: str, problems: list[str]) -> Any:
    """Validate `value`, fill its defaults, and append what is wrong to `problems`."""
    before = len(problems)
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            problems.append(f"{path}: must be a number or a string")
        elif "pattern" in schema and not re.search(schema["pattern"], str(value)):
            problems.append(f"{path}: {value!r} is not a quantity such as 500m, 2 or 4Gi")
        return value
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        # No structural schema can say "one of these types": the API server lets everything in, and this refuses.
        if not _is_plain(value):
            problems.append(f"{path}: must be a boolean, a number, a string or a list of numbers")
        return value
    expected: str = schema["type"]
    if not isinstance(value, _TYPES[expected]) or (isinstance(value, bool) and expected != "boolean"):
        article = "an" if expected[0] in "aeiou" else "a"
        problems.append(f"{path or 'document'}: must be {article} {expected}, not {_kind_of(value)}")
        return value
    if isinstance(value, dict):
        _check_object(value, schema, path, problems)
    elif isinstance(value, list):
        _check_array(value, schema, path, problems)
    elif isinstance(value, str):
        _check_string(value, schema, path, problems)
    elif isinstance(value, int | float):
        value = float(value) if expected == "number" else value
        if value < schema.get("minimum", value):
            problems.append(f"{path}: {value} is below the minimum {schema['minimum']}")
        if value > schema.get("maximum", value):
            problems.append(f"{path}: {value} is above the maximum {schema['maximum']}")
    if len(problems) == before:  # a rule reads only values whose shape is right, as on the API server
        problems += _broken_rules(schema, value, path)
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)
    return isinstance(value, bool | int | float | str)


def _check_object(value: Json, schema: Json, path: str, problems: list[str]) -> None:
    properties: Json = schema.get("properties", {})
    extra: Json | None = schema.get("additionalProperties")
    for name, part in properties.items():
        if "default" in part and value.get(name) is None:
            value[name] = copy.deepcopy(part["default"])
    for name in [name for name, field in value.items() if field is None]:
        del value[name]  # the API server prunes nulls of optional fields
    problems += [f"{_join(path, name)}: required" for name in schema.get("required", []) if name not in value]
    if len(value) > schema.get("maxProperties", len(value)):
        problems.append(f"{path}: more than {schema['maxProperties']} entries")
    for name in list(value):
        part = properties.get(name, extra)
        if part is None:
            known = ", ".join(sorted(properties))
            problems.append(f"{_join(path, name)}: unknown field (known: {known})")
        else:
            value[name] = _checked(value[name], part, _join(path, name), problems)


def _check_array(value: list[Any], schema: Json, path: str, problems: list[str]) -> None:
    if len(value) < schema.get("minItems", 0):
        problems.append(f"{path}: needs at least {schema['minItems']} item(s)")
    if len(value) > schema.get("maxItems", len(value)):
        problems.append(f"{path}: more than {schema['maxItems']} items")
    for index, item in enumerate(value):
        value[index] = _checked(item, schema["items"], f"{path}[{index}]", problems)
    if schema.get("x-kubernetes-list-type") == "map":
        keys = schema["x-kubernetes-list-map-keys"]
        seen: set[tuple[Any, ...]] = set()
        for index, item in enumerate(value):
            key = tuple(item.get(name) for name in keys) if isinstance(item, dict) else (index,)
            if key in seen:
                problems.append(f"{path}[{index}]: duplicate {', '.join(keys)} {', '.join(map(repr, key))}")
            seen.add(key)


def _check_string(value: str, schema: Json, path: str, problems: list[str]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"{path}: {value!r} is not one of {', '.join(schema['enum'])}")
    if len(value) < schema.get("minLength", 0):
        problems.append(f"{path}: must not be empty")
    if len(value) > schema.get("maxLength", len(value)):
        problems.append(f"{path}: longer than {schema['maxLength']} characters")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        problems.append(f"{path}: {value!r} does not match {schema['pattern']}")


def _broken_rules(schema: Json, value: Any, path: str) -> list[str]:
    rules = schema.get("x-kubernetes-validations", [])
    return [f"{path}: {rule['message']}" for rule in rules if not cel.holds(rule["rule"], value)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kind_of(value: object) -> str:
    for name, types in _TYPES.items():
        if name != "number" and isinstance(value, types) and isinstance(value, bool) == (name == "boolean"):
            return name
    return {float: "number", type(None): "null"}.get(type(value), type(value).__name__)
