"""The ranks that share one Cosmos3 policy: branches of guidance outside, ranks of one branch inside.

A rank's number is branch * branch_ranks + index. The ranks of a branch split either heads and columns (`tensor`: two
sums a layer) or the tokens (`sequence`: keys and values gathered once a layer, weights whole on each rank).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from taktline_protocol import ErrorCode, TaktlineError
from torch import Tensor
from torch import distributed as dist

from taktline_worker.models.cosmos3.config import Cosmos3Architecture

Split = Literal["tensor", "sequence"]
SHARE_FOR_WEIGHTS = 0.75
"""Of a GPU's memory; the rest is for the video coder, graphs and texts."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands.

    Attributes:
        branches: 2 where the two branches of guidance are on different ranks, else 1.
        branch: 0 conditional, 1 unconditional; 0 where both are here.
        ranks: ranks of one branch.
        index: of this rank among them.
        split: what the ranks of a branch share.
    """

    branches: int = 1
    branch: int = 0
    ranks: int = 1
    index: int = 0
    split: Split = "tensor"

    @property
    def rank(self) -> int:
        """Number of this process in the mesh."""
        return self.branch * self.ranks + self.index

    @property
    def shards(self) -> int:
        """Pieces that heads and MLP columns are cut into."""
        return self.ranks if self.split == "tensor" else 1

    @property
    def shard(self) -> int:
        """Which of them this rank has."""
        return self.index if self.split == "tensor" else 0

    @property
    def parts(self) -> int:
        """Pieces that the tokens are cut into."""
        return self.ranks if self.split == "sequence" else 1

    @property
    def part(self) -> int:
        """Which of them this rank has."""
        return self.index if self.split == "sequence" else 0


def place_of(rank: int, branches: int, ranks: int, split: Split = "tensor") -> Place:
    """Where process `rank` of branches * ranks stands. Raises ValueError for a number outside the mesh."""
    if not 0 <= rank < branches * ranks or branches not in (1, 2):
        raise ValueError(f"rank {rank} of {branches} x {ranks}")
    return Place(branches, rank // ranks, ranks, rank % ranks, split)


def better_split(weight_bytes: int, memory_bytes: int | None) -> Split:
    """What the ranks of a branch share where nobody says: the tokens, wherever each rank can hold the whole weights.

    On two H200 that is 1.10 (Nano) and 1.26 (Edge) times as fast as sharing the matrices; it exchanges less the more
    ranks there are (benchmarks/NOTES.md).

    Args:
        weight_bytes: of the whole policy.
        memory_bytes: of one rank's GPU; None on a CPU.
    """
    return "sequence" if memory_bytes is None or weight_bytes <= SHARE_FOR_WEIGHTS * memory_bytes else "tensor"


class Mesh(Protocol):
    """What the computation asks of the other ranks. Every rank must make the same calls."""

    @property
    def place(self) -> Place:
        """Where this rank stands."""

    @property
    def everyone(self) -> Mesh | None:
        """The ranks of both branches as one branch that shares the tokens, for steps without guidance.

        None where there is one branch, or where the ranks of one have a part of the weights each.
        """

    def sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to add up all shards' `x`, maybe in place; the call gives the sum, the same bits on each."""

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts to collect all parts' tokens: x (lanes, tokens, ...); the call gives (lanes, parts * tokens, ...)."""

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The conditional branch's `x` and the unconditional one's."""


class OneRank:
    """A mesh of one process."""

    place = Place()
    everyone = None

    def sum(self, x: Tensor) -> Callable[[], Tensor]:
        """The value itself."""
        return lambda: x

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """The value itself."""
        return lambda: x

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both branches are here, one behind the other."""
        first, second = x.chunk(2)
        return first, second


class ProcessGroupMesh:
    """The ranks of torch.distributed groups: NCCL, or gloo on CPUs. All ranks of the world construct it together."""

    everyone: Mesh | None = None

    def __init__(self, branches: int, ranks: int, split: Split = "tensor") -> None:
        self.place = place_of(dist.get_rank(), branches, ranks, split)
        if dist.get_world_size() != branches * ranks:
            raise ValueError(f"{dist.get_world_size()} processes for a mesh of {branches} x {ranks}")
        own: dict[str, dist.ProcessGroup] = {}
        # Each group is made by every process, its members or not.
        for branch in range(branches):
            group = dist.new_group([branch * ranks + index for index in range(ranks)])
            if branch == self.place.branch:
                own["branch"] = group
        for index in range(ranks):
            group = dist.new_group([branch * ranks + index for branch in range(branches)])
            if index == self.place.index:
                own["pair"] = group
        self._branch, self._pair = own["branch"], own["pair"]
        if branches == 2 and self.place.shards == 1:
            self.everyone = ProcessGroupMesh(1, branches * ranks, "sequence")

    def sum(self, x: Tensor) -> Callable[[], Tensor]:
        """See `Mesh`; what the caller does before it asks for the result runs meanwhile."""
        if self.place.shards == 1:
            return lambda: x
        x = x.contiguous()
        work = dist.all_reduce(x, group=self._branch, async_op=True)

        def result() -> Tensor:
            assert work is not None
            work.wait()
            return x

        return result

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """See `Mesh`; what the caller does before it asks for the result runs meanwhile."""
        parts = self.place.parts
        if parts == 1:
            return lambda: x
        # Gloo takes only the pieces one behind the other, in the first dimension.
        everyone = x.new_empty(parts * x.shape[0], *x.shape[1:])
        work = dist.all_gather_into_tensor(everyone, x.contiguous(), group=self._branch, async_op=True)

        def result() -> Tensor:
            assert work is not None
            work.wait()
            return everyone.view(parts, *x.shape).transpose(0, 1).flatten(1, 2)

        return result

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mesh`."""
        if self.place.branches == 2:
            pair = x.new_empty(2 * x.shape[0], *x.shape[1:])
            dist.all_gather_into_tensor(pair, x.contiguous(), group=self._pair)
            x = pair
        first, second = x.chunk(2)
        return first, second


def check_mesh(a: Cosmos3Architecture, place: Place, guided: bool) -> None:
    """Refuses a mesh that this model cannot be spread over.

    Raises:
        TaktlineError: CONFIG_INVALID where heads or MLP columns cannot be split evenly, or there is one branch only.
    """
    if place.branches == 2 and not guided:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "parallel.cfg is 2, and guidance is 1: there is no second branch",
            "set parallel.cfg to 1 and spread over parallel.tp, or set a guidance above 1",
        )
    for name, count in (("key heads", a.kv_heads), ("query heads", a.heads), ("MLP columns", a.mlp)):
        if count % place.shards:
            fitting = [n for n in range(1, a.kv_heads + 1) if not (a.kv_heads % n or a.heads % n or a.mlp % n)]
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"parallel.tp is {place.shards}, which does not divide the {count} {name}",
                f"set parallel.tp to one of {', '.join(map(str, fitting))}",
            )


def debug_checksum(x: Tensor) -> int:
    """A number that is the same on all ranks as long as they hold the same bits of fp32 `x`."""
    bits = x.detach().contiguous().view(torch.int32).to(torch.int64)
    weights = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits.flatten() * weights).sum())
