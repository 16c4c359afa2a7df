"""The action head for one robot on Hopper: a solver step's blocks as a chain of overlapping kernels (few_tokens.cu).

Four kernels a block: queries and the attention behind them, its output layer, both layers of the feed-forward; two
embed the actions before the blocks, two decode them behind. The layer norms are in the products: y = f (W s - m c1)
+ c2, where s is the stream times the norm's multiplier, f the norm's factor and m its mean, which come in parts of each
row's sums; c1 = W multiplier and c2 = W shift + bias are made at load.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from taktline_kernels import ops
from taktline_kernels.cuda import few_tokens
from taktline_kernels.cuda.few_tokens import MAX_KEYS, MAX_TOKENS, Stream
from torch import Tensor

from taktline_worker.layers import Linear, Norm
from taktline_worker.models.groot.config import HeadConfig
from taktline_worker.models.groot.weights import ActionBlock, HeadWeights

logger = logging.getLogger(__name__)

Seen = tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class _Folded:
    """c1 and c2 of a layer behind a norm, fp32 (n,)."""

    first: Tensor
    constant: Tensor


class HeadChain:
    """A solver step for one row.

    Raises:
        RuntimeError: the kernels cannot be compiled or loaded here.
    """

    def __init__(self, head: HeadWeights) -> None:
        few_tokens.load()
        self._head = head
        self._named = False
        steps = range(len(head.tail_norms))
        self._attention = [[_folded(block.attention.qkv, block.norms[step]) for step in steps] for block in head.blocks]
        self._fc1 = [_folded(block.fc1, head.plain) for block in head.blocks]
        self._decode = {
            slot: [_folded(one.decode1, norm) for norm in head.tail_norms] for slot, one in head.projectors.items()
        }

    @staticmethod
    def suits(h: HeadConfig, hidden: int) -> bool:
        """Whether the kernels are made for this head, with `hidden` numbers between the feed-forward's layers."""
        return few_tokens.suits(width=h.width, heads=h.heads, hidden=hidden, decoded=h.hidden)

    def takes(self, tokens: int, seen: list[Seen]) -> bool:
        """Whether it runs a row of so many action tokens with the state's, with what its blocks see.

        The first that it does not run is named in the log.
        """
        keys = sorted({one[0].shape[1] for one in seen if one is not None})
        fits = tokens <= MAX_TOKENS and all(k % 16 == 0 and k <= MAX_KEYS for k in keys)
        if not fits and not self._named:
            self._named = True
            logger.warning(
                "a request of %d action tokens with the state and %s keys runs without the action head's kernel chain:"
                " it takes up to %d tokens, and keys by 16 up to %d",
                *(tokens, " or ".join(map(str, keys)), MAX_TOKENS, MAX_KEYS),
            )
        return fits

    def rows(self, slot: int, state: Tensor) -> Tensor:
        """What a step's stream (1 + H, width) has beside the actions: the embedded state (1, width), and the offset."""
        return torch.cat((state.float(), self._head.projectors[slot].offset))

    def __call__(
        self, slot: int, x: Tensor, strength: Tensor, rows: Tensor, step: int, seen: list[Seen], dt: float
    ) -> Tensor:
        """One solver step: x (1, H, action width) -> the same behind it.

        Args:
            slot: of the row's projector.
            strength: (1, H, action width), the share of the velocity that is followed.
            rows: what `rows` gives.
        """
        head, own = self._head, self._head.projectors[slot]
        given = ops.linear(x[0], own.action1.weight, own.action_time[step], activation="silu")
        norms = [*(block.norms[step] for block in head.blocks), head.tail_norms[step]]
        stream = few_tokens.begin(rows, given, own.action2.weight, norms[0].weight)
        for index, (block, following) in enumerate(zip(head.blocks, norms[1:], strict=True)):
            stream = self._block(index, block, step, stream, following.weight, seen[index])
        folded = self._decode[slot][step]
        hidden = few_tokens.relu(stream, own.decode1.weight, folded.first, folded.constant, norms[-1].eps)
        return torch.addcmul(x, own.decode2(hidden[None, 1:]), strength, value=dt)

    def _block(self, index: int, block: ActionBlock, step: int, stream: Stream, scale: Tensor, seen: Seen) -> Stream:
        attention, plain = block.attention, self._head.plain
        folded = self._attention[index][step]
        eps = block.norms[step].eps
        attended = few_tokens.attend(stream, attention.qkv.weight, folded.first, folded.constant, eps, seen)
        stream = few_tokens.add(stream.x, attended, attention.out.weight, attention.out.bias, None)
        folded = self._fc1[index]
        hidden = few_tokens.gelu(stream, block.fc1.weight, folded.first, folded.constant, plain.eps)
        return few_tokens.add(stream.x, hidden, block.fc2.weight, block.fc2.bias, scale)


def _folded(layer: Linear, norm: Norm) -> _Folded:
    weight = layer.weight.float()
    constant = weight @ norm.bias
    return _Folded(weight @ norm.weight, constant if layer.bias is None else constant + layer.bias.float())
