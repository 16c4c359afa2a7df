"""The Open Inference Protocol v2 over REST: the published Triton client, plain HTTP, and hostile requests."""

from __future__ import annotations

import base64
import contextlib
import json

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway.compat.kserve_tensors import decode_request
from taktline_protocol import TaktlineError
from taktline_protocol.limits import Limits

from .conftest import client_environment, free_port, until

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR\0\0\0\x01\0\0\0\x01\x08\x02\0\0\0" + b"\0" * 8 + b"\0\0\0\0IEND\xaeB`\x82"


@pytest.fixture(scope="module")
def served(shared_fleet):
    shared_fleet.route("libero", shared_fleet.worker("libero"), control_budget_ms=5000)
    shared_fleet.start("--max-body-mib", "4")
    shared_fleet.wait_ready("libero")
    return shared_fleet


def request(**changes):
    body = {
        "id": "42",
        "inputs": [
            {"name": "image", "datatype": "UINT8", "shape": [1, 2, 3], "data": [30] * 6},
            {"name": "wrist_image", "datatype": "UINT8", "shape": [1, 2, 3], "data": [[[40] * 3] * 2]},
            {"name": "state", "datatype": "FP64", "shape": [1, 8], "data": [[0.5, 1, 2, 3, 4, 5, 6, 7]]},
            {"name": "instruction", "datatype": "BYTES", "shape": [1], "data": ["go"]},
        ],
    }
    return body | changes


def infer(fleet, body, model="libero", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{fleet.url}/v2/models/{model}/infer", content=content, headers=headers, timeout=30)


def test_triton_client(served):
    client = client_environment("tritonclient", "tritonclient[http]==2.73.0")
    got = client.run("triton_http.py", "infer", served.url.removeprefix("http://"), "libero")
    assert (got["live"], got["ready"], got["model_ready"], got["absent_ready"]) == (True, True, True, False)
    assert got["server"]["extensions"] == ["binary_tensor_data"]
    assert got["metadata"]["versions"] == ["m1"]
    assert [entry["name"] for entry in got["metadata"]["inputs"]] == ["image", "wrist_image", "state", "instruction"]
    assert got["metadata"]["outputs"] == [{"name": "actions", "datatype": "FP32", "shape": [10, 16]}]
    for answer in got["answers"]:
        assert (answer["shape"], answer["dtype"]) == ([10, 16], "float32")
        assert answer["first"][:11] == [*range(8), 30, 40, 2]
    assert got["response"]["id"] == "r-7"
    codes = [("422", "camera_unknown"), ("502", "worker_failed"), ("422", "instruction"), ("404", "unknown_policy")]
    for (status, code), said in zip(codes, got["said"], strict=True):
        assert said[0] == status
        assert said[1].startswith(code)


def test_plain_json(served):
    answer = infer(served, request()).json()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("libero", "m1", "42")
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("actions", "FP32", [10, 16])
    assert output["data"][:11] == [0.5, *range(1, 8), 30, 40, 2]
    assert answer["parameters"]["margin_ms"] > 0


def test_encoded_images_and_version(served):
    encoded = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(PNG).decode()]}
    body = request(inputs=[encoded, *request()["inputs"][1:]])
    answer = httpx.post(f"{served.url}/v2/models/libero/versions/m1/infer", json=body).json()
    assert answer["outputs"][0]["data"][8] == 1000 + 0x89
    refused = httpx.post(f"{served.url}/v2/models/libero/versions/m0/infer", json=body)
    assert (refused.status_code, refused.json()["code"]) == (404, "unknown_policy")


def test_binary_extension_byte_by_byte(served):
    raw = [bytes([30]) * 6, np.arange(8, dtype="<f4").tobytes(), b"\x02\0\0\0go"]
    head = request(
        parameters={"binary_data_output": True},
        inputs=[
            {"name": "image", "datatype": "UINT8", "shape": [1, 2, 3], "parameters": {"binary_data_size": 6}},
            request()["inputs"][1],
            {"name": "state", "datatype": "FP32", "shape": [8], "parameters": {"binary_data_size": 32}},
            {"name": "instruction", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
        ],
    )
    text = json.dumps(head).encode()
    answer = infer(served, text + b"".join(raw), **{"Inference-Header-Content-Length": str(len(text))})
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["Inference-Header-Content-Length"])
    described = json.loads(answer.content[:length])
    assert described["outputs"][0]["parameters"]["binary_data_size"] == 10 * 16 * 4
    actions = np.frombuffer(answer.content[length:], "<f4").reshape(10, 16)
    assert actions[0, :11].tolist() == [*range(8), 30, 40, 2]


def test_health_follows_the_worker_and_the_gateway(fleet):
    address = f"127.0.0.1:{free_port()}"
    fleet.route("libero", address)
    fleet.start()
    url = f"{fleet.url}/v2/models/libero/ready"
    cold = httpx.get(url)
    assert (cold.status_code, cold.json()) == (503, {"name": "libero", "ready": False})
    assert infer(fleet, request()).status_code == 503
    fleet.worker("libero", address)
    until(lambda: httpx.get(url).status_code == 200, "the model being ready")
    fleet.gateway.terminate()
    until(lambda: httpx.get(f"{fleet.url}/v2/health/ready").status_code == 503, "the gateway draining")


def tensor(**changes):
    return request(inputs=[{"name": "image", "datatype": "UINT8", "shape": [1, 2, 3], "data": [1] * 6} | changes])


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"", {}),
        (b"[]", {}),
        (b"\xff", {}),
        (b"{" * 5000, {}),
        (request(inputs="x"), {}),
        (request(inputs=[*request()["inputs"], request()["inputs"][0]]), {}),
        (tensor(data=None), {}),
        (tensor(data=[1] * 5), {}),
        (tensor(data=[256] + [1] * 5), {}),
        (tensor(data=[-1] + [1] * 5), {}),
        (tensor(data=[1.5] + [1] * 5), {}),
        (tensor(data=["1"] * 6), {}),
        (tensor(data=[True] * 6), {}),
        (tensor(data=[10**30] * 6), {}),
        (tensor(data=[[[[[[[[1]]]]]]]]), {}),
        (tensor(shape=[-1, 2, 3]), {}),
        (tensor(shape=[2**31]), {}),
        (tensor(shape=[2**30, 2**30, 2**30], data=[]), {}),
        (tensor(datatype="BF16"), {}),
        (tensor(datatype="BYTES", data=["a"] * 6), {}),
        (tensor(datatype="BYTES", shape=[1], data=["iVBORw0KGgo!"]), {}),
        (tensor(parameters={"binary_data_size": 6}), {}),
        (tensor(parameters={"binary_data_size": -6}), {}),
        (tensor(parameters={"binary_data_size": "6"}), {}),
        (request(parameters={"seed": -1}), {}),
        (json.dumps(request()).encode() + b"trailing", {}),
        (json.dumps(request()).encode(), {"Inference-Header-Content-Length": "99999"}),
        (json.dumps(request()).encode(), {"Inference-Header-Content-Length": "0"}),
        (json.dumps(request()).encode(), {"Inference-Header-Content-Length": "x"}),
        (b"[" + b"0," * 600_000 + b"0]", {}),
    ],
    ids=range(30),
)
def test_bad_requests_get_a_typed_error_and_a_good_one_after_succeeds(served, body, headers):
    refused = infer(served, body, **headers)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_body")
    assert refused.json()["error"].startswith("invalid_body: ")
    assert infer(served, request()).status_code == 200


@pytest.mark.parametrize(
    ("changes", "headers", "code"),
    [
        ({"parameters": {"budget_ms": 0}}, {}, "deadline_expired"),
        ({"parameters": {"budget_ms": -5}}, {}, "budget_invalid"),
        ({"parameters": {"budget_ms": "soon"}}, {}, "budget_invalid"),
        ({"inputs": request()["inputs"][:2] + request()["inputs"][3:]}, {}, "state_invalid"),
        ({}, {"Content-Encoding": "gzip"}, "unsupported_media_type"),
    ],
)
def test_other_refusals(served, changes, headers, code):
    refused = infer(served, request(**changes), **headers)
    assert refused.json()["code"] == code
    assert refused.status_code >= 400


def test_a_body_over_the_limit(served):
    refused = infer(served, bytes(5 * 1024 * 1024))
    assert (refused.status_code, refused.json()["code"]) == (413, "body_too_large")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["image", "state"]) | JSON,
        "datatype": st.sampled_from(["UINT8", "FP32", "BOOL", "INT64", "BYTES", "FP16"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=4) | JSON,
        "data": st.lists(st.integers(0, 255), max_size=6) | JSON,
        "parameters": st.dictionaries(st.sampled_from(["binary_data_size"]), st.integers(-1, 8)) | JSON,
    },
)


@given(st.lists(TENSOR, max_size=3) | JSON, st.binary(max_size=24), st.none() | st.integers(-1, 400), st.booleans())
@settings(deadline=None, max_examples=600)
def test_fuzz(inputs, tail, header_length, exact):
    head = msgspec.json.encode({"inputs": inputs})
    with contextlib.suppress(TaktlineError):
        decode_request(head + tail, len(head) if exact else header_length, Limits())
