"""The action expert of π0 and π0.5 with its matrices in a byte a number, for batches that their bytes bound."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from taktline_kernels.fp8_rows import ByteFormat, ByteWeight, byte_weight
from taktline_protocol import TaktlineError
from taktline_protocol.deployment import QuantisationOptions
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from taktline_worker.engine_options import config_error
from taktline_worker.models.pi.weights import GemmaLayer

FP8_CAPABILITY = (8, 9)
"""The first GPUs that convert e4m3."""


@dataclass(frozen=True, slots=True)
class ByteLayer:
    """The matrices of `GemmaLayer`, in its shapes; the gates of `gate_up_weight` first."""

    qkv_weight: ByteWeight
    out_weight: ByteWeight
    gate_up_weight: ByteWeight
    down_weight: ByteWeight


def quantise(layers: tuple[GemmaLayer, ...], number_format: ByteFormat) -> tuple[ByteLayer, ...]:
    """Quantise the layers as `pack_weights` leaves them. The same matrix is stored once, whoever asks."""
    return tuple(
        ByteLayer(
            _stored(layer.qkv_weight, number_format),
            _stored(layer.out_weight, number_format),
            _stored(layer.gate_up_weight, number_format),
            _stored(layer.down_weight, number_format),
        )
        for layer in layers
    )


# A policy with fewer solver steps shares its matrices with the one it comes from, and so shall their quantised copies.
_STORED: MutableMapping[Tensor, dict[ByteFormat, ByteWeight]] = WeakTensorKeyDictionary()


def _stored(weight: Tensor, number_format: ByteFormat) -> ByteWeight:
    known = _STORED.setdefault(weight, {})
    if number_format not in known:
        known[number_format] = byte_weight(weight, number_format)
    return known[number_format]


def label(precision: str, quantisation: QuantisationOptions | None) -> str:
    """The number formats in words: `bf16`, or `bf16+int8-expert`."""
    return precision if quantisation is None else f"{precision}+{quantisation.expert}-expert"


def check(
    quantisation: QuantisationOptions | None, precision: str, buckets: tuple[int, ...], device: torch.device
) -> None:
    """Raises CONFIG_INVALID where the engine at hand has no use for quantised weights or cannot read them."""
    if quantisation is None:
        return
    if precision == "fp32":
        raise _refused("engine.precision is fp32", "set engine.precision to bf16 or fp8, or leave quantisation out")
    if device.type != "cuda":
        raise _refused(
            f"the engine runs on a {device.type}, where the eager computation keeps its weights as they are",
            "leave quantisation out here; benchmarks/fp8_error.py says on a CPU what it does to the actions",
        )
    if quantisation.expert == "fp8" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise _refused("this GPU has no FP8", "set engine.quantisation.expert to int8")
    if min(buckets) > quantisation.max_batch:
        raise _refused(
            f"no bucket of {', '.join(map(str, buckets))} is as small as its maxBatch {quantisation.max_batch}",
            "raise maxBatch, add a smaller bucket, or leave quantisation out",
        )


def _refused(reason: str, next_step: str) -> TaktlineError:
    return config_error(f"engine.quantisation cannot be followed: {reason}", next_step)
