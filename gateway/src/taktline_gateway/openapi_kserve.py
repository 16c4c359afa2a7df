"""The Open Inference Protocol's paths in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from taktline_protocol.errors import HTTP_STATUS, ErrorCode
from taktline_protocol.messages import PolicyInfo

from taktline_gateway.compat.kserve_tensors import InferRequest

_JSON = "application/json"
_BINARY = "application/octet-stream"
_REF = "#/components/schemas/{name}"
HEADER_LENGTH = "Inference-Header-Content-Length"


def kserve_schemas() -> dict[str, Any]:
    """Schemas of the protocol's messages."""
    _, found = msgspec.json.schema_components((InferRequest,), ref_template=_REF)
    output = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
            "datatype": {"type": "string"},
            "parameters": {"type": "object"},
            "data": {"type": "array", "items": {"type": "number"}},
        },
    }
    return {
        **found,
        "InferOutput": output,
        "InferResponse": {
            "type": "object",
            "required": ["model_name", "outputs"],
            "properties": {
                "model_name": {"type": "string"},
                "model_version": {"type": "string"},
                "id": {"type": "string"},
                "parameters": {"type": "object"},
                "outputs": {"type": "array", "items": _ref("InferOutput")},
            },
        },
        "InferError": {
            "type": "object",
            "required": ["error", "code", "next_step"],
            "properties": {name: {"type": "string"} for name in ("error", "code", "next_step", "safe_action")}
            | {"buffer_ms": {"type": "number"}},
        },
        "ModelMetadata": {
            "type": "object",
            "required": ["name", "versions", "platform", "inputs", "outputs"],
            "properties": {
                "name": {"type": "string"},
                "versions": {"type": "array", "items": {"type": "string"}},
                "platform": {"type": "string"},
                "inputs": {"type": "array", "items": {"type": "object"}},
                "outputs": {"type": "array", "items": {"type": "object"}},
            },
        },
        "ServerMetadata": {
            "type": "object",
            "required": ["name", "version", "extensions"],
            "properties": {
                "name": {"type": "string"},
                "version": {"type": "string"},
                "extensions": {"type": "array", "items": {"type": "string"}},
            },
        },
    }


def kserve_paths(policies: Sequence[PolicyInfo], infer_codes: Sequence[ErrorCode]) -> dict[str, Any]:
    """Paths of the protocol; `infer_codes` are those that a request for a chunk may end with."""
    live = {"type": "object", "required": ["live"], "properties": {"live": {"type": "boolean"}}}
    ready = {"type": "object", "required": ["ready"], "properties": {"ready": {"type": "boolean"}}}
    paths: dict[str, Any] = {
        "/v2": {"get": _get("About this server", "serverMetadata", _ref("ServerMetadata"))},
        "/v2/health/live": {"get": _get("The process is alive", "serverLive", live, probe=True)},
        "/v2/health/ready": {"get": _get("New requests are taken", "serverReady", ready, unready=True, probe=True)},
    }
    for suffix, name, parameters in (
        ("", "", [_model(policies)]),
        ("/versions/{version}", "Version", [_model(policies), _version(policies)]),
    ):
        base = f"/v2/models/{{model}}{suffix}"
        about = _get("What a policy reads and returns", f"model{name}Metadata", _ref("ModelMetadata"), model=True)
        state = _get("A worker of the policy is ready", f"model{name}Ready", ready, unready=True, model=True)
        paths[base] = {"get": {**about, "parameters": parameters}}
        paths[f"{base}/ready"] = {"get": {**state, "parameters": parameters}}
        paths[f"{base}/infer"] = {"post": {**_infer(name, infer_codes), "parameters": [*parameters, _head_length()]}}
    return paths


def _infer(name: str, codes: Sequence[ErrorCode]) -> dict[str, Any]:
    return {
        "summary": "Ask a policy for the next action chunk, in the Open Inference Protocol",
        "operationId": f"model{name}Infer",
        "requestBody": {
            "required": True,
            "description": f"With {HEADER_LENGTH} the tensors' bytes follow that many bytes of JSON.",
            "content": {_JSON: {"schema": _ref("InferRequest")}},
        },
        "responses": {
            "200": {
                "description": "the actions",
                "content": {_JSON: {"schema": _ref("InferResponse")}, _BINARY: {"schema": {}}},
            },
            **_errors(codes),
        },
    }


def _get(
    summary: str,
    operation: str,
    schema: dict[str, Any],
    *,
    unready: bool = False,
    model: bool = False,
    probe: bool = False,
) -> dict[str, Any]:
    content = {_JSON: {"schema": schema}}
    responses: dict[str, Any] = {"200": {"description": summary, "content": content}}
    if unready:
        responses["503"] = {"description": "not now", "content": content}
    if model:
        responses |= _errors([ErrorCode.UNKNOWN_POLICY])
    if not probe:
        responses |= {
            str(status): {"description": "no key, or no right", "content": {_JSON: {"schema": _ref("ErrorBody")}}}
            for status in (401, 403, 429)
        }
    found: dict[str, Any] = {"summary": summary, "operationId": operation, "responses": responses}
    return found | {"security": []} if probe else found


def _errors(codes: Sequence[ErrorCode]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(HTTP_STATUS[code], []).append(code.value)
    return {
        str(status): {
            "description": " or ".join(f"`{name}`" for name in names),
            "content": {_JSON: {"schema": _ref("InferError")}},
        }
        for status, names in sorted(by_status.items())
    }


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _model(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    return _path_parameter("model", "name of the PolicyDeployment", {info.policy for info in policies})


def _version(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    return _path_parameter("version", "model revision", {info.revision for info in policies if info.revision})


def _path_parameter(name: str, description: str, examples: set[str]) -> dict[str, Any]:
    parameter: dict[str, Any] = {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "minLength": 1},
    }
    if examples:
        parameter["examples"] = {example: {"value": example} for example in sorted(examples)}
    return parameter


def _head_length() -> dict[str, Any]:
    return {
        "name": HEADER_LENGTH,
        "in": "header",
        "required": False,
        "description": "bytes of JSON before the tensors' bytes; absent where everything is JSON",
        "schema": {"type": "integer", "minimum": 0},
    }
