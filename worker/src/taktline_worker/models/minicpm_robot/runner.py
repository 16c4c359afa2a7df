"""The MiniCPM-RobotManip runner: rows to one batch, the backbone once, the head's keys once, then four predictions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from taktline_kernels.selector import Choice, default_selector
from torch import Tensor

from taktline_worker.branches import Branch
from taktline_worker.models.minicpm_robot import modules
from taktline_worker.models.minicpm_robot.batch import MiniCpmBatch, MiniCpmRow, lay_out
from taktline_worker.models.minicpm_robot.config import HeadConfig, MiniCpmArchitecture
from taktline_worker.models.minicpm_robot.head_weights import HeadWeights, steps
from taktline_worker.models.minicpm_robot.prompt import MAX_TOKENS
from taktline_worker.models.minicpm_robot.weights import MiniCpmWeights

if TYPE_CHECKING:
    from taktline_worker.models.minicpm_robot.head_chain import HeadChain

logger = logging.getLogger(__name__)

_HOPPER = 9
MAX_SLOTS = 2 * MAX_TOKENS
"""Of a row: more than a prompt has tokens, as a graph's bucket has room beside them."""
StepObserver = Callable[[int, Tensor, Tensor], None]
"""Called with (step, noisy input, prediction), for tests that compare step by step."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """What the head knows before the backbone has answered: banks and states by embodiment, its first step's tokens.

    With a chain, the tokens lie in it.
    """

    banks: modules.Banks
    states: list[Tensor]
    x: Tensor
    tokens: modules.Tokens | None
    chain: HeadChain | None


class MiniCpmRunner:
    """Runs batches of mixed embodiments, image counts and prompt lengths; a row's answer is the one it gets alone.

    The rotation's tables are made once, for `MAX_SLOTS`: captured graphs read them where they are.
    """

    def __init__(self, weights: MiniCpmWeights, architecture: MiniCpmArchitecture, image_token: int) -> None:
        self.weights = weights
        self.architecture = architecture
        self.device = weights.text.embedding.device
        self.image_token = image_token
        self._tables = tuple(table.to(self.device) for table in modules.rope_tables(architecture.text, MAX_SLOTS))
        self._chain = _head_chain(weights.head, architecture.head)

    @torch.inference_mode()
    def run(self, rows: Sequence[MiniCpmRow], observer: StepObserver | None = None) -> Tensor:
        """fp32 (B, H, action width) on the CPU."""
        return self.compute(lay_out(rows, self.image_token, self.device), observer).cpu()

    @torch.inference_mode()
    def compute(self, batch: MiniCpmBatch, observer: StepObserver | None = None) -> Tensor:
        """fp32 (B, H, action width) of a batch on the device; reads nothing back from it.

        What the head does before it reads the backbone's features runs beside the backbone.
        """
        branch = Branch(self.device, partial(self._begin, batch))
        return self.solve(batch, self.encode(batch), observer, branch)

    @torch.inference_mode()
    def encode(self, batch: MiniCpmBatch) -> Tensor:
        """The backbone's features (B, S, text width) after its final norm, in its own dtype."""
        return self.encode_text(batch, self.encode_images(batch))

    @torch.inference_mode()
    def encode_images(self, batch: MiniCpmBatch) -> Tensor:
        """(image tokens, text width) as `image_rows` counts them."""
        return modules.encode_images(self.weights.vision, self.architecture.vision, batch.patches).flatten(0, 1)

    @torch.inference_mode()
    def encode_text(self, batch: MiniCpmBatch, images: Tensor) -> Tensor:
        """The hybrid text stack over what `encode_images` gave.

        Raises:
            ValueError: rows of more than `MAX_SLOTS`.
        """
        a, weights = self.architecture, self.weights
        slots = batch.tokens.shape[1]
        if slots > MAX_SLOTS:
            raise ValueError(f"the network's rotation is made for up to {MAX_SLOTS} slots, not {slots}")
        cos, sin = (table[:slots] for table in self._tables)
        return modules.encode_text(weights.text, a.text, batch.tokens, batch.image_rows, images, cos, sin)

    @torch.inference_mode()
    def solve(
        self,
        batch: MiniCpmBatch,
        features: Tensor,
        observer: StepObserver | None = None,
        branch: Branch[_Begun] | None = None,
    ) -> Tensor:
        """Actions (B, H, action width) from features (B, S, text width), which the head reads in its own dtype.

        Each step mixes the noise with the last prediction and predicts the clean actions anew; no velocity is followed.

        Args:
            branch: of what `_begin` gives, where it runs elsewhere.
        """
        head, h = self.weights.head, self.architecture.head
        seen = modules.memories(head, h, features.to(self.weights.dtype))
        valid = batch.valid[:, 0, 0]
        begun = self._begin(batch) if branch is None else branch.join()
        found, x, tokens, chain = batch.noise, begun.x, begun.tokens, begun.chain
        shares = [share for share, _ in steps()[1:]] + [0.0]
        for step, share in enumerate(shares):
            noisy = x
            if step:
                tokens = self._tokens(begun.banks, begun.states, noisy, step, chain)
            if chain is not None:
                n = chain.run(step, seen, valid)
            elif tokens is not None:
                n = modules.transform(head, h, tokens, step, seen, valid)
            found, x = modules.decode(begun.banks, n, batch.noise, share)
            if observer is not None:
                observer(step, noisy, found)
        return found

    def _begin(self, batch: MiniCpmBatch) -> _Begun:
        banks = self._banks(batch)
        horizon = self.architecture.head.horizon
        # Whole rows, once a request: a kernel that adds them would else copy them in every step.
        states = [bank.state(batch.state[rows])[:, None].repeat(1, horizon, 1) for rows, bank in banks]
        x = batch.noise.to(self.weights.dtype)
        chain = self._chain if self._chain is not None and self._chain.covers(batch.valid) else None
        limit = "one row, in bf16 on Hopper"
        choice = Choice("blocks", f"the kernel chain is for {limit}") if chain is None else Choice("chain", limit)
        default_selector().note("head", {"batch": len(x), "tokens": horizon}, self.weights.dtype, x.device, choice)
        return _Begun(banks, states, x, self._tokens(banks, states, x, 0, chain), chain)

    def _tokens(
        self, banks: modules.Banks, states: list[Tensor], x: Tensor, step: int, chain: HeadChain | None
    ) -> modules.Tokens | None:
        """A step's tokens, or None where they lie in the chain."""
        if chain is None:
            return modules.begin(self.weights.head, self.architecture.head, banks, states, x, step)
        ((_, bank),) = banks
        chain.begin(bank, modules.encode_actions(bank, states[0], x, step), step)
        return None

    def _banks(self, batch: MiniCpmBatch) -> modules.Banks:
        """The rows of each embodiment and its bank; all rows of one embodiment need no index."""
        own = self.weights.head.banks
        distinct = sorted(set(batch.embodiments))
        if len(distinct) == 1:
            return [(slice(None), own[distinct[0]])]
        slots = torch.tensor(batch.embodiments)
        return [((slots == slot).nonzero()[:, 0].to(self.device), own[slot]) for slot in distinct]


def _head_chain(head: HeadWeights, h: HeadConfig) -> HeadChain | None:
    """The head's blocks as a chain of kernels, where this GPU and the head's dimensions have one."""
    weight = head.tail.weight
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(weight.device)[0] != _HOPPER:
        logger.warning("the action head's kernel chain is not used: it is written for Hopper GPUs")
        return None
    from taktline_worker.models.minicpm_robot.head_chain import make_chain  # imports what only a GPU's machine has

    return make_chain(head, h)
