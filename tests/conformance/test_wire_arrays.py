"""The msgpack-numpy codec: golden bytes, what it refuses, and that nothing but a TaktlineError ever escapes."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from taktline_gateway.compat.vla_eval import message_of
from taktline_gateway.compat.wire_arrays import EncodedFrame, decode, encode_openpi, encode_vla_eval, packed_openpi
from taktline_protocol import Array, ErrorCode, TaktlineError
from taktline_protocol.limits import Limits

LIMITS = Limits()
pack = msgspec.msgpack.encode

# What openpi's own packer writes, byte by byte.
GOLDEN = [
    (
        np.array([1, 2], np.uint8),
        "84c40b5f5f6e6461727261795f5fc3c40464617461c4020102c4056474797065a37c7531c40573686170659102",
    ),
    (
        np.array([[1], [2]], np.float32),
        "84c40b5f5f6e6461727261795f5fc3c40464617461c4080000803f00000040c4056474797065a33c6634c4057368617065920201",
    ),
    (
        np.array(1.5),
        "84c40b5f5f6e6461727261795f5fc3c40464617461c408000000000000f83fc4056474797065a33c6638c405736861706590",
    ),
    (
        np.float32(1.5),
        "83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3ff8000000000000c4056474797065a33c6634",
    ),
    (np.bool_(True), "83c40d5f5f6e7067656e657269635f5fc3c40464617461c3c4056474797065a37c6231"),
    (
        {"observation/state": np.array([0.5], np.float32), "prompt": "go"},
        "82b16f62736572766174696f6e2f737461746584c40b5f5f6e6461727261795f5fc3c40464617461c4040000003fc4056474797065"
        "a33c6634c40573686170659101a670726f6d7074a2676f",
    ),
    ({}, "80"),
    (np.float64(1.5), "cb3ff8000000000000"),
]


def same(left, right) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(np.array_equal(np.asarray(left), np.asarray(right)))


@pytest.mark.parametrize(("value", "golden"), GOLDEN)
def test_openpi_encoding_is_byte_exact_and_decodes_to_the_same(value, golden):
    assert encode_openpi(value).hex() == golden
    assert same(decode(bytes.fromhex(golden), LIMITS), value)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float32", "float64"])
def test_an_array_is_packed_from_its_bytes_as_its_numpy_form_would_be(dtype):
    array = Array.from_numpy(np.arange(6, dtype=dtype).reshape(2, 3))
    assert encode_openpi({"actions": packed_openpi(array)}) == encode_openpi({"actions": array.to_numpy()})


def test_vla_eval_layout_has_text_keys_and_plain_scalars():
    frame = encode_vla_eval({"actions": np.arange(3, dtype=np.int16), "done": np.bool_(True), "x": np.float32(0.5)})
    raw = msgspec.msgpack.decode(frame)
    assert raw["actions"] == {"__ndarray__": True, "data": b"\0\0\1\0\2\0", "dtype": "<i2", "shape": [3]}
    assert raw["done"] is True
    assert raw["x"] == 0.5
    assert decode(frame, LIMITS)["actions"].tolist() == [0, 1, 2]


def test_noncontiguous_arrays_go_in_c_order_and_big_endian_survives():
    value = np.arange(6, dtype=">i2").reshape(2, 3).T
    for encode in (encode_openpi, encode_vla_eval):
        back = decode(encode(value), LIMITS)
        assert back.dtype == np.dtype(">i2")
        assert back.tolist() == value.tolist()


def test_decoded_arrays_are_views_that_cannot_be_written():
    array = decode(encode_openpi(np.zeros(4, np.uint8)), LIMITS)
    assert isinstance(array.base, bytes)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_encoded_images_stay_encoded_and_raw_ones_become_arrays():
    frame = pack({"a": {"__image__": True, "format": "png", "data": b"\x89PNG", "shape": [2, 2, 3]}})
    assert decode(frame, LIMITS)["a"] == EncodedFrame("png", b"\x89PNG")
    raw = {"__image__": True, "format": "raw", "data": bytes(12), "dtype": "|u1", "shape": [2, 2, 3]}
    assert decode(pack(raw), LIMITS).shape == (2, 2, 3)


def array_map(**changes):
    entries = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    return entries | {key.encode(): value for key, value in changes.items()}


@pytest.mark.parametrize(
    "frame",
    [
        pack(array_map(dtype="|O")),
        pack(array_map(dtype="O")),
        pack(array_map(dtype="|O8", data=bytes(16))),
        pack(array_map(dtype="|V4")),
        pack(array_map(dtype="<c8", shape=[1])),
        pack(array_map(dtype="<U2", shape=[1])),
        pack(array_map(dtype="|S8", shape=[1])),
        pack(array_map(dtype="<M8[s]", shape=[1])),
        pack(array_map(dtype="f4,O")),
        pack(array_map(dtype="4f")),
        pack(array_map(dtype="?", data=bytes(2))),
        pack(array_map(dtype="<f16", data=bytes(32))),
        pack(array_map(dtype=[["a", "|O"]])),
        pack(array_map(dtype=None)),
        pack(array_map(data=bytes(7))),
        pack(array_map(data=bytes(9))),
        pack(array_map(data="text")),
        pack(array_map(data=[0] * 8)),
        pack(array_map(shape=[-2])),
        pack(array_map(shape=[-1, -2])),
        pack(array_map(shape=[2.0])),
        pack(array_map(shape=[True, 2])),
        pack(array_map(shape=2)),
        pack(array_map(shape=[1] * 7, data=bytes(4))),
        pack(array_map(shape=[2**33, 2**31])),
        pack(array_map(shape=[2**31])),
        pack(array_map(data=b"", shape=[0, 2**31 - 1, 2**31 - 1, 2**31 - 1])),
        pack(array_map(more=1)),
        pack({b"__ndarray__": True}),
        pack({"__ndarray__": True, "data": bytes(8), "dtype": "|O", "shape": [1]}),
        pack({b"__npgeneric__": True, b"data": b"x", b"dtype": "|O"}),
        pack({b"__npgeneric__": True, b"data": 1.5, b"dtype": "<i4"}),
        pack({b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"}),
        pack({"__image__": True, "format": "gif", "data": b""}),
        pack({"__image__": True, "format": "raw", "data": b"12", "dtype": "|u1"}),
        pack({1: 2}),
        bytes.fromhex("81c0c0"),  # nil as a key
        bytes.fromhex("8190c0"),  # a list as a key
        bytes.fromhex("8180c0"),  # a map as a key
        bytes.fromhex("82a16101c4016102"),  # the same key as text and as bytes
        bytes.fromhex("81c401ff01"),  # a key that is not UTF-8
        bytes.fromhex("a1ff"),  # text that is not UTF-8
        bytes.fromhex("d6ff00000000"),  # a timestamp extension
        bytes.fromhex("d40500"),  # any other extension
        bytes.fromhex("c1"),
        bytes.fromhex("dfffffffff"),
        b"",
        b"\x91" * 1000,
        b"\x80\x80",
        pack([0] * 9000),
    ],
    ids=lambda frame: frame[:12].hex(),
)
def test_refuses(frame):
    with pytest.raises(TaktlineError) as refused:
        decode(frame, LIMITS)
    assert refused.value.code is ErrorCode.INVALID_BODY


def test_refuses_a_frame_over_the_limit_without_reading_it():
    with pytest.raises(TaktlineError) as refused:
        decode(bytes(100), Limits(body_bytes=99))
    assert refused.value.code is ErrorCode.BODY_TOO_LARGE


def test_empty_arrays_keep_their_shape():
    assert decode(pack(array_map(data=b"", shape=[0, 7])), LIMITS).shape == (0, 7)


def test_booleans_other_than_0_and_1_become_true():
    frame = pack(array_map(data=b"\x00\x02\xff", dtype="|b1", shape=[3]))
    assert decode(frame, LIMITS).view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("value", [np.array([None]), np.array([1j]), np.array(["a"]), object(), np.complex64(1)])
def test_encoders_refuse_what_a_client_could_not_read_safely(value):
    for encode in (encode_openpi, encode_vla_eval):
        with pytest.raises(TypeError):
            encode({"x": value})


ARRAYS = hnp.arrays(
    dtype=st.sampled_from(["|u1", "|i1", "<i2", ">u4", "<i8", "<f2", "<f4", ">f8", "|b1"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
)
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
TREES = st.recursive(
    LEAVES | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


def tree_equal(left, right) -> bool:
    if isinstance(right, np.ndarray):
        equal_nan = right.dtype.kind == "f"
        return (
            left.dtype == right.dtype and left.shape == right.shape and np.array_equal(left, right, equal_nan=equal_nan)
        )
    if isinstance(right, dict):
        return left.keys() == right.keys() and all(tree_equal(left[key], right[key]) for key in right)
    if isinstance(right, list):
        return len(left) == len(right) and all(map(tree_equal, left, right))
    return left == right and type(left) is type(right)


@given(TREES)
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(tree):
    for encode in (encode_openpi, encode_vla_eval):
        assert tree_equal(decode(encode({"x": tree}), Limits(depth=64))["x"], tree)


def read(frame: bytes) -> None:
    with contextlib.suppress(TaktlineError):
        decode(frame, LIMITS)


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=500)
def test_fuzz_any_bytes(frame):
    read(frame)


@given(TREES, st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_fuzz_damaged_frames(tree, data):
    frame = bytearray(data.draw(st.sampled_from([encode_openpi, encode_vla_eval]))({"x": tree}))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


WIRE = st.one_of(LEAVES, st.binary(max_size=16), st.lists(LEAVES, max_size=8))


@given(
    st.sampled_from(["__ndarray__", "__npgeneric__", "__image__"]),
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "data": st.binary(max_size=16) | WIRE,
            "dtype": st.sampled_from(["<f4", "|u1", "|b1", "|O", "<i8"]) | st.text(max_size=6) | WIRE,
            "shape": st.lists(st.integers(-2, 2**63), max_size=7) | WIRE,
            "format": st.sampled_from(["raw", "png"]) | WIRE,
            "other": WIRE,
        },
    ),
)
@settings(deadline=None, max_examples=500)
def test_fuzz_marked_maps(marker, as_bytes, entries):
    entries = {marker: True, **entries}
    read(pack({key.encode(): value for key, value in entries.items()} if as_bytes else entries))


@pytest.mark.parametrize(
    "message",
    [
        {"__ndarray__": True, "data": b"", "dtype": ["<f4"] * 1000, "shape": [0]},
        {"__image__": True, "data": b"", "format": {"raw" * 1000: 1}, "shape": [0]},
        {"__ndarray__": True, "k" * 10_000: 1},
        {"__npgeneric__": True, "k" * 10_000: 1},
    ],
    ids=["dtype", "format", "keys", "scalar"],
)
def test_a_refusal_writes_out_no_value_of_a_frame_but_short_texts(message):
    """What is no text was turned into one as a whole before it was cut, and keys were not cut."""
    with pytest.raises(TaktlineError) as caught:
        decode(msgspec.msgpack.encode(message), LIMITS)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", [["hello"], {"hello": 1}, b"hello", None])
def test_a_message_whose_kind_is_no_text_is_refused(kind):
    with pytest.raises(TaktlineError, match="of type"):
        message_of({"type": kind, "payload": {}, "seq": 1, "timestamp": 0.0})
