"""The ranks that share a search: which units are mine, and everybody's energies in the order of the units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

Told = TypeVar("Told", bound=msgspec.Struct)


class RankLostError(RuntimeError):
    """A collective failed: a rank is gone, or cannot be reached."""


class Mesh(Protocol):
    """Ranks that run the same search; each scores its units, all fit the same belief.

    Every call may raise RankLostError.
    """

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """All processes."""

    def gather(self, mine: Tensor, total: int) -> Tensor:
        """Energies (total, micro_batch) in the order of units from each rank's own, (`share(total)`, micro_batch)."""

    def agree(self, flags: Tensor) -> Tensor:
        """Rank 0's flags (int64, on the CPU), on every rank: what depends on a clock is decided once."""

    def send(self, value: Tensor) -> Tensor:
        """Rank 0's `value`; other ranks give a buffer of the same shape, dtype and device, which is filled."""


def tell(mesh: Mesh, message: msgspec.Struct) -> None:
    """Rank 0's part of `hear`: sends `message` as its length (int64) and its bytes."""
    body = msgspec.msgpack.encode(message)
    mesh.send(torch.tensor([len(body)], dtype=torch.int64))
    mesh.send(torch.frombuffer(bytearray(body), dtype=torch.uint8))


def hear(mesh: Mesh, kind: type[Told]) -> Told:
    """What rank 0 tells, on the other ranks."""
    length = mesh.send(torch.zeros(1, dtype=torch.int64))
    body = mesh.send(torch.zeros(int(length), dtype=torch.uint8))
    return msgspec.msgpack.decode(body.numpy().tobytes(), type=kind)


def share(rank: int, size: int, total: int) -> range:
    """Units of `rank`: every size-th one, so that the loads of any two ranks differ by one unit at most."""
    return range(rank, total, size)


class OneRank:
    """A mesh of one process."""

    rank = 0
    size = 1

    def gather(self, mine: Tensor, total: int) -> Tensor:
        """The energies themselves."""
        del total
        return mine

    def agree(self, flags: Tensor) -> Tensor:
        """The flags themselves."""
        return flags

    def send(self, value: Tensor) -> Tensor:
        """The value itself."""
        return value


class ProcessGroupMesh:
    """The ranks of a torch.distributed group (NCCL, or gloo on CPUs). Every rank must make the same calls.

    Args:
        group: of this process; None = all.
        control: group for CPU tensors (gloo) where `group` carries device tensors only; None = `group`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, control: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self._control = control if control is not None else self._group
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)

    def gather(self, mine: Tensor, total: int) -> Tensor:
        """See `Mesh`; ranks with fewer units pad, so that one collective of a fixed shape serves all of them."""
        rows = -(-total // self.size)
        padded = mine.new_zeros(rows, mine.shape[1])
        padded[: len(mine)] = mine
        everyone = mine.new_empty(self.size * rows, mine.shape[1])
        _together(dist.all_gather_into_tensor, everyone, padded, group=self._group)
        # Row k of rank r is unit k * size + r.
        return everyone.view(self.size, rows, -1).transpose(0, 1).reshape(self.size * rows, -1)[:total]

    def agree(self, flags: Tensor) -> Tensor:
        """See `Mesh`."""
        _together(dist.broadcast, flags, group=self._control, group_src=0)
        return flags

    def send(self, value: Tensor) -> Tensor:
        """See `Mesh`."""
        group = self._control if value.device == torch.device("cpu") else self._group
        _together(dist.broadcast, value, group=group, group_src=0)
        return value


def _together(collective: Callable[..., object], *tensors: Tensor, **options: Any) -> None:
    try:
        collective(*tensors, **options)
    except RuntimeError as error:  # all that torch.distributed raises for a closed connection, an abort or a timeout
        raise RankLostError(f"a collective of the process group failed: {error}") from error
