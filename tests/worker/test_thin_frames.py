"""A frame of which nothing is left at the network's size: its own row is refused, wherever frames are resized."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from taktline_protocol import ErrorCode, TaktlineError
from taktline_worker.engine import Engine, Item
from taktline_worker.models.pi.adapter import PiAdapter, load
from taktline_worker.models.pi.camera import CameraBuffers
from taktline_worker.observation import EncodedImage


class Ran:
    seconds = 0.0

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def wait(self) -> torch.Tensor:
        return torch.zeros(self._rows, 50, 7)


class Resizing:
    """A runner that takes a batch's frames as captured graphs do, and does no more."""

    device, unnormalises = torch.device("cpu"), True

    def __init__(self, size: int, method: Any) -> None:
        self._camera = CameraBuffers(8, 1 << 17, size, 14, method, self.device)

    def run(self, batch: Any) -> torch.Tensor:
        return self.launch(batch).wait()

    def draft(self, batch: Any) -> None:
        return None

    def launch(self, batch: Any, draft: Any = None) -> Ran:
        self._camera.load_frames(batch.raw)
        return Ran(batch.tokens.shape[0])


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("method", ["bilinear", "bilinear_legacy", "pil"])
@pytest.mark.parametrize("shape", [(300, 1, 3), (1, 300, 3)])
def test_a_strip_of_a_frame_harms_no_neighbour(
    folders: Any, config_of: Any, observations: Any, tmp_path: Any, raw: bool, method: Any, shape: tuple[int, ...]
) -> None:
    loaded = load(config_of(folders.lerobot(tmp_path / "policy", "pi05")))
    processor = loaded.processor
    processor.conventions = replace(processor.conventions, resize=method)
    processor.raw = raw
    adapter = PiAdapter(processor, Resizing(processor.architecture.image_size, method), "fp32") if raw else loaded
    good = observations.make(seed=1)
    strip = EncodedImage("raw", bytes(900), shape)
    bad = observations.make(seed=2, images={**good.images, "base_0_rgb": strip})
    engine = Engine(adapter, (1, 2), 2)
    try:
        refused, answered = engine.infer([Item(bad), Item(good)]).outcomes
    finally:
        engine.close()
    assert isinstance(refused, TaktlineError)
    assert refused.code is ErrorCode.IMAGE_CORRUPT
    assert "base_0_rgb" in refused.message
    assert isinstance(answered, np.ndarray)
