"""The OpenAPI document, from the message schema itself, with example requests that the policies really answer."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from taktline_protocol.codecs import MediaType
from taktline_protocol.errors import HTTP_STATUS, ErrorCode
from taktline_protocol.measurements import GatewayMeasurements
from taktline_protocol.messages import (
    ActionChunk,
    AdmissionAnswer,
    AdmissionQuestion,
    ErrorBody,
    Observation,
    PolicyInfo,
    PolicyList,
)

from taktline_gateway.admission_endpoint import CODES, EXAMPLE
from taktline_gateway.openapi_kserve import kserve_paths, kserve_schemas
from taktline_gateway.tracing.timeline import KEPT

EXAMPLE_SIDE = 32
_REF = "#/components/schemas/{name}"
# Codes that a request to act can end with; the rest belong to the operator's and the worker's own side.
_NOT_FROM_ACT = (ErrorCode.CHECKPOINT_INVALID, ErrorCode.CONFIG_INVALID, ErrorCode.GATEWAY_UNREACHABLE)
_DELIVERY_CODES = (
    ErrorCode.MODEL_UNREACHABLE,
    ErrorCode.MODEL_DENIED,
    ErrorCode.MODEL_ABSENT,
    ErrorCode.MODEL_MISMATCH,
    ErrorCode.MODEL_UNSAFE,
    ErrorCode.DISK_FULL,
)
_ACCESS_CODES = (ErrorCode.UNAUTHENTICATED, ErrorCode.FORBIDDEN, ErrorCode.RATE_LIMITED)
_STREAM_CODES = (
    ErrorCode.KEYFRAME_NEEDED,
    ErrorCode.CANCELLED,
    ErrorCode.STREAM_VERSION,
    ErrorCode.STREAM_IDLE,
    ErrorCode.SLOW_READER,
)
_ACT_CODES = [code for code in ErrorCode if code not in _NOT_FROM_ACT + _STREAM_CODES + _DELIVERY_CODES]


def document(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    """OpenAPI 3.1 of the gateway that serves `policies`."""
    schemas, components = msgspec.json.schema_components(
        (
            *(Observation, ActionChunk, ErrorBody, PolicyInfo, PolicyList, AdmissionQuestion, AdmissionAnswer),
            GatewayMeasurements,
        ),
        ref_template=_REF,
    )
    del schemas
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Taktline gateway",
            "version": version("taktline-gateway"),
            "description": "Observations in, action chunks out, before the hand-off deadline.",
        },
        "paths": {
            "/v1/policies/{policy}/act": {"post": _act(policies)},
            "/v1/policies/{policy}/admission": {"post": _admission(policies)},
            "/v1/policies": {"get": _get("List the policies served here", "listPolicies", "PolicyList")},
            "/v1/policies/{policy}": {
                "get": {
                    **_get("What a client must know to speak to a policy", "getPolicy", "PolicyInfo"),
                    "parameters": [_policy_parameter(policies)],
                }
            },
            "/v1/policies/{policy}/timeline": {"get": _timeline(policies)},
            "/healthz": {"get": _text("The process is alive", "healthz", probe=True)},
            "/readyz": {"get": _text("New requests are taken", "readyz", unready=True, probe=True)},
            "/metrics": {"get": _text("Prometheus metrics", "metrics")},
            "/measurements": {"get": _measurements()},
            "/openapi.json": {"get": _document()},
            **kserve_paths(policies, _ACT_CODES),
        },
        "components": {
            "schemas": {**components, **kserve_schemas()},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "an API key, or an access token (JWT)"}
            },
        },
        # Either of the two: a gateway without an access file asks for nothing.
        "security": [{"key": []}, {}],
    }


def example_observation(info: PolicyInfo) -> dict[str, Any]:
    """A JSON observation that fits the policy: small grey images, a zero state, a generous budget."""
    image = base64.b64encode(grey_png(EXAMPLE_SIDE)).decode()
    return {
        "robot_id": "example-arm",
        "session_id": "example-session",
        "seq": 1,
        "captured_at": 12.5,
        "sent_at": 12.51,
        "budget_ms": 60_000.0,
        "images": {camera: {"encoding": "png", "data": image} for camera in info.cameras},
        "state": [0.0] * info.state_dim,
        "instruction": "reach the red block",
    }


def grey_png(side: int) -> bytes:
    """A grey RGB PNG of `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\x00" + b"\x80" * (3 * side)) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _act(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    known = [info for info in policies if info.cameras and info.state_dim]
    examples = {
        info.policy: {"summary": f"one observation for {info.policy}", "value": example_observation(info)}
        for info in known
    }
    content: dict[str, Any] = {
        MediaType.JSON.value: {"schema": _schema("Observation")},
        MediaType.MSGPACK.value: {"schema": _schema("Observation")},
    }
    if examples:
        content[MediaType.JSON.value]["examples"] = examples
    chunk = _both("ActionChunk")
    if known:
        chunk[MediaType.JSON.value]["examples"] = {known[0].policy: {"value": _example_chunk(known[0])}}
    return {
        "summary": "Ask a policy for the next action chunk",
        "operationId": "act",
        "parameters": [_policy_parameter(policies), _request_id_parameter()],
        "requestBody": {
            "required": True,
            "description": "JSON carries bytes as base64; msgpack carries them raw. The answer comes in the request's"
            " encoding unless Accept names the other.",
            "content": content,
        },
        "responses": {
            "200": {"description": "the action chunk, with its five latency terms and margin", "content": chunk},
            **_errors(_ACT_CODES),
        },
    }


def _admission(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    content: dict[str, Any] = _both("AdmissionQuestion")
    content[MediaType.JSON.value]["examples"] = {"arm": {"summary": "two observations a second", "value": EXAMPLE}}
    return {
        "summary": "Ask whether one more robot can be served in time",
        "operationId": "admission",
        "parameters": [_policy_parameter(policies), _request_id_parameter()],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {
                "description": "whether there is room, and what it would take",
                "content": _both("AdmissionAnswer"),
            },
            **_errors(CODES),
        },
    }


def _example_chunk(info: PolicyInfo) -> dict[str, Any]:
    horizon, width = max(1, info.horizon), max(1, info.action_dim)
    dt_s = info.dt_s if math.isfinite(info.dt_s) else 0.0
    return {
        "request_id": "5f1d0c2b9a7e4d31",
        "policy": info.policy,
        "revision": info.revision,
        "robot_id": "example-arm",
        "seq": 1,
        "actions": {
            "dtype": "float32",
            "shape": [horizon, width],
            "data": base64.b64encode(bytes(4 * horizon * width)).decode(),
        },
        "dt_s": dt_s,
        "captured_at": 12.5,
        "valid_until": 12.5 + horizon * dt_s,
        "timings": {
            "observe_ms": 10.0,
            "transfer_ms": 1.5,
            "queue_ms": 0.2,
            "inference_ms": 22.6,
            "actuate_ms": 0.0,
        },
        "margin_ms": 59_975.7,
        "batch_size": 1,
        "worker": "10.0.0.7:50051",
    }


def _get(summary: str, operation: str, schema: str) -> dict[str, Any]:
    errors = _errors([*([ErrorCode.UNKNOWN_POLICY] if schema == "PolicyInfo" else []), *_ACCESS_CODES])
    return {
        "summary": summary,
        "operationId": operation,
        "responses": {"200": {"description": summary, "content": _both(schema)}, **errors},
    }


def _text(summary: str, operation: str, *, unready: bool = False, probe: bool = False) -> dict[str, Any]:
    responses: dict[str, Any] = {
        "200": {"description": summary, "content": {"text/plain": {"schema": {"type": "string"}}}}
    }
    responses |= _errors([*([ErrorCode.DRAINING] if unready else []), *([] if probe else _ACCESS_CODES)])
    found: dict[str, Any] = {"summary": summary, "operationId": operation, "responses": responses}
    return found | {"security": []} if probe else found


def _timeline(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    content = {MediaType.JSON.value: {"schema": {"type": "object", "required": ["traceEvents"]}}}
    summary = "The last requests as a Chrome trace, for Perfetto"
    last = {"type": "integer", "minimum": 1, "maximum": KEPT}
    return {
        "summary": summary,
        "operationId": "timeline",
        "parameters": [_policy_parameter(policies), {"name": "last", "in": "query", "schema": last}],
        "responses": {
            "200": {"description": summary, "content": content},
            **_errors([ErrorCode.INVALID_BODY, ErrorCode.UNKNOWN_POLICY, *_ACCESS_CODES]),
        },
    }


def _measurements() -> dict[str, Any]:
    summary = "What robots ask for and what becomes of it, by policy; the operator scales by this"
    content = {MediaType.JSON.value: {"schema": _schema("GatewayMeasurements")}}
    responses = {"200": {"description": summary, "content": content}, **_errors(_ACCESS_CODES)}
    return {"summary": summary, "operationId": "measurements", "responses": responses}


def _document() -> dict[str, Any]:
    content = {MediaType.JSON.value: {"schema": {"type": "object", "required": ["openapi", "info", "paths"]}}}
    summary = "This document, with examples for the policies that the caller may see"
    responses = {"200": {"description": summary, "content": content}, **_errors(_ACCESS_CODES)}
    return {"summary": summary, "operationId": "openapi", "responses": responses}


def _errors(codes: Sequence[ErrorCode]) -> dict[str, Any]:
    by_status: dict[int, list[str]] = {}
    for code in codes:
        by_status.setdefault(HTTP_STATUS[code], []).append(code.value)
    return {
        str(status): {"description": " or ".join(f"`{name}`" for name in names), "content": _both("ErrorBody")}
        for status, names in sorted(by_status.items())
    }


def _both(name: str) -> dict[str, Any]:
    return {media.value: {"schema": _schema(name)} for media in MediaType}


def _schema(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _policy_parameter(policies: Sequence[PolicyInfo]) -> dict[str, Any]:
    parameter: dict[str, Any] = {
        "name": "policy",
        "in": "path",
        "required": True,
        "description": "name of the PolicyDeployment",
        "schema": {"type": "string", "minLength": 1},
    }
    if policies:
        parameter["examples"] = {info.policy: {"value": info.policy} for info in policies}
    return parameter


def _request_id_parameter() -> dict[str, Any]:
    return {
        "name": "X-Request-Id",
        "in": "header",
        "required": False,
        "description": "echoed in the answer and the logs; made up where absent, over 64 characters or not plain",
        "schema": {"type": "string"},
    }
