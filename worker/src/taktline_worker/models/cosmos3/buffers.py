"""What a run of one batch size reads and writes: the texts of its sequences, inputs, noise and result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from taktline_kernels.fp8_heads import quantise_text
from torch import Tensor

from taktline_worker.models.cosmos3.config import PATCH_VALUES, Cosmos3Architecture
from taktline_worker.models.cosmos3.request import RequestSettings
from taktline_worker.models.cosmos3.weights import Cosmos3Weights


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The static shape of one run.

    Attributes:
        rows: requests in a batch.
        text: text slots a lane.
        imagine: whether the video is needed after the last step.
    """

    rows: int
    text: int
    imagine: bool = False


class Lanes:
    """Sequences as a rank computes them: their texts' keys and values, and the rotary tables of its own tokens.

    Args:
        count: lanes.
        text: text slots of each.
        shards: pieces that the heads are cut into.
        own_tokens: of each sequence, that this rank has.
    """

    def __init__(
        self, count: int, text: int, weights: Cosmos3Weights, a: Cosmos3Architecture, shards: int, own_tokens: int
    ) -> None:
        device = weights.embedding.device
        shape = (a.layers, count, text, a.kv_heads // shards, a.head_dim)
        self.multipliers: Tensor | None = None
        if weights.joint[0].multipliers is None:
            self.keys = torch.zeros(shape, dtype=weights.dtype, device=device)
            self.values = torch.zeros_like(self.keys)
        else:  # as attention in FP8 reads them
            turned = (*shape[:2], *shape[3:], text)
            self.keys, self.values = (
                torch.zeros(of, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn) for of in (shape, turned)
            )
            self.multipliers = torch.ones(a.layers, count, 2, device=device)
        self.lengths = torch.ones(count, dtype=torch.int32, device=device)
        self.cos = torch.zeros(count, own_tokens, a.head_dim // 2, device=device)
        self.sin = torch.zeros_like(self.cos)
        self._held: list[tuple[int, ...]] = [()] * count

    def put(
        self, lane: int, tokens: tuple[int, ...], text: tuple[Tensor, Tensor], table: tuple[Tensor, Tensor]
    ) -> None:
        """Gives a lane its prompt; one that is there already is not copied again.

        Args:
            tokens: the prompt's ids.
            text: its keys and values, (layers, L, kv heads, head_dim) each.
            table: cosines and sines (own tokens, head_dim / 2) behind a text of that length.
        """
        if self._held[lane] == tokens:
            return
        length = len(tokens)
        keys, values = text
        if self.multipliers is None:
            self.keys[:, lane, :length].copy_(keys)
            self.values[:, lane, :length].copy_(values)
        else:
            keys, values, self.multipliers[:, lane] = quantise_text(keys, values)
            self.keys[:, lane, :length].copy_(keys)
            self.values[:, lane, :, :, :length].copy_(values)
        self.lengths[lane] = length
        self.cos[lane].copy_(table[0])
        self.sin[lane].copy_(table[1])
        self._held[lane] = tokens


class Buffers:
    """Everything that a run of one bucket reads and writes; a captured graph holds on to it.

    Args:
        lanes: sequences of guided steps.
        wide: those of steps without guidance, where they are computed in another way; else None.
        clean_tokens: of the observed frame.
        values: numbers of a row's state.
    """

    def __init__(
        self,
        bucket: Bucket,
        lanes: Lanes,
        wide: Lanes | None,
        settings: RequestSettings,
        clean_tokens: int,
        values: int,
    ) -> None:
        device = lanes.cos.device
        self.bucket, self.lanes, self.wide = bucket, lanes, wide
        self.clean = torch.zeros(bucket.rows, clean_tokens, PATCH_VALUES, device=device)
        self.state = torch.zeros(bucket.rows, int(settings.state_row), settings.raw_dims, device=device)
        self.noise = torch.zeros(bucket.rows, values, device=device)
        self.result = torch.zeros_like(self.noise)
