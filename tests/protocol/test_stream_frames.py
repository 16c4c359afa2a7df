"""The stream's frames: their bytes, their way to REST's messages and back, and decoders that nothing breaks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_protocol import ErrorCode, TaktlineError, stream, stream_codec
from taktline_protocol.limits import DEFAULT_LIMITS, Limits
from taktline_protocol.messages import Array, Image, Observation, Rtc
from taktline_protocol.stream import Answer, Frame, Hello, Observe, Vector
from taktline_protocol.stream_codec import (
    decode_from_gateway,
    decode_from_robot,
    encode_frame,
    to_answer,
    to_chunk,
    to_frame,
    to_image,
    to_observation,
    to_observe,
    to_refusal,
)

from tests.example_messages import CHUNK

ROOT = Path(__file__).parents[2]
OBSERVATION = Observation(
    robot_id="arm",
    session_id="s",
    seq=7,
    captured_at=1.5,
    sent_at=1.75,
    budget_ms=200.0,
    images={"front": Image("raw", bytes(12), (2, 2, 3)), "wrist": Image("jpeg", b"\xff\xd8")},
    state=Array.from_numpy(np.asarray([0.5, -0.5], dtype="<f4")),
    instruction="go",
    network_ms=2.0,
    seed=3,
    rtc=Rtc(tail=Array.from_numpy(np.ones((2, 3), dtype="<f4")), delay=2),
)


# The bytes that docs/stream.md shows; a change here is a change of the wire.
@pytest.mark.parametrize(
    ("frame", "wire"),
    [
        (Hello((1,), "arm-1", "s1"), "99 01 91 01 a5 61 72 6d 2d 31 a2 73 31 00 00 c4 00 a0 c0"),
        (stream.Cancel(7), "92 03 07"),
        (stream.Ping(1.5), "92 04 cb 3f f8 00 00 00 00 00 00"),
        (stream.Clock(-0.5, 0.25), "93 05 cb bf e0 00 00 00 00 00 00 cb 3f d0 00 00 00 00 00 00"),
        (stream.Bye(), "91 06"),
        (stream.Ack(300), "92 13 cd 01 2c"),
        (stream.Backpressure("window", 0.0, 4), "94 15 a6 77 69 6e 64 6f 77 cb 00 00 00 00 00 00 00 00 04"),
    ],
)
def test_bytes_of_a_frame(frame, wire):
    assert encode_frame(frame) == bytes.fromhex(wire)


def test_bytes_of_a_delta():
    delta = Observe(2, 1.0, 1.0, 100.0, Vector("float32", bytes(4)), {}, {"front": b"12345678"})
    doubles = " cb 3f f0 00 00 00 00 00 00 cb 3f f0 00 00 00 00 00 00 cb 40 59 00 00 00 00 00 00"
    assert encode_frame(delta) == bytes.fromhex(
        "9a 02 02" + doubles + " 92 a7 66 6c 6f 61 74 33 32 c4 04 00 00 00 00"
        " 80 81 a5 66 72 6f 6e 74 c4 08 31 32 33 34 35 36 37 38 c0 c0"
    )


def test_an_observation_comes_out_as_it_went_in():
    images = {name: to_frame(image, b"12345678") for name, image in OBSERVATION.images.items()}
    sent = to_observe(OBSERVATION, images, {}, instruction=True)
    got = decode_from_robot(encode_frame(sent), DEFAULT_LIMITS)
    assert isinstance(got, Observe)
    back = to_observation(got, "arm", "s", {name: to_image(frame) for name, frame in got.images.items()}, "go")
    assert back == OBSERVATION


def test_every_field_of_an_observation_has_a_place_in_the_stream():
    """A field added to REST is on the stream without a change here."""
    placed = {"robot_id", "session_id"} | {field.name for field in msgspec.structs.fields(Observe)}
    rest = {field.name for field in msgspec.structs.fields(stream.ObservationDetails)}
    assert {field.name for field in msgspec.structs.fields(Observation)} == (placed | rest) - {"unchanged", "details"}


def test_a_chunk_comes_out_as_it_went_in():
    answer = decode_from_gateway(encode_frame(to_answer(CHUNK, 10.0, 10.5)))
    assert isinstance(answer, Answer)
    assert (answer.received_at, answer.sent_at, answer.details) == (10.0, 10.5, None)
    assert to_chunk(answer, "p", "arm") == CHUNK


def test_a_refusal_carries_the_typed_error():
    error = TaktlineError(ErrorCode.OVERLOADED, "m", "n", retry_after_ms=5.0)
    refusal = decode_from_gateway(encode_frame(to_refusal(3, error, 1.0, 2.0, held=True, request_id="r")))
    assert (refusal.seq, refusal.code, refusal.message, refusal.next_step) == (3, "overloaded", "m", "n")
    assert (refusal.retry_after_ms, refusal.held, refusal.request_id) == (5.0, True, "r")


def test_the_page_has_a_row_for_every_element_of_every_frame():
    page = (ROOT / "docs/stream.md").read_text()
    described: dict[int, set[int]] = {}
    for line in page[page.index("### Robot to gateway") : page.index("### Byte by byte")].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| **"):
            tag = int(cells[0].strip("*").split()[0])
            described[tag] = set()
        if line.startswith("| ") and not line.startswith("| frame"):
            described[tag] |= {int(number) for number in cells[1].split(",") if number}
    frames = get_args(stream.FromRobot) + get_args(stream.FromGateway)
    written = {frame.__struct_config__.tag: len(msgspec.structs.fields(frame)) for frame in frames}
    assert described == {tag: set(range(1, count + 1)) for tag, count in written.items()}


def test_a_later_version_may_add_elements_at_the_end():
    wire = msgspec.msgpack.encode([4, 1.5, "new", {"a": 1}])
    assert decode_from_robot(wire, DEFAULT_LIMITS) == stream.Ping(1.5)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        [99],
        [4],
        [4, "x"],
        [1, [], "arm", "s"],
        [1, [1], "", "s"],
        [2, -1, 0.0, 0.0, 0.0, ["float32", b""]],
        [2, 1, 0.0, 0.0, 0.0, ["int8", b""]],
        [2, 1, 0.0, 0.0, 0.0, ["float32", b""], {"front": ["jpeg", b"", b"short"]}],
        [2, 1, 0.0, 0.0, 0.0, ["float32", b""], {"front": ["gif", b"", b"12345678"]}],
        [2, 1, 0.0, 0.0, 0.0, ["float32", b""], {}, {}, None, {"unknown": 1}],
        [2, 1, 0.0, 0.0, 0.0, ["float32", b""], {}, {}, None, {"seed": -1}],
        [5, 0.0, -1.0],
        [17, 1],
    ],
)
def test_what_is_no_frame_is_refused(value):
    with pytest.raises(TaktlineError) as caught:
        decode_from_robot(msgspec.msgpack.encode(value), DEFAULT_LIMITS)
    assert caught.value.code is ErrorCode.INVALID_BODY


def test_the_limits_hold_before_anything_is_unfolded():
    many = msgspec.msgpack.encode(
        [2, 1, 0.0, 0.0, 0.0, ["float32", b""], {f"{n}": ["raw", b"", b"12345678"] for n in range(99)}]
    )
    with pytest.raises(TaktlineError) as caught:
        decode_from_robot(many, Limits(items=100))
    assert caught.value.code is ErrorCode.INVALID_BODY
    with pytest.raises(TaktlineError) as caught:
        decode_from_robot(bytes(101), Limits(body_bytes=100))
    assert caught.value.code is ErrorCode.BODY_TOO_LARGE


def _deep(levels: int) -> list | None:
    return None if levels == 0 else [_deep(levels - 1)]


@pytest.mark.parametrize("behind", [[_deep(DEFAULT_LIMITS.depth)], [None] * (DEFAULT_LIMITS.items + 1)])
@pytest.mark.parametrize("part", ["state", "frame"])
def test_elements_behind_the_known_ones_are_within_the_limits_too(behind, part):
    """Whoever decodes a vector or a camera's frame skips them, however many they are."""

    def body(more):
        state = ["float32", bytes(4), *(more if part == "state" else [])]
        image = ["jpeg", b"x", b"12345678", 0, 0, *(more if part == "frame" else [])]
        return msgspec.msgpack.encode([2, 1, 0.0, 0.0, 1.0, state, {"front": image}, {}, "go", None])

    assert decode_from_robot(body([None]), DEFAULT_LIMITS) == decode_from_robot(body([]), DEFAULT_LIMITS)
    with pytest.raises(TaktlineError) as caught:
        decode_from_robot(body(behind), DEFAULT_LIMITS)
    assert caught.value.code is ErrorCode.INVALID_BODY


def _mutated(rng: random.Random, whole: bytes) -> bytes:
    body = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(body))
        kind = rng.randrange(4)
        if kind == 0:
            body[at] = rng.choice(
                (0x80, 0x8F, 0x90, 0x9F, 0xC0, 0xC4, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, rng.randrange(256))
            )
        elif kind == 1:
            del body[at : at + rng.randint(1, 4)]
        elif kind == 2:
            body[at:at] = rng.choice((b"\xc0", b"\x91", b"\x81\xa1x", b"\xdd\xff\xff\xff\xff", rng.randbytes(2)))
        else:
            body += rng.randbytes(1)
    return bytes(body) or b"\xc0"


@pytest.mark.parametrize("decode", [lambda body: decode_from_robot(body, DEFAULT_LIMITS), decode_from_gateway])
def test_frames_that_are_seen_to_be_usual_are_read_as_others_are(decode, monkeypatch):
    frame = stream.Frame("jpeg", b"\xff\xd8 a frame", b"12345678")
    vector = Vector("float64", bytes(24))
    usual = [
        encode_frame(Observe(1, 1.0, 1.0, 100.0, vector, {"front": frame, "wrist": frame}, {"top": b"12345678"}, "go")),
        encode_frame(to_answer(CHUNK, 10.0, 10.5)),
    ]
    seen = []

    def outcome(body):
        try:
            return decode(body)
        except TaktlineError as error:
            return error.code

    is_usual, rng = stream_codec._is_usual, random.Random(11)
    for whole in usual:
        assert is_usual(whole)
        for body in [whole, *(_mutated(rng, whole) for _ in range(4000))]:
            found = outcome(body)
            seen.append(is_usual(body))
            monkeypatch.setattr(stream_codec, "_is_usual", lambda _: False)
            assert outcome(body) == found, body
            monkeypatch.setattr(stream_codec, "_is_usual", is_usual)
    assert seen.count(True) > 400, "most mutations of payloads leave a usual frame"
    assert seen.count(False) > 400


def test_actions_must_have_the_bytes_that_their_shape_says():
    answer = msgspec.structs.replace(to_answer(CHUNK, 1.0, 2.0), horizon=4)
    with pytest.raises(TaktlineError) as caught:
        decode_from_gateway(encode_frame(answer))
    assert caught.value.code is ErrorCode.INVALID_BODY


@pytest.mark.parametrize("data", [b"123", b"12345"])
def test_a_state_must_be_whole_numbers_of_its_dtype(data):
    frame = Observe(1, 1.0, 1.0, 100.0, Vector("float32", data))
    with pytest.raises(TaktlineError) as caught:
        to_observation(frame, "arm", "s", {}, "go")
    assert caught.value.code is ErrorCode.STATE_INVALID


SAMPLES = [
    encode_frame(frame)
    for frame in (
        Hello((1, 2), "arm", "s", 5, 4, bytes(16), "c"),
        to_observe(
            OBSERVATION, {"front": Frame("raw", bytes(12), b"12345678", 2, 2)}, {"w": b"87654321"}, instruction=True
        ),
        stream.Clock(1.0, 0.5),
        to_answer(CHUNK, 1.0, 2.0),
        to_refusal(1, TaktlineError(ErrorCode.INTERNAL, "m", "n"), 1.0, 2.0, held=False),
    )
]


def survives(body: bytes) -> None:
    for decode in (lambda: decode_from_robot(body, DEFAULT_LIMITS), lambda: decode_from_gateway(body)):
        try:
            frame = decode()
        except TaktlineError:
            continue  # the one way to refuse; any other exception fails the test
        assert decode() == frame or frame != frame  # NaN
        encode_frame(frame)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_decode_or_are_refused(body):
    survives(body)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_damaged_frames_decode_or_are_refused(data):
    body = bytearray(data.draw(st.sampled_from(SAMPLES)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if kind == "flip" and body:
            body[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del body[at:]
        elif kind == "insert":
            body[at:at] = data.draw(st.binary(max_size=8))
        else:
            body[at:at] = body[at : at + 20]
    survives(bytes(body))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 24), st.lists(VALUES, max_size=14))
def test_any_values_decode_or_are_refused(tag, values):
    survives(msgspec.msgpack.encode([tag, *values]))
