"""Tickets of one rank in the order they are due: the instants in flat arrays, apart from the tickets themselves."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

BLOCK = 512
"""Tickets of a block after a split; one of twice as many is split, one of a quarter is joined to its neighbour."""


class DueList(Generic[T]):
    """A sorted sequence of (due, order, ticket), by due instant and among equals by order.

    A decision looks at the instants of more than a hundred tickets and takes a few of them. So instants lie side by
    side in arrays: looking at them touches no ticket, which in a long queue would be a cache miss each.

    With n tickets each operation takes O(log n) comparisons, a move within one block, and a look at up to n / 128
    block lengths. Among equal instants the orders must grow with each `add`.
    """

    __slots__ = ("_dues", "_lasts", "_length", "_orders", "_tickets")

    def __init__(self) -> None:
        self._dues: list[array[float]] = []
        self._orders: list[array[int]] = []
        self._tickets: list[list[T]] = []
        self._lasts: list[float] = []  # the last due instant of each block
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        for block in self._tickets:
            yield from block

    def add(self, due: float, order: int, ticket: T) -> None:
        """Inserts a ticket; `order` is larger than that of every one that is due at the same instant."""
        self._length += 1
        if not self._dues:
            self._dues.append(array("d", (due,)))
            self._orders.append(array("q", (order,)))
            self._tickets.append([ticket])
            self._lasts.append(due)
            return
        block = bisect_right(self._lasts, due)
        if block == len(self._lasts):
            block -= 1
            self._lasts[block] = due
        dues = self._dues[block]
        index = bisect_right(dues, due)
        dues.insert(index, due)
        self._orders[block].insert(index, order)
        self._tickets[block].insert(index, ticket)
        if len(dues) >= 2 * BLOCK:
            self._split(block)

    def remove(self, due: float, order: int) -> None:
        """Takes out the ticket of this due instant and order. Raises ValueError where there is none."""
        for block in range(bisect_left(self._lasts, due), len(self._lasts)):
            dues = self._dues[block]
            first = bisect_left(dues, due)
            last = bisect_right(dues, due, first)
            index = bisect_left(self._orders[block], order, first, last)
            if index < last and self._orders[block][index] == order:
                self._delete(block, index, index + 1)
                return
            if last < len(dues):
                break
        raise ValueError(f"no ticket is due at {due} with order {order}")

    def up_to(self, due: float) -> int:
        """How many tickets are due at this instant or before."""
        block = bisect_right(self._lasts, due)
        before = sum(map(len, self._dues[:block]))
        return before if block == len(self._lasts) else before + bisect_right(self._dues[block], due)

    def before(self, due: float) -> int:
        """How many tickets are due before this instant."""
        block = bisect_left(self._lasts, due)
        earlier = sum(map(len, self._dues[:block]))
        return earlier if block == len(self._lasts) else earlier + bisect_left(self._dues[block], due)

    def dues(self, position: int, limit: int) -> list[float]:
        """The due instants of up to `limit` tickets from `position` on."""
        found: list[float] = []
        for block in self._dues:
            if position >= len(block):
                position -= len(block)
                continue
            found.extend(block[position : position + limit - len(found)])
            if len(found) == limit:
                break
            position = 0
        return found

    def tickets(self, position: int, size: int) -> list[T]:
        """Up to `size` tickets from `position` on."""
        found: list[T] = []
        for block in self._tickets:
            if position >= len(block):
                position -= len(block)
                continue
            found.extend(block[position : position + size - len(found)])
            if len(found) == size:
                break
            position = 0
        return found

    def first(self) -> tuple[float, int, T] | None:
        """(due, order, ticket) of the one that is due first."""
        return (self._dues[0][0], self._orders[0][0], self._tickets[0][0]) if self._length else None

    def drop(self, position: int, size: int) -> None:
        """Takes out `size` tickets from `position` on; there must be so many."""
        while size:
            block, index = 0, position
            while index >= len(self._dues[block]):
                index -= len(self._dues[block])
                block += 1
            taken = min(size, len(self._dues[block]) - index)
            self._delete(block, index, index + taken)
            size -= taken  # what is left has moved up to `position`

    def _delete(self, block: int, start: int, end: int) -> None:
        dues = self._dues[block]
        del dues[start:end]
        del self._orders[block][start:end]
        del self._tickets[block][start:end]
        self._length -= end - start
        if not dues:
            self._forget(block)
            return
        self._lasts[block] = dues[-1]
        if len(dues) < BLOCK // 4 and len(self._dues) > 1:
            self._join(min(block, len(self._dues) - 2))

    def _join(self, block: int) -> None:
        """Puts a block and the next one together, and in two again where that is long."""
        following = block + 1
        self._dues[block].extend(self._dues[following])
        self._orders[block].extend(self._orders[following])
        self._tickets[block].extend(self._tickets[following])
        self._lasts[block] = self._lasts[following]
        self._forget(following)
        if len(self._dues[block]) >= 2 * BLOCK:
            self._split(block)

    def _split(self, block: int) -> None:
        half = len(self._dues[block]) // 2
        dues, orders, tickets = self._dues[block], self._orders[block], self._tickets[block]
        self._dues.insert(block + 1, dues[half:])
        self._orders.insert(block + 1, orders[half:])
        self._tickets.insert(block + 1, tickets[half:])
        del dues[half:], orders[half:], tickets[half:]
        self._lasts[block] = self._dues[block][-1]
        self._lasts.insert(block + 1, self._dues[block + 1][-1])

    def _forget(self, block: int) -> None:
        del self._dues[block]
        del self._orders[block]
        del self._tickets[block]
        del self._lasts[block]
