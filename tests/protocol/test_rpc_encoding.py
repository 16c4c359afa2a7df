"""The hand-made request is byte for byte a message that the generated classes read as the one they would have made."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_protocol import Image, Observation, worker_pb2
from taktline_protocol.rpc import item_images, to_item
from taktline_protocol.rpc_encoding import encode_request, image_chunks

IMAGES = st.dictionaries(
    st.text(min_size=1, max_size=200),
    st.builds(
        Image,
        st.sampled_from(["jpeg", "png", "raw"]),
        st.binary(max_size=300),
        st.none() | st.tuples(st.integers(0, 2**31), st.integers(0, 70_000), st.just(3)),
    ),
    max_size=4,
)


def observation(images, instruction="go"):
    return Observation(
        robot_id="arm", seq=2**40, captured_at=1.0, budget_ms=5.0, images=images, state=[0.5], instruction=instruction
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(IMAGES, st.text(max_size=300)), max_size=4))
def test_the_same_message(items):
    head = worker_pb2.InferRequest(policy="p", revision="r")
    expected = worker_pb2.InferRequest(policy="p", revision="r")
    parts = []
    for number, (images, instruction) in enumerate(items):
        seen = observation(images, instruction)
        expected.items.append(to_item(f"id{number}", seen, 3.5))
        parts.append((to_item(f"id{number}", seen, 3.5, images=False), image_chunks(images)))
    read = worker_pb2.InferRequest.FromString(encode_request(head, parts))
    assert read == expected
    for item, (images, _) in zip(read.items, items, strict=True):
        assert item_images(item) == images


def test_frames_are_not_copied_before_the_request_is_put_together():
    frame = bytes(300)
    chunks = image_chunks({"front": Image("raw", frame, (10, 10, 3))})
    assert any(chunk is frame for chunk in chunks)
