"""POST act on a real gateway: encodings, terms, typed errors, the document's own examples."""

from __future__ import annotations

import json
import math
import socket
import threading

import httpx
import msgspec
import numpy as np
import pytest
from taktline_protocol import ErrorCode, Image
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode

MEDIA = list(MediaType)


@pytest.mark.parametrize("media", MEDIA)
@pytest.mark.parametrize("accept", [None, *MEDIA])
def test_chunk_in_the_encoding_asked_for(shared_stack, media, accept):
    sent = shared_stack.observation()
    headers = {"content-type": media.value, "x-request-id": "robot-req-1"}
    headers["accept"] = "*/*" if accept is None else accept.value
    answer = shared_stack.http.post(
        f"{shared_stack.url}/v1/policies/scripted/act", content=encode(sent, media), headers=headers
    )
    expected = accept or media
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == expected.value
    assert answer.headers["x-request-id"] == "robot-req-1"
    chunk = decode_chunk(answer.content, expected)
    assert chunk.request_id == "robot-req-1"
    assert (chunk.robot_id, chunk.seq, chunk.policy, chunk.revision) == ("arm", sent.seq, "scripted", "r1")
    assert np.all(chunk.actions.to_numpy() == np.full((10, 6), sent.seq))
    assert chunk.captured_at == sent.captured_at
    assert chunk.valid_until == pytest.approx(sent.captured_at + 10 * 0.05)


def test_terms_sum_to_the_critical_path(shared_stack):
    sent = shared_stack.observation(actuate_ms=3.0)
    status, chunk = shared_stack.act(sent)
    assert status == 200
    times = chunk.timings
    assert times.observe_ms == pytest.approx(2.0)
    assert times.actuate_ms == 3.0
    assert times.inference_ms > 9.0, "the scripted worker sleeps 10 ms"
    assert min(times.queue_ms, times.transfer_ms) >= 0.0
    budget_from_capture = sent.budget_ms + times.observe_ms
    assert chunk.margin_ms == pytest.approx(budget_from_capture - times.critical_ms, abs=1e-6)


BAD = {
    "state NaN": ({"state": [math.nan] * 6}, ErrorCode.STATE_INVALID),
    "state short": ({"state": [0.0] * 5}, ErrorCode.STATE_INVALID),
    "camera missing": ({"images": {"front": Image("raw", bytes(3), (1, 1, 3))}}, ErrorCode.CAMERA_MISSING),
    "image of 0 bytes": (
        {"images": {"front": Image("jpeg", b""), "wrist": Image("jpeg", b"")}},
        ErrorCode.IMAGE_CORRUPT,
    ),
    "budget spent": ({"budget_ms": 0.0}, ErrorCode.DEADLINE_EXPIRED),
    "budget negative": ({"budget_ms": -5.0}, ErrorCode.BUDGET_INVALID),
    "instruction empty": ({"instruction": ""}, ErrorCode.INSTRUCTION_INVALID),
    "instruction long": ({"instruction": "x" * 10_000}, ErrorCode.INSTRUCTION_INVALID),
    "the worker refuses the item": ({"instruction": "item-error"}, ErrorCode.IMAGE_CORRUPT),
    "the worker returns NaN": ({"instruction": "nan"}, ErrorCode.WORKER_FAILED),
    "unreachable": ({"budget_ms": 5.0}, ErrorCode.DEADLINE_UNREACHABLE),
}


# JSON cannot say NaN at all.
BAD_IN_MEDIA = [(name, media) for name in BAD for media in MEDIA if (name, media) != ("state NaN", MediaType.JSON)]


@pytest.mark.parametrize(("name", "media"), BAD_IN_MEDIA)
def test_bad_observation(shared_stack, name, media):
    changes, code = BAD[name]
    before = shared_stack.metric("taktline_requests_total", code=code.value)
    status, error = shared_stack.post(encode(shared_stack.observation(**changes), media), media.value)
    assert (status, error.code) == (code_status(code), code.value)
    assert error.message
    assert error.next_step
    assert error.request_id
    assert shared_stack.metric("taktline_requests_total", code=code.value) == before + 1
    assert shared_stack.act()[0] == 200, "a good request right after succeeds"


def code_status(code):
    from taktline_protocol.errors import HTTP_STATUS

    return HTTP_STATUS[code]


def test_a_bad_member_does_not_fail_its_batch(shared_stack):
    outcomes = {}

    def send(robot, instruction):
        outcomes[robot] = shared_stack.act(robot=robot, instruction=instruction)

    threads = [threading.Thread(target=send, args=(f"n{n}", "item-error" if n == 3 else "slow 30")) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {robot: status for robot, (status, _) in outcomes.items()} == {
        f"n{n}": 422 if n == 3 else 200 for n in range(6)
    }


def test_unknown_policy(shared_stack):
    status, error = shared_stack.post(encode(shared_stack.observation(), MediaType.JSON), "application/json", "nope")
    assert (status, error.code) == (404, "unknown_policy")
    assert "scripted" in error.message
    assert shared_stack.metric("taktline_requests_total", policy="nope") == 0, "a client's invention is no label"


def test_wrong_content_type(shared_stack):
    answer = shared_stack.http.post(
        f"{shared_stack.url}/v1/policies/scripted/act", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 415
    assert answer.json()["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", ["/nothing", "/v1/policies/scripted/act/", "/v1"])
def test_unknown_path(shared_stack, path):
    answer = shared_stack.http.get(f"{shared_stack.url}{path}", headers={"x-request-id": "abc"})
    assert (answer.status_code, answer.json()["code"], answer.json()["request_id"]) == (404, "not_found", "abc")
    assert answer.headers["x-request-id"] == "abc"


def test_wrong_method(shared_stack):
    answer = shared_stack.http.get(f"{shared_stack.url}/v1/policies/scripted/act")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_may_be_asked_for_their_head_only(shared_stack, path):
    asked = {method: shared_stack.http.request(method, shared_stack.url + path) for method in ("GET", "HEAD")}
    assert [answer.status_code for answer in asked.values()] == [200, 200]
    assert asked["HEAD"].content == b""
    assert asked["HEAD"].headers["content-length"] == asked["GET"].headers["content-length"]


def test_declared_body_over_the_limit_is_refused_unread(shared_stack):
    host, port = shared_stack.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/policies/scripted/act HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer
    assert shared_stack.act()[0] == 200


def test_chunked_body_over_the_limit_is_cut_off(shared_stack):
    sent = 0

    def endless():
        nonlocal sent
        for _ in range(64):
            sent += 1 << 20
            yield bytes(1 << 20)

    try:
        answer = shared_stack.http.post(
            f"{shared_stack.url}/v1/policies/scripted/act",
            content=endless(),
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the gateway had closed the connection before all was sent, as it should
    assert sent < 64 << 20
    assert shared_stack.act()[0] == 200


def test_invalid_utf8(shared_stack):
    good = encode(shared_stack.observation(instruction="reach"), MediaType.JSON)
    status, error = shared_stack.post(good.replace(b"reach", b"re\xff\xfeh"), "application/json")
    assert (status, error.code) == (400, "invalid_body")
    assert "UTF-8" in error.message


def test_two_robots_with_one_id(shared_stack):
    assert shared_stack.act(robot="twin", session_id="one")[0] == 200
    status, error = shared_stack.act(robot="twin", session_id="two")
    assert (status, error.code) == (409, "robot_conflict")
    assert 0 < error.retry_after_ms <= 5000
    assert shared_stack.act(robot="twin", session_id="one")[0] == 200


def test_an_overtaken_observation_is_superseded(shared_stack):
    old, new = shared_stack.observation(robot="racer"), shared_stack.observation(robot="racer")
    assert shared_stack.act(new)[0] == 200
    status, error = shared_stack.act(old)
    assert (status, error.code) == (409, "superseded")


def test_the_documents_example_really_works(shared_stack):
    document = shared_stack.http.get(f"{shared_stack.url}/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    act = document["paths"]["/v1/policies/{policy}/act"]["post"]
    examples = act["requestBody"]["content"]["application/json"]["examples"]
    assert set(examples) == {"scripted"}
    for policy, example in examples.items():
        body = json.dumps(example["value"]).encode()
        status, chunk = shared_stack.post(body, "application/json", policy)
        assert status == 200
        shown = act["responses"]["200"]["content"]["application/json"]["examples"][policy]["value"]
        assert set(shown) == set(msgspec.to_builtins(chunk))
        assert shown["actions"]["shape"] == list(chunk.actions.shape)
        assert decode_chunk(json.dumps(shown).encode(), MediaType.JSON)


def test_every_documented_error_status_is_typed(shared_stack):
    document = shared_stack.http.get(f"{shared_stack.url}/openapi.json").json()
    responses = document["paths"]["/v1/policies/{policy}/act"]["post"]["responses"]
    named = {
        name
        for status, response in responses.items()
        if status != "200"
        for name in response["description"].split("`")[1::2]
    }
    elsewhere = {"checkpoint_invalid", "config_invalid", "gateway_unreachable"}
    elsewhere |= {"disk_full"} | {f"model_{end}" for end in ("unreachable", "denied", "absent", "mismatch", "unsafe")}
    stream_only = {"keyframe_needed", "cancelled", "stream_version", "stream_idle", "slow_reader"}
    assert named == {code.value for code in ErrorCode} - elsewhere - stream_only


def test_policies_in_both_encodings(shared_stack):
    as_json = shared_stack.http.get(f"{shared_stack.url}/v1/policies").json()["policies"]
    packed = shared_stack.http.get(f"{shared_stack.url}/v1/policies", headers={"accept": "application/msgpack"})
    assert msgspec.msgpack.decode(packed.content)["policies"] == as_json
    assert as_json[0]["cameras"] == ["front", "wrist"]
    assert as_json[0]["ready"] is True
    missing = shared_stack.http.get(f"{shared_stack.url}/v1/policies/nope", headers={"accept": "application/msgpack"})
    assert decode_error(missing.content, MediaType.MSGPACK).code == "unknown_policy"


def test_a_strange_request_id_is_replaced(shared_stack):
    answer = shared_stack.http.get(f"{shared_stack.url}/v1/policies", headers={"x-request-id": "a" * 65})
    assert answer.headers["x-request-id"] != "a" * 65


def test_metrics_have_the_shared_names_and_no_robots(shared_stack):
    shared_stack.act(robot="label-check")
    text = shared_stack.http.get(f"{shared_stack.url}/metrics").text
    from taktline_protocol import metrics

    for metric in metrics.GATEWAY_METRICS:
        assert metric.name in text
    assert 'le="-5.0"' in text, "the margin has negative buckets"
    assert "label-check" not in text
    for term in metrics.TERMS:
        assert shared_stack.metric("taktline_latency_term_ms_count", term=term) == shared_stack.metric(
            "taktline_control_margin_ms_count"
        )
