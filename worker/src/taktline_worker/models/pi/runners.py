"""What runs a π policy's batches: read, checked and packed weights, and the runner that they get on this device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from taktline_protocol.deployment import QuantisationOptions
from torch import Tensor

from taktline_worker.adapter import RunningBatch, as_one
from taktline_worker.fp8_layers import check_device
from taktline_worker.models.pi.config import PiArchitecture, PiConventions
from taktline_worker.models.pi.folder import PiFolder
from taktline_worker.models.pi.native_rows import NativeRows
from taktline_worker.models.pi.runner import PiBatch, PiRunner
from taktline_worker.models.pi.unnormalise import Unnormaliser
from taktline_worker.models.pi.weights import BF16, BF16_VISION, FP32, PiWeights, pack_weights

_logger = logging.getLogger(__name__)


class BatchRunner(Protocol):
    """What the adapter needs of a runner, eager or captured."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    def run(self, batch: PiBatch) -> Tensor:
        """Actions on the CPU: fp32 (B, H, action width), or (B, H, D) in robot units where `unnormalises` says so."""


@runtime_checkable
class Launching(Protocol):
    """A runner whose batches need not be waited for."""

    def draft(self, batch: PiBatch) -> Any:
        """What `launch` can be spared of a batch whose images are not there yet."""

    def launch(self, batch: PiBatch, draft: Any = None) -> RunningBatch:
        """As `run`; the answers come from what it gives."""


@runtime_checkable
class Shortened(Protocol):
    """A runner with a shorter way for a row that is alone."""

    def shorten(self, rows: NativeRows) -> None:
        """Makes it."""


def make_runner(
    weights: PiWeights,
    architecture: PiArchitecture,
    conventions: PiConventions,
    buckets: Sequence[int],
    precision: str,
    guidance: float | None = None,
    quantisation: QuantisationOptions | None = None,
) -> BatchRunner:
    """Captured graphs for bf16 and fp8 on a GPU; the eager runner for everything else.

    Args:
        guidance: bound of the guidance of rows with a tail, where they run among the others.
        quantisation: how captured graphs store the expert's matrices for small buckets.
    """
    if not (weights.embedding.is_cuda and weights.embedding.dtype == torch.bfloat16):
        return PiRunner(weights, architecture)
    # Its kernels load only where there is a GPU.
    from taktline_worker.models.pi.graphs import Bucket, GraphRunner

    views = sum(1 for slot in conventions.slots if slot.names)
    shapes = [Bucket(rows, views, prompt) for rows in buckets for prompt in conventions.prompt_slots]
    number_format: Literal["bf16", "fp8"] = "fp8" if precision == "fp8" else "bf16"
    runner = GraphRunner(
        weights,
        architecture,
        conventions.horizon,
        shapes,
        number_format,
        conventions.resize,
        guidance,
        quantisation,
        Unnormaliser(conventions.action_normaliser, conventions.action_dim, weights.embedding.device),
    )
    runner.capture()
    return runner


def read_weights(folder: PiFolder, conventions: PiConventions, precision: str, device: torch.device) -> PiWeights:
    """Reads, checks and packs the weights. Raises TaktlineError where a tensor is corrupt or not finite."""
    policy = FP32
    if precision == "fp8":
        check_device(device)
    if precision in ("bf16", "fp8"):
        policy = BF16_VISION if device.type == "cuda" else BF16
    return pack_weights(folder.files.read(folder.names), folder.architecture, conventions, policy, device)


def shorten(runner: BatchRunner, rows: NativeRows | None) -> None:
    """Gives a captured runner its shorter way for rows that are alone, where that can be had."""
    captured: Shortened | None = as_one(runner, Shortened)
    if rows is None or captured is None:
        return
    try:
        captured.shorten(rows)
    except OSError as error:
        _logger.warning("rows that are alone are launched by PyTorch, some 0.3 ms later: no CUDA runtime: %s", error)
