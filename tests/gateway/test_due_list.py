"""The sorted list of a rank against a plain one, through splits and joins of its blocks; and what a decision skips."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from taktline_gateway import batching, due_list
from taktline_gateway.batching import weigh_batch
from taktline_gateway.due_list import DueList
from taktline_gateway.service_times import ServiceTimes

from tests.gateway.simulated_clock import service_times, ticket


class Plain:
    """The same in the plainest way."""

    def __init__(self) -> None:
        self.rows = []

    def add(self, due, order, one) -> None:
        self.rows.append((due, order, one))
        self.rows.sort(key=lambda row: row[:2])

    def up_to(self, due) -> int:
        return sum(row[0] <= due for row in self.rows)

    def before(self, due) -> int:
        return sum(row[0] < due for row in self.rows)


def same(found: DueList, plain: Plain, rng: random.Random) -> None:
    assert len(found) == len(plain.rows)
    assert list(found) == [row[2] for row in plain.rows]
    due = rng.choice([0.0, 1.0, 2.0, 3.0, 9.0])
    assert (found.up_to(due), found.before(due)) == (plain.up_to(due), plain.before(due))
    position, size = rng.randrange(len(plain.rows) + 1), rng.randrange(1, 40)
    chosen = plain.rows[position : position + size]
    assert found.dues(position, size) == [row[0] for row in chosen]
    assert found.tickets(position, size) == [row[2] for row in chosen]
    assert found.first() == (plain.rows[0] if plain.rows else None)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([2, 4, 16]), st.sampled_from([1, 4, 1000]))
def test_it_is_a_sorted_list(seed, block, distinct):
    """With blocks of a few, and with all due at the same instant, as a synchronised fleet is."""
    rng = random.Random(seed)
    before, due_list.BLOCK = due_list.BLOCK, block
    try:
        found, plain = DueList(), Plain()
        for order in range(1, 200):
            action = rng.random()
            if action < 0.6 or not plain.rows:
                due = float(rng.randrange(distinct))
                one = ticket(order, due)
                found.add(due, order, one)
                plain.add(due, order, one)
            elif action < 0.8:
                due, gone, _ = plain.rows.pop(rng.randrange(len(plain.rows)))
                found.remove(due, gone)
            else:
                position = rng.randrange(len(plain.rows))
                size = rng.randrange(1, len(plain.rows) - position + 1)
                del plain.rows[position : position + size]
                found.drop(position, size)
            if order % 5 == 0:
                same(found, plain, rng)
        same(found, plain, rng)
        assert all(found._dues), "no block is empty"
        assert found._lasts == [block_dues[-1] for block_dues in found._dues]
    finally:
        due_list.BLOCK = before


def test_what_is_not_there_cannot_be_removed():
    found = DueList()
    with pytest.raises(ValueError, match="no ticket is due"):
        found.remove(1.0, 1)
    found.add(1.0, 1, ticket("a", 1.0))
    for due, order in ((1.0, 2), (2.0, 1), (0.5, 1)):
        with pytest.raises(ValueError, match="no ticket is due"):
            found.remove(due, order)
    assert len(found) == 1


def test_a_long_queue_that_drains_from_its_head_keeps_its_blocks_whole():
    found = DueList()
    for order in range(10_000):
        found.add(float(order % 977), order, ticket(order, 1.0))
    while len(found) > 100:
        found.drop(0, 32)
    assert len(found._dues) <= 2


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(0.001, 0.4), min_size=1, max_size=60),
    st.floats(0.0, 400.0),
    st.integers(0, 50),
    st.sampled_from([0.0, 50.0, 250.0]),
    st.sampled_from([0.0, 1.0, 8.0]),
)
def test_what_is_skipped_could_not_have_been_chosen(deadlines, rate_hz, beyond, price_hz, patience_hz):
    deadlines, times = sorted(deadlines), service_times()

    def choose():
        return weigh_batch(deadlines, 0.0, times, 8, rate_hz, beyond, price_hz, patience_hz=patience_hz)

    chosen = choose()
    before, batching._least_cost = batching._least_cost, lambda *_: float("-inf")
    try:
        assert choose() == chosen
        # Who follows might take no time at all: hardly a candidate is skipped.
        with mock.patch.object(ServiceTimes, "best_rate", 1e9):
            assert choose() == chosen
    finally:
        batching._least_cost = before
