"""Round trips of every message in both encodings, and decoders that never raise anything but a typed error."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_protocol import ActionChunk, Array, ErrorBody, ErrorCode, Image, Observation, TaktlineError, Timings
from taktline_protocol.codecs import (
    MediaType,
    accepted_media_type,
    decode_chunk,
    decode_error,
    decode_observation,
    decode_policies,
    decode_policy,
    encode,
    error_body,
    error_from_body,
    media_type,
)
from taktline_protocol.errors import HTTP_STATUS
from taktline_protocol.messages import BucketTime, PolicyInfo, PolicyList

MEDIA = list(MediaType)
names = st.text(min_size=1, max_size=20).filter(lambda text: text.isprintable())
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
positive = st.floats(min_value=0.001, max_value=1e5)


@st.composite
def raw_images(draw):
    height, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return Image("raw", draw(st.binary(min_size=3 * height * width, max_size=3 * height * width)), (height, width, 3))


@st.composite
def observations(draw):
    captured = draw(st.floats(min_value=0, max_value=1e9))
    values = draw(st.lists(finite, min_size=1, max_size=12))
    state = values if draw(st.booleans()) else Array.from_numpy(np.array(values, dtype=np.float64))
    return Observation(
        robot_id=draw(names),
        session_id=draw(st.text(max_size=10)),
        seq=draw(st.integers(0, 2**62)),
        captured_at=captured,
        sent_at=draw(st.none() | st.floats(min_value=captured, max_value=captured + 599.0)),
        budget_ms=draw(positive),
        images=draw(st.dictionaries(names, raw_images(), max_size=4)),
        state=state,
        instruction=draw(st.text(min_size=1, max_size=80).filter(lambda text: text.strip())),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


@st.composite
def chunks(draw):
    rows, width = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    actions = np.array(
        draw(st.lists(st.floats(width=32), min_size=rows * width, max_size=rows * width)), dtype=np.float32
    )
    terms = [draw(finite) for _ in range(5)]
    return ActionChunk(
        request_id=draw(names),
        policy=draw(names),
        revision=draw(st.text(max_size=8)),
        robot_id=draw(names),
        seq=draw(st.integers(0, 2**53)),
        actions=Array.from_numpy(actions.reshape(rows, width)),
        dt_s=draw(finite),
        captured_at=draw(finite),
        valid_until=draw(finite),
        timings=Timings(
            observe_ms=terms[0], transfer_ms=terms[1], queue_ms=terms[2], inference_ms=terms[3], actuate_ms=terms[4]
        ),
        margin_ms=draw(finite),
        batch_size=draw(st.integers(1, 64)),
    )


@pytest.mark.parametrize("media", MEDIA)
@given(observation=observations())
def test_observation_survives_the_round_trip(media, observation):
    assert decode_observation(encode(observation, media), media) == observation


@pytest.mark.parametrize("media", MEDIA)
@given(chunk=chunks())
def test_chunk_survives_the_round_trip(media, chunk):
    assert decode_chunk(encode(chunk, media), media) == chunk


@pytest.mark.parametrize("media", MEDIA)
@given(code=st.sampled_from(ErrorCode), text=st.text(max_size=40), retry=st.none() | positive)
def test_error_survives_the_round_trip(media, code, text, retry):
    error = TaktlineError(code, text, "next", retry_after_ms=retry)
    back = error_from_body(decode_error(encode(error_body(error, "id"), media), media))
    assert (back.code, back.message, back.next_step, back.retry_after_ms) == (code, text, "next", retry)


@pytest.mark.parametrize("media", MEDIA)
def test_policy_list_survives_the_round_trip(media):
    info = PolicyInfo(
        policy="p",
        family="pi05",
        revision="r",
        ready=True,
        cameras=("a",),
        state_dim=3,
        t_sync=(BucketTime(batch=1, median_ms=2.0, p99_ms=3.0),),
    )
    assert decode_policies(encode(PolicyList(policies=(info,)), media), media).policies == (info,)
    assert decode_policy(encode(info, media), media) == info


DECODERS = [decode_observation, decode_chunk, decode_error, decode_policies, decode_policy]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("media", MEDIA)
@given(body=st.binary(max_size=400))
def test_noise_is_a_typed_error(decoder, media, body):
    _only_typed(decoder, body, media)


@pytest.mark.parametrize("media", MEDIA)
@given(observation=observations(), data=st.data())
def test_damaged_observation_is_a_typed_error_or_still_valid(media, observation, data):
    body = bytearray(encode(observation, media))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    _only_typed(decode_observation, bytes(body), media)
    _only_typed(decode_observation, bytes(body[:cut]), media)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(fields=st.dictionaries(st.sampled_from([*Observation.__struct_fields__, "extra"]), values))
def test_wrong_fields_are_a_typed_error(fields):
    _only_typed(decode_observation, msgspec.msgpack.encode(fields), MediaType.MSGPACK)


def _only_typed(decoder, body, media):
    caught = None
    try:
        decoder(body, media)
    except TaktlineError as error:
        caught = error
    assert caught is None or (caught.code in HTTP_STATUS and caught.message and caught.next_step)


def test_every_code_has_a_status():
    assert set(HTTP_STATUS) == set(ErrorCode)
    assert all(400 <= status < 600 for status in HTTP_STATUS.values())


def test_json_carries_bytes_as_base64():
    image = Image("raw", bytes(12), (2, 2, 3))
    assert json.loads(encode(image, MediaType.JSON))["data"] == "AAAAAAAAAAAAAAAA"


@pytest.mark.parametrize("text", ["", "text/plain", "application/jsonx", "application/json; charset=latin-1"])
def test_other_content_types_are_refused(text):
    with pytest.raises(TaktlineError) as caught:
        media_type(text)
    assert caught.value.code is ErrorCode.UNSUPPORTED_MEDIA_TYPE


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("application/json", MediaType.JSON),
        ("text/html, application/json;q=0.5", MediaType.JSON),
        ("application/json;q=0, application/msgpack", MediaType.MSGPACK),
        ("*/*", MediaType.MSGPACK),
        ("text/html", MediaType.MSGPACK),
    ],
)
def test_accept_picks_the_encoding(accept, expected):
    assert accepted_media_type(accept, MediaType.MSGPACK) is expected


def test_an_unknown_code_is_named():
    error = error_from_body(ErrorBody(code="from_the_future", message="m", next_step="n"))
    assert error.code is ErrorCode.INTERNAL
    assert "from_the_future" in error.message


def test_a_nan_cannot_hide_in_a_chunk_of_the_wrong_shape():
    chunk = ActionChunk(
        request_id="r",
        policy="p",
        revision="",
        robot_id="a",
        seq=1,
        actions=Array("float32", (2, 3), bytes(20)),
        dt_s=0.1,
        captured_at=0.0,
        valid_until=1.0,
        timings=Timings(observe_ms=0, transfer_ms=0, queue_ms=0, inference_ms=0, actuate_ms=0),
        margin_ms=math.nan,
        batch_size=1,
    )
    with pytest.raises(TaktlineError, match="needs 24 bytes"):
        decode_chunk(encode(chunk, MediaType.MSGPACK), MediaType.MSGPACK)
