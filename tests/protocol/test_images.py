"""Image headers: what Pillow writes is read alike, and damage is a typed error."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as PillowImage
from taktline_protocol import ErrorCode, Image, TaktlineError
from taktline_protocol.images import ImageSize, check_image, jpeg_size, png_size, sniff_encoding
from taktline_protocol.limits import DEFAULT_LIMITS

CHANNELS = {"RGB": 3, "L": 1, "RGBA": 4, "CMYK": 4, "LA": 2}


def encoded(kind, mode, width, height, **options):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, CHANNELS[mode]), dtype=np.uint8)
    image = PillowImage.frombytes(mode, (width, height), pixels.tobytes())
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 95, "comment": b"\xff\xd9" * 9}])
def test_jpeg_size_is_what_was_written(mode, options):
    data = encoded("JPEG", mode, 37, 23, **options)
    assert jpeg_size(data) == ImageSize(23, 37, CHANNELS[mode])
    assert sniff_encoding(data) == "jpeg"


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
def test_png_size_is_what_was_written(mode):
    data = encoded("PNG", mode, 37, 23)
    assert png_size(data) == ImageSize(23, 37, CHANNELS[mode])
    assert sniff_encoding(data) == "png"


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_every_truncation_is_refused(kind):
    data = encoded(kind, "RGB", 16, 16)
    for cut in range(len(data) - 1):
        with pytest.raises(TaktlineError) as caught:
            check_image("front", Image(kind.lower(), data[:cut]), DEFAULT_LIMITS)
        assert caught.value.code is ErrorCode.IMAGE_CORRUPT


def test_bytes_after_the_end_are_the_cameras_business():
    data = encoded("JPEG", "RGB", 16, 16) + bytes(64)
    assert jpeg_size(data) == ImageSize(16, 16, 3)


@pytest.mark.parametrize("piece", [b"\xff", b"\xff\x01", b"\xff\xe0\x00\x02"])
def test_a_jpeg_of_nothing_but_segments_is_refused_after_some_thousands(piece):
    """Each costs a step of the gateway's loop, and a frame may have megabytes."""
    with pytest.raises(TaktlineError, match="more than 4,096 segments"):
        jpeg_size(b"\xff\xd8" + piece * 5000)


def test_a_jpeg_with_a_large_profile_is_read():
    whole = encoded("JPEG", "RGB", 16, 16)
    profile = (b"\xff\xe2" + (65_535).to_bytes(2, "big") + bytes(65_533)) * 255
    assert jpeg_size(whole[:2] + profile + whole[2:]) == jpeg_size(whole)


def test_a_jpeg_named_png_is_refused():
    with pytest.raises(TaktlineError):
        check_image("front", Image("png", encoded("JPEG", "RGB", 16, 16)), DEFAULT_LIMITS)


def test_a_huge_jpeg_header_is_refused_without_decoding():
    data = bytearray(encoded("JPEG", "RGB", 16, 16))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = (6000).to_bytes(2, "big") + (10_000).to_bytes(2, "big")
    with pytest.raises(TaktlineError) as caught:
        check_image("front", Image("jpeg", bytes(data)), DEFAULT_LIMITS)
    assert caught.value.code is ErrorCode.IMAGE_TOO_LARGE


@given(data=st.binary(max_size=200), kind=st.sampled_from(["jpeg", "png"]))
def test_noise_is_a_typed_error(data, kind):
    start = b"\xff\xd8" if kind == "jpeg" else b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR"
    for body in (data, start + data):
        code = None
        try:
            check_image("front", Image(kind, body), DEFAULT_LIMITS)
        except TaktlineError as error:
            code = error.code
        assert code in (None, ErrorCode.IMAGE_CORRUPT, ErrorCode.IMAGE_TOO_LARGE)
