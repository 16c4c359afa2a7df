"""Bad input against a running stack: a typed error each, no process dies, and a good request right after succeeds."""

from __future__ import annotations

import io
import itertools
import math
import shutil
import struct
import subprocess
import zlib

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image as PillowImage
from taktline_protocol import ErrorCode, Image, Observation
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode
from taktline_protocol.errors import HTTP_STATUS

from tests.e2e import conftest as e2e

sequence = itertools.count(1)
SIDE = 84


def jpeg(side=SIDE):
    pixels = np.random.default_rng(3).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PillowImage.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def png_of_60_megapixels():
    """A true PNG of 10,000 x 6,000 black pixels in a few kilobytes: it would unfold to 180 MB."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * 10_000)
    pixels = b"".join(packer.compress(row) for _ in range(6_000)) + packer.flush()
    header = struct.pack(">IIBBBBB", 10_000, 6_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def good(info, **changes):
    base = Observation(
        robot_id="tester",
        session_id="tests",
        seq=next(sequence),
        captured_at=1.0,
        sent_at=1.001,
        budget_ms=60_000.0,
        images={camera: Image("jpeg", jpeg()) for camera in info.cameras},
        state=[0.0] * info.state_dim,
        instruction="reach the red block",
    )
    return msgspec.structs.replace(base, **changes)


def with_image(info, image):
    images = {camera: Image("jpeg", jpeg()) for camera in info.cameras}
    images[info.cameras[0]] = image
    return good(info, images=images)


def flipped_scan():
    """A JPEG whole in form whose scan is garbage at the start: headers pass, the decoder may still refuse."""
    data = jpeg()
    return data[: len(data) // 2] + data[-2:]


# name -> (observation of the policy's info, code)
OBSERVATIONS = {
    "truncated JPEG": (lambda info: with_image(info, Image("jpeg", jpeg()[:-40])), ErrorCode.IMAGE_CORRUPT),
    "0-byte image": (lambda info: with_image(info, Image("jpeg", b"")), ErrorCode.IMAGE_CORRUPT),
    "60-megapixel image": (
        lambda info: with_image(info, Image("png", png_of_60_megapixels())),
        ErrorCode.IMAGE_TOO_LARGE,
    ),
    "garbage as PNG": (lambda info: with_image(info, Image("png", bytes(500))), ErrorCode.IMAGE_CORRUPT),
    "NaN state": (lambda info: good(info, state=[math.nan] * info.state_dim), ErrorCode.STATE_INVALID),
    "short state": (lambda info: good(info, state=[0.0] * (info.state_dim - 1)), ErrorCode.STATE_INVALID),
    "long state": (lambda info: good(info, state=[0.0] * (info.state_dim + 1)), ErrorCode.STATE_INVALID),
    "missing camera": (lambda info: good(info, images={}), ErrorCode.CAMERA_MISSING),
    "budget spent": (lambda info: good(info, budget_ms=0.0), ErrorCode.DEADLINE_EXPIRED),
    "budget negative": (lambda info: good(info, budget_ms=-1.0), ErrorCode.BUDGET_INVALID),
    "empty instruction": (lambda info: good(info, instruction=""), ErrorCode.INSTRUCTION_INVALID),
    "10,000-character instruction": (lambda info: good(info, instruction="a" * 10_000), ErrorCode.INSTRUCTION_INVALID),
}


@pytest.fixture
def post(running_stack):
    with httpx.Client(base_url=running_stack.url, timeout=90) as client:

        def send(body, media=MediaType.MSGPACK.value, policy=running_stack.policy):
            answer = client.post(f"/v1/policies/{policy}/act", content=body, headers={"content-type": media})
            encoding = MediaType(answer.headers["content-type"])
            if answer.status_code == 200:
                return decode_chunk(answer.content, encoding)
            error = decode_error(answer.content, encoding)
            assert answer.status_code == HTTP_STATUS[ErrorCode(error.code)]
            assert error.message
            assert error.next_step
            return ErrorCode(error.code)

        yield send


@pytest.fixture(autouse=True)
def good_request_right_after(request, running_stack, post):
    """Whatever a test did: both processes live and the next good request gets its chunk."""
    yield
    assert all(running_stack.alive().values())
    info = running_stack.info()
    chunk = post(encode(good(info), MediaType.MSGPACK))
    assert chunk.actions.shape == (info.horizon, info.action_dim)
    assert np.isfinite(chunk.actions.to_numpy()).all()


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("media", list(MediaType))
def test_bad_observation(running_stack, post, name, media):
    make, code = OBSERVATIONS[name]
    body = encode(make(running_stack.info()), media)
    if name == "NaN state" and media is MediaType.JSON:
        # JSON has no NaN: what Python's json module writes in its place is not JSON.
        body, code = body.replace(b"null", b"NaN"), ErrorCode.INVALID_BODY
    assert post(body, media.value) is code


def test_a_jpeg_that_only_the_decoder_can_refuse_never_kills_the_worker(running_stack, post):
    answer = post(encode(with_image(running_stack.info(), Image("jpeg", flipped_scan())), MediaType.MSGPACK))
    # libjpeg repairs what it can; a chunk or a typed refusal are both sound, a dead worker is not.
    assert answer is ErrorCode.IMAGE_CORRUPT or answer.actions.shape[0] > 0


def test_unknown_policy(running_stack, post):
    assert (
        post(encode(good(running_stack.info()), MediaType.JSON), "application/json", "nope") is ErrorCode.UNKNOWN_POLICY
    )


def test_body_over_the_limit(post):
    assert post(bytes(17 * 1024 * 1024)) is ErrorCode.BODY_TOO_LARGE


@pytest.mark.parametrize("media", ["text/plain", "application/xml", ""])
def test_wrong_content_type(running_stack, post, media):
    assert post(encode(good(running_stack.info()), MediaType.JSON), media) is ErrorCode.UNSUPPORTED_MEDIA_TYPE


@pytest.mark.parametrize("media", list(MediaType))
def test_invalid_utf8_instruction(running_stack, post, media):
    body = encode(good(running_stack.info(), instruction="reach!!"), media)
    assert post(body.replace(b"reach!!", b"reac\xc3\x28!"), media.value) is ErrorCode.INVALID_BODY


def test_two_robots_with_one_id(running_stack, post):
    info = running_stack.info()
    first = good(info, robot_id="twin", session_id="one")
    assert post(encode(first, MediaType.MSGPACK)).robot_id == "twin"
    second = good(info, robot_id="twin", session_id="two")
    assert post(encode(second, MediaType.MSGPACK)) is ErrorCode.ROBOT_CONFLICT


@pytest.mark.parametrize("damage", ["cut", "header", "zeroed"])
def test_corrupt_safetensors(running_stack, tmp_path, damage):
    """The worker refuses to start, with the code and the reason; what runs is not touched."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(running_stack.checkpoint, folder)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "header":
        data[8:40] = b"\xff" * 32
    else:
        data[:] = bytes(len(data))
    weights.write_bytes(data)
    config = e2e.engine_config("demo-reach", folder)
    worker = e2e.start_worker(tmp_path, config, f"127.0.0.1:{e2e.free_port()}")
    try:
        assert worker.wait(timeout=e2e.READY_TIMEOUT_S) == 2
    except subprocess.TimeoutExpired:
        worker.kill()
        raise
    assert "checkpoint_invalid" in (tmp_path / "worker.log").read_text()
