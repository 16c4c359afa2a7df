"""Bombs are refused before they unfold; each limit has its code."""

from __future__ import annotations

import math
import struct
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from taktline_protocol import Array, ErrorCode, Image, Observation, PolicyInfo, TaktlineError
from taktline_protocol.checks import check_policy_fit
from taktline_protocol.codecs import MediaType, decode_observation, encode
from taktline_protocol.limits import DEFAULT_LIMITS, MIB, Limits, check_structure_msgpack

KEY_STATE = b"\x81\xa5state"

MSGPACK_BOMBS = {
    "array of 2**32-1": KEY_STATE + b"\xdd\xff\xff\xff\xff",
    "array of many tiny numbers": KEY_STATE + b"\xdd\x00\x80\x00\x00" + b"\x01" * (8 * MIB),
    "map of 2**32-1": b"\xdf\xff\xff\xff\xff",
    "map of 2**16-1": b"\x81\xa6images\xde\xff\xff",
    "bin of 4 GiB": KEY_STATE + b"\xc6\xff\xff\xff\xff",
    "str of 4 GiB": KEY_STATE + b"\xdb\xff\xff\xff\xff",
    "ext of 4 GiB": KEY_STATE + b"\xc9\xff\xff\xff\xff\x01",
    "deep arrays": KEY_STATE + b"\x91" * (4 * MIB),
    "deep maps": b"\x81\xa1x" * MIB,
    "deep arrays in an unknown field": b"\x81\xa1x" + b"\x91" * MIB,
    "reserved byte": b"\xc1",
    "two messages": b"\x80\x80",
    "empty": b"",
    "cut in a length": KEY_STATE + b"\xdd\x00",
}
JSON_BOMBS = {
    "many numbers": b'{"state":[' + b"0," * (7 * MIB) + b"0]}",
    "many images": b'{"images":{' + b",".join(b'"%d":{}' % number for number in range(200_000)) + b"}}",
    "deep arrays": b'{"state":' + b"[" * MIB,
    "deep unknown": b'{"x":' * MIB,
    "long number": b'{"seq":' + b"9" * MIB + b"}",
}


@pytest.mark.parametrize("name", MSGPACK_BOMBS)
def test_msgpack_bomb_costs_no_memory(name):
    _refused_cheaply(MSGPACK_BOMBS[name], MediaType.MSGPACK)


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_json_bomb_costs_no_memory(name):
    _refused_cheaply(JSON_BOMBS[name], MediaType.JSON)


def _refused_cheaply(body, media):
    tracemalloc.start()
    try:
        with pytest.raises(TaktlineError) as caught:
            decode_observation(body, media)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code is ErrorCode.INVALID_BODY
    # An error may quote or skip over the body, but nothing may unfold to a multiple of it.
    assert peak < 2 * len(body) + 4 * MIB
    assert peak < 16 * MIB


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=300)
        | st.binary(max_size=300),
        lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner, max_size=20),
        max_leaves=40,
    )
)
def test_the_structure_walk_accepts_what_msgpack_writes(value):
    check_structure_msgpack(msgspec.msgpack.encode(value), Limits(depth=64))


@given(body=st.binary(max_size=64))
def test_the_structure_walk_agrees_with_the_decoder_on_noise(body):
    try:
        msgspec.msgpack.decode(body)
        valid = True
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError):
        valid = False
    try:
        check_structure_msgpack(body, Limits(depth=64))
        accepted = True
    except TaktlineError:
        accepted = False
    # The walk may let through what the typed decoder then refuses (bad UTF-8, odd keys), never the other way round.
    assert accepted or not valid


def observation(**changes):
    base = {
        "robot_id": "arm",
        "seq": 1,
        "captured_at": 1.0,
        "sent_at": 1.01,
        "budget_ms": 100.0,
        "images": {"front": Image("raw", bytes(12), (2, 2, 3))},
        "state": [0.0, 1.0],
        "instruction": "go",
    }
    return Observation(**{**base, **changes})


def png(width, height, *, end=True):
    header = struct.pack(">II", width, height) + b"\x08\x02\x00\x00\x00"
    data = (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + b"IHDR"
        + header
        + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    )
    return data + (b"\x00\x00\x00\x00IEND\xaeB`\x82" if end else b"")


CASES = {
    "budget negative": ({"budget_ms": -1.0}, ErrorCode.BUDGET_INVALID),
    "captured at the beginning of time": ({"captured_at": -1.7e308, "sent_at": 1.7e308}, ErrorCode.INVALID_BODY),
    "captured an hour ago": ({"captured_at": 0.0, "sent_at": 3600.0}, ErrorCode.INVALID_BODY),
    "budget NaN": ({"budget_ms": math.nan}, ErrorCode.BUDGET_INVALID),
    "budget infinite": ({"budget_ms": math.inf}, ErrorCode.BUDGET_INVALID),
    "budget of a day": ({"budget_ms": 86_400_000.0}, ErrorCode.BUDGET_INVALID),
    "budget spent": ({"budget_ms": 0.0}, ErrorCode.DEADLINE_EXPIRED),
    "budget all actuation": ({"budget_ms": 5.0, "actuate_ms": 5.0}, ErrorCode.DEADLINE_EXPIRED),
    "captured NaN": ({"captured_at": math.nan}, ErrorCode.INVALID_BODY),
    "sent before captured": ({"sent_at": 0.5}, ErrorCode.INVALID_BODY),
    "no instruction": ({"instruction": ""}, ErrorCode.INSTRUCTION_INVALID),
    "blank instruction": ({"instruction": " \n"}, ErrorCode.INSTRUCTION_INVALID),
    "long instruction": ({"instruction": "x" * 10_000}, ErrorCode.INSTRUCTION_INVALID),
    "state NaN": ({"state": [0.0, math.nan]}, ErrorCode.STATE_INVALID),
    "state infinite": ({"state": Array.from_numpy(np.array([np.inf]))}, ErrorCode.STATE_INVALID),
    "state empty": ({"state": []}, ErrorCode.STATE_INVALID),
    "state long": ({"state": [0.0] * 1025}, ErrorCode.STATE_INVALID),
    "state of bytes": ({"state": Array("uint8", (2,), b"ab")}, ErrorCode.STATE_INVALID),
    "state 2-D": ({"state": Array.from_numpy(np.zeros((2, 2)))}, ErrorCode.STATE_INVALID),
    "state short of bytes": ({"state": Array("float32", (4,), bytes(12))}, ErrorCode.STATE_INVALID),
    "state shape overflows": ({"state": Array("float64", (2**32 - 1,) * 3, bytes(8))}, ErrorCode.STATE_INVALID),
    "state shape beyond 32 bits": ({"state": Array("float64", (2**32,), bytes(8))}, ErrorCode.INVALID_BODY),
    "many cameras": (
        {"images": {f"c{n}": Image("raw", bytes(3), (1, 1, 3)) for n in range(17)}},
        ErrorCode.CAMERA_UNKNOWN,
    ),
    "image of 0 bytes": ({"images": {"front": Image("jpeg", b"")}}, ErrorCode.IMAGE_CORRUPT),
    "60 megapixels": ({"images": {"front": Image("png", png(10_000, 6_000))}}, ErrorCode.IMAGE_TOO_LARGE),
    "truncated PNG": ({"images": {"front": Image("png", png(8, 8, end=False))}}, ErrorCode.IMAGE_CORRUPT),
    "9 MiB image": ({"images": {"front": Image("jpeg", b"\xff\xd8" + bytes(9 * MIB))}}, ErrorCode.IMAGE_TOO_LARGE),
    "raw without shape": ({"images": {"front": Image("raw", bytes(12))}}, ErrorCode.IMAGE_CORRUPT),
    "raw shape and bytes differ": ({"images": {"front": Image("raw", bytes(12), (2, 3, 3))}}, ErrorCode.IMAGE_CORRUPT),
    "raw with an alpha channel": ({"images": {"front": Image("raw", bytes(16), (2, 2, 4))}}, ErrorCode.IMAGE_CORRUPT),
    "shape on a JPEG": ({"images": {"front": Image("jpeg", b"\xff\xd8", (2, 2, 3))}}, ErrorCode.IMAGE_CORRUPT),
}


@pytest.mark.parametrize("name", CASES)
def test_limit(name):
    changes, code = CASES[name]
    with pytest.raises(TaktlineError) as caught:
        decode_observation(encode(observation(**changes), MediaType.MSGPACK), MediaType.MSGPACK)
    assert caught.value.code is code
    good = observation()
    assert decode_observation(encode(good, MediaType.MSGPACK), MediaType.MSGPACK) == good


def test_body_over_the_limit():
    with pytest.raises(TaktlineError) as caught:
        decode_observation(bytes(DEFAULT_LIMITS.body_bytes + 1), MediaType.JSON)
    assert caught.value.code is ErrorCode.BODY_TOO_LARGE


@pytest.mark.parametrize(
    ("media", "body"),
    [
        (MediaType.JSON, b'{"instruction":"\xff\xfe"}'),
        (MediaType.JSON, b'{"instruction":"\\ud800"}'),
        (MediaType.MSGPACK, b"\x81\xabinstruction\xa2\xff\xfe"),
    ],
)
def test_invalid_utf8_instruction(media, body):
    with pytest.raises(TaktlineError) as caught:
        decode_observation(body, media)
    assert caught.value.code is ErrorCode.INVALID_BODY


INFO = PolicyInfo(
    policy="p",
    family="f",
    revision="r",
    ready=True,
    cameras=("front", "wrist"),
    optional_cameras=("side",),
    state_dim=2,
)
FRAME = Image("raw", bytes(3), (1, 1, 3))


@pytest.mark.parametrize(
    ("cameras", "state", "code"),
    [
        (["front"], [0.0, 0.0], ErrorCode.CAMERA_MISSING),
        (["front", "wrist", "rear"], [0.0, 0.0], ErrorCode.CAMERA_UNKNOWN),
        (["front", "wrist"], [0.0], ErrorCode.STATE_INVALID),
        (["front", "wrist", "side"], Array.from_numpy(np.zeros(3)), ErrorCode.STATE_INVALID),
        (["front", "wrist"], [0.0, 0.0], None),
        (["front", "wrist", "side"], Array.from_numpy(np.zeros(2)), None),
    ],
)
def test_fit_to_the_policy(cameras, state, code):
    sent = observation(images=dict.fromkeys(cameras, FRAME), state=state)
    if code is None:
        check_policy_fit(sent, INFO)
        return
    with pytest.raises(TaktlineError) as caught:
        check_policy_fit(sent, INFO)
    assert caught.value.code is code
