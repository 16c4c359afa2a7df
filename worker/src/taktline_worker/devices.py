"""Which device an engine runs on."""

from __future__ import annotations

import torch
from taktline_protocol import ErrorCode, TaktlineError


def choose_device(wanted: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device.

    Raises:
        TaktlineError: CONFIG_INVALID where cuda is wanted and absent.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "engine.device is cuda, and no CUDA device is visible",
            "check the pool's accelerator",
        )
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")
