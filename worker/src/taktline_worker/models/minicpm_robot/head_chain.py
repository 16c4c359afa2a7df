"""The action head for one robot on Hopper: its blocks as a chain of overlapping kernels (action_block.cu)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from taktline_kernels import compiling
from taktline_kernels.cuda import action_block as kernels
from taktline_kernels.cuda.action_block import GELU, HEAD_DIM, MAX_KEYS, MAX_TOKENS, RESIDUAL, ROWS, WIDTH, Product
from taktline_kernels.triton_impl.action_rows import rows_scaled
from taktline_kernels.triton_impl.small_linear import parts_of
from torch import Tensor

from taktline_worker.layers import Linear, Norm
from taktline_worker.models.minicpm_robot.config import HeadConfig
from taktline_worker.models.minicpm_robot.head_weights import ActionBlock, Bank, HeadWeights

logger = logging.getLogger(__name__)

_THIRD = {"block_n": 64, "block_k": 256, "split": 3, "num_warps": 4, "num_stages": 1, "copy": 1}
"""How the action encoder's last layer is cut."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A matrix as its kernel reads it, and what is added behind it, fp32: (n,), or (steps, n) behind a step's norm."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class _Block:
    """One block; `scale` (steps, width) is of the norm that follows it."""

    q: _Layer
    out: _Layer
    fc1: _Layer
    fc2: _Layer
    scale: Tensor


class HeadChain:
    """What `modules.begin` and `modules.transform` do around a step's blocks, for one row.

    Five kernels a block that attends to itself, four where it attends to the features. It owns the buffers between
    them: one request at a time.

    Raises:
        RuntimeError: the kernels cannot be compiled or loaded here.
    """

    def __init__(self, head: HeadWeights, h: HeadConfig) -> None:
        self._head, self._h = head, h
        width, mlp = h.width, len(head.blocks[0].fc1.weight)
        self._out = Product(RESIDUAL, width, columns=32, split=4)
        self._fc2 = Product(RESIDUAL, mlp, columns=64, split=8)
        # Of a row's sum of squares there is a part for each tile of the product that wrote it.
        parts, between = (_padded(width // product.columns) for product in (self._fc2, self._out))
        self._read, self._fc1 = Product(ROWS, width, parts=parts), Product(GELU, width, parts=between)
        with compiling.together():
            for product in (self._out, self._fc2, self._read, self._fc1):
                kernels.load(product)
            kernels.load_attentions(width)
        self._named = False
        following = [block.norms for block in head.blocks[1:]] + [head.tail_norms]
        self._blocks = [self._pack(*pair) for pair in zip(head.blocks, following, strict=True)]
        self._tail = _Layer(self._read.pack(head.tail.weight), _behind(head.tail_norms, head.tail))

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=head.tail.weight.device)

        self._stream, self._heads = zeros(MAX_TOKENS, width), zeros(MAX_TOKENS, 3, h.heads, HEAD_DIM)
        self._scaled, self._attended, self._hidden = (zeros(MAX_TOKENS * n) for n in (width, width, mlp))
        self._last = zeros(MAX_TOKENS, len(head.tail.weight))
        self._squares = zeros(parts, MAX_TOKENS, dtype=torch.float32)
        self._between = zeros(between, MAX_TOKENS, dtype=torch.float32)
        self._ones = zeros(width, dtype=torch.float32) + 1.0

    def _pack(self, block: ActionBlock, following: tuple[Norm, ...]) -> _Block:
        q = block.q.weight
        packed = kernels.pack_queries(q) if len(q) == self._h.width else self._read.pack(q)
        out, fc1, fc2 = (
            _Layer(product.pack(layer.weight), _bias(layer))
            for product, layer in ((self._out, block.out), (self._fc1, block.fc1), (self._fc2, block.fc2))
        )
        scale = torch.stack([norm.weight for norm in following])
        return _Block(_Layer(packed, _behind(block.norms, block.q)), out, fc1, fc2, scale)

    def covers(self, valid: Tensor) -> bool:
        """Whether a batch of this mask (B, 1, 1, S) runs in it: one row, and keys that its attention holds.

        The first row alone that has more is named in the log.
        """
        rows, slots = valid.shape[0], valid.shape[3]
        if rows == 1 and slots > MAX_KEYS and not self._named:
            self._named = True
            logger.warning(
                "a request of %d slots runs without the action head's kernel chain: it holds %d", slots, MAX_KEYS
            )
        return rows == 1 and slots <= MAX_KEYS

    def begin(self, bank: Bank, hidden: Tensor, step: int) -> None:
        """The tokens of a step from what the bank's third layer reads, (1, H, width)."""
        parts = parts_of(hidden, bank.third.weight, _THIRD)
        scale = self._head.blocks[0].norms[step].weight
        rows_scaled(parts, bank.rows, scale, self._stream, self._scaled, self._squares)

    def run(self, step: int, seen: list[tuple[Tensor, Tensor] | None], valid: Tensor) -> Tensor:
        """(1, H, n), what the decoder reads of the tokens that `begin` has left.

        Args:
            seen: for each block what `modules.memories` gave.
            valid: bool (1, S), which features are the row's own.
        """
        tokens = self._h.future + self._h.horizon
        for index, (own, block, memory) in enumerate(zip(self._blocks, self._head.blocks, seen, strict=True)):
            eps = block.norms[step].eps
            if memory is None:
                self._read_stream(self._read, own.q, own.q.bias[step], eps, self._squares, self._heads)
                q, k, v = self._heads[:tokens].unbind(1)
                kernels.attention(q, k, v, self._attended)
            else:
                k, v = (part[0] for part in memory)
                given = (own.q.weight, own.q.bias[step], self._scaled, self._squares, k, v, valid[0], self._attended)
                # These kernels start when all but the one before them has ended: the first may be behind the memory's.
                kernels.ask(*given, tokens, eps, early=step > 0 or index > 0)
            self._add(self._out, own.out, self._attended, self._between, self._ones)
            self._read_stream(self._fc1, own.fc1, own.fc1.bias, self._head.plain.eps, self._between, self._hidden)
            self._add(self._fc2, own.fc2, self._hidden, self._squares, own.scale[step])
        eps = self._head.tail_norms[step].eps
        self._read_stream(self._read, self._tail, self._tail.bias[step], eps, self._squares, self._last)
        return self._last[None, self._h.future : tokens]

    def _read_stream(
        self, product: Product, layer: _Layer, bias: Tensor, eps: float, squares: Tensor, output: Tensor
    ) -> None:
        """A layer of the stream's norm."""
        tokens, width = self._h.future + self._h.horizon, self._h.width
        given = {"input": self._scaled, "weights": layer.weight, "bias": bias, "squares": squares, "output": output}
        kernels.run(product, len(bias), tokens, width, eps, **given)

    def _add(self, product: Product, layer: _Layer, given: Tensor, squares: Tensor, scale: Tensor) -> None:
        """A layer of `given`, added to the stream; `scale` is of the norm behind it."""
        tokens, width = self._h.future + self._h.horizon, self._h.width
        read = {"input": given, "weights": layer.weight, "bias": layer.bias, "scale": scale}
        written = {"output": self._stream, "scaled": self._scaled, "squares_out": squares}
        kernels.run(product, width, tokens, width, 0.0, **read, **written)


def _padded(parts: int) -> int:
    """Parts that a product reads, of which those past the written ones stay zero."""
    return -(-parts // 16) * 16


def _bias(layer: Linear) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight), dtype=torch.float32) if layer.bias is None else layer.bias.float()


def _behind(norms: tuple[Norm, ...], layer: Linear) -> Tensor:
    """fp32 (steps, n): what each step's norm adds behind the layer, and the layer's own bias.

    The norm's multiplier has gone into what the layer reads, and its factor comes behind.
    """
    return torch.stack([norm.bias for norm in norms]) @ layer.weight.float().t() + _bias(layer)


def make_chain(head: HeadWeights, h: HeadConfig) -> HeadChain | None:
    """The chain on a Hopper GPU, where the head's dimensions have one."""
    if (h.width, h.width // h.heads) != (WIDTH, HEAD_DIM) or h.future + h.horizon > MAX_TOKENS:
        reason = f"it is written for a width of {WIDTH}, heads of {HEAD_DIM} and at most {MAX_TOKENS} tokens"
    else:
        try:
            return HeadChain(head, h)
        except RuntimeError as error:
            reason = f"it cannot be compiled or loaded here: {error}"
    logger.warning("the action head's kernel chain is not used: %s", reason)
    return None
