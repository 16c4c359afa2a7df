"""The OpenAPI document against a real gateway: whatever schemathesis makes of it, the answer is one it describes."""

from __future__ import annotations

import math
import re
from collections import Counter

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

BOUNDED = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
DESCRIBED = [status_code_conformance, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("application/msgpack")
def as_msgpack(context, value):
    return msgspec.msgpack.encode(_in_range(value))


def _in_range(value):
    """msgpack has no integers beyond 64 bits; JSON has, and sends them in its own turn."""
    if isinstance(value, dict):
        return {key: _in_range(element) for key, element in value.items()}
    if isinstance(value, list):
        return [_in_range(element) for element in value]
    big = type(value) is int and not -(2**63) <= value < 2**64
    return math.copysign(1e300, value) if big else value


@schemathesis.deserializer("application/msgpack")
def from_msgpack(context, response):
    return msgspec.json.decode(msgspec.json.encode(msgspec.msgpack.decode(response.content)))


@pytest.fixture(scope="module")
def operations(shared_stack):
    """The operations of the document as the running gateway gives it."""
    schema = schemathesis.openapi.from_url(f"{shared_stack.url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


SERVED = {"policy": "scripted", "model": "scripted", "version": "r1"}


def answers(operation, mode, checks, *, served):
    """The statuses of the answers to all that schemathesis makes of an operation, each answer checked.

    With `served` it is asked of the policy that is served, so that what else is asked is looked at.
    """
    names = re.findall(r"{(\w+)}", operation.path)
    fixed = {"path_parameters": {name: SERVED[name] for name in names}} if served and names else {}
    seen = Counter()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode, **fixed))
    def ask(case):
        response = case.call(timeout=30)
        case.validate_response(response, checks=checks, excluded_checks=[not_a_server_error])
        assert response.status_code != 500, "what a client sends is never the gateway's own fault"
        seen[response.status_code] += 1

    ask()
    return seen


@pytest.mark.parametrize("served", [False, True], ids=["any policy", "the policy served"])
def test_every_answer_is_described(operations, served):
    for operation in operations:
        if "{" in operation.path or not served:
            assert answers(operation, GenerationMode.POSITIVE, DESCRIBED, served=served), operation.label
    assert len(operations) > 12


def test_what_breaks_the_document_is_refused_as_it_describes(operations):
    """What the schema forbids: wrong types, missing and unknown fields, values out of bounds, bodies that are none."""
    asked = Counter()
    for operation in operations:
        try:
            checks = [*DESCRIBED, negative_data_rejection]
            asked[operation.label] += answers(operation, GenerationMode.NEGATIVE, checks, served=True).total()
        except Unsatisfiable:
            assert operation.method == "get", "what takes a body can be asked wrongly"
    assert {label.rpartition("/")[2] for label in asked} == {"act", "admission", "infer", "timeline"}
    assert min(asked.values()) >= BOUNDED.max_examples // 2


def test_every_path_is_described(shared_stack):
    document = shared_stack.http.get(f"{shared_stack.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        concrete = re.sub(r"\{(policy|model)\}", "scripted", path).replace("{version}", "r1")
        for method in ("get", "post"):
            answer = shared_stack.http.request(method, shared_stack.url + concrete)
            if method in operations:
                assert answer.status_code not in (404, 405), (method, path)
            else:
                assert answer.status_code == 405, (method, path)
                assert answer.headers["allow"]
    assert {"/v2/models/{model}/infer", "/v2", "/v1/policies/{policy}/act"} <= document["paths"].keys()


def test_paths_that_do_not_exist_are_typed_errors(shared_stack):
    for path in ("/v1", "/v1/policies/", "/v1/policies/scripted/nothing", "/v2/models", "/%00", "/v1/policies/%ff"):
        answer = httpx.get(shared_stack.url + path)
        assert answer.status_code == 404, path
        assert answer.json()["code"] in ("not_found", "unknown_policy")


def test_a_guarded_gateway_says_so_in_the_document(shared_stack):
    document = shared_stack.http.get(f"{shared_stack.url}/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert document["paths"]["/healthz"]["get"]["security"] == []
    act = document["paths"]["/v1/policies/{policy}/act"]["post"]["responses"]
    assert {"401", "403", "429"} <= act.keys()
