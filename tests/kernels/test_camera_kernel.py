"""Camera frames to patches on the GPU, against the CPU's resize: Pillow bit for bit, bilinear within rounding."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from taktline_worker.models.pi.resize import Resize, to_model_input
from torch import Tensor

camera = importlib.import_module("taktline_worker.models.pi.camera")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
METHODS: list[Resize] = ["pil", "bilinear", "bilinear_legacy"]
# fp32 interpolation rounds three times, at up to 2 before the last; the CPU's compiler fuses other products than ours.
BOUND = {"pil": 0.0, "bilinear": 6e-7, "bilinear_legacy": 6e-7}


def frame(height: int, width: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def patches_of(pixels: Tensor, patch: int) -> Tensor:
    side = pixels.shape[-1] // patch
    return pixels.view(3, side, patch, side, patch).permute(1, 3, 0, 2, 4).reshape(side * side, -1)


def check(method: Resize, sizes: list[tuple[int, int]], size: int, frame_bytes: int) -> None:
    frames = [frame(*shape, seed) for seed, shape in enumerate(sizes)]
    buffers = camera.CameraBuffers(len(sizes) + 1, frame_bytes, size, 14, method, DEVICE)
    again = [one.pin_memory() if HAS_GPU else one for one in frames[::-1]]
    for given in (frames, again):  # the second time the tables are there, in another order
        buffers.load_frames(given)
        actual = buffers.patches(len(given)).cpu()
        for index, one in enumerate(given):
            expected = patches_of(to_model_input(one.numpy(), size, method), 14)
            assert float((actual[index] - expected).abs().max()) <= BOUND[method], one.shape
        if not HAS_GPU:
            break  # slow in the interpreter


@pytest.mark.parametrize("method", METHODS)
def test_small_frames(method: Resize) -> None:
    # Reduced with bands, enlarged, of the network's size, and (Pillow) tall: resized on the CPU.
    check(method, [(30, 41), (19, 28), (28, 28), (60, 20)], 28, 10**6)


@pytest.mark.parametrize("method", METHODS)
def test_frames_beyond_the_buffers(method: Resize) -> None:
    check(method, [(30, 41), (33, 41), (30, 41)], 28, 30 * 41 * 3)


@pytest.mark.parametrize("method", METHODS)
def test_where_a_frame_is_resized_is_its_own_affair(method: Resize) -> None:
    """The CPU rounds otherwise: no neighbour may send a frame there, and its bits are the same in every place."""
    mine, small = frame(30, 41, 0), frame(9, 11, 1)
    buffers = camera.CameraBuffers(4, mine.numel(), 28, 14, method, DEVICE)
    found = []
    for neighbour in (None, small, frame(30, 41, 2), frame(60, 80, 3)):
        given = [mine] if neighbour is None else [neighbour, neighbour, neighbour, mine]
        buffers.load_frames(given)
        found.append(buffers.patches(len(given))[-1].cpu().clone())
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: slow in the interpreter")
@pytest.mark.parametrize("method", METHODS)
def test_camera_sizes(method: Resize) -> None:
    check(method, [(480, 640), (720, 1280), (224, 224), (256, 256), (1080, 1920), (640, 480), (100, 90)], 224, 10**8)


def test_pixels_that_are_ready_pass_through() -> None:
    buffers = camera.CameraBuffers(2, 10**4, 28, 14, "pil", DEVICE)
    buffers.load_frames([frame(20, 20, 0)] * 2)
    pixels = torch.rand(2, 3, 28, 28)
    buffers.load_pixels(pixels)
    expected = torch.stack([patches_of(image, 14) for image in pixels])
    assert torch.equal(buffers.patches(2).cpu(), expected)


def test_too_many_frames_are_refused() -> None:
    buffers = camera.CameraBuffers(1, 10**4, 28, 14, "pil", DEVICE)
    with pytest.raises(ValueError, match="2 frames"):
        buffers.load_frames([frame(20, 20, 0)] * 2)
