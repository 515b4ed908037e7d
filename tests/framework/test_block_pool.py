"""Both block pools under any order of calls: every block has one place, and real memory stays in one piece."""

import random
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schedlab.framework.block_pool import NOBODY, AdjacentPool, BlockPool


class Pools(RuleBasedStateMachine):
    """Tables that begin, grow and end, on a pool of either kind."""

    @initialize(kind=st.sampled_from([BlockPool, AdjacentPool]), num_blocks=st.integers(1, 24))
    def begin(self, kind, num_blocks):
        self.told = []
        self.pool = kind(num_blocks, self.told.extend)
        self.tables = []

    @precondition(lambda self: self.pool.free)
    @rule(data=st.data())
    def enter(self, data):
        self.tables.append(self.pool.take(data.draw(st.integers(1, len(self.pool.free)))))

    @precondition(lambda self: self.tables and self.pool.free)
    @rule(data=st.data())
    def extend(self, data):
        table = data.draw(st.sampled_from(self.tables))
        neighbour = table[-1] + 1
        follows = isinstance(self.pool, AdjacentPool) and neighbour in self.pool.free
        more = self.pool.take(data.draw(st.integers(1, len(self.pool.free))), table[-1])
        if follows:
            assert more[0] == neighbour
        table += more

    @precondition(lambda self: self.tables and len(self.tables) <= len(self.pool.free))
    @rule()
    def grow(self):
        before = [len(table) for table in self.tables]
        self.pool.grow(self.tables)
        assert [len(table) for table in self.tables] == [length + 1 for length in before]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        kept = data.draw(st.integers(0, len(table) - 1))
        self.told.clear()
        self.pool.give_back(table[kept:])
        assert self.told == table[kept:]
        if kept:
            self.tables.append(table[:kept])

    @rule()
    def nothing(self):
        assert self.pool.take(0) == [] == self.pool.take(0, NOBODY)

    @invariant()
    def every_block_is_in_one_place(self):
        if hasattr(self, "pool"):
            used = [block for table in self.tables for block in table]
            assert sorted([*used, *self.pool.free]) == list(range(self.pool.num_blocks))


TestPools = Pools.TestCase


def test_a_block_given_back_twice_is_noticed():
    pool = AdjacentPool(4)
    taken = pool.take(3)
    pool.give_back(taken[:1])
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(taken)


@pytest.mark.parametrize(("num_blocks", "least"), [(2048, 0.98), (512, 0.9)])
def test_requests_that_come_grow_and_go_stay_in_one_piece(num_blocks, least):
    """16 requests of up to 24 + 24 blocks: far fewer than there are, and three quarters of them."""
    dice, pool, neighbours, pairs = random.Random(0), AdjacentPool(num_blocks), 0, 0
    requests = []
    for _ in range(3000):
        while len(requests) < 16:
            requests.append((pool.take(dice.randint(1, 24)), dice.randint(0, 24)))
        chosen = dice.sample(requests, 8)
        pool.grow([table for table, growth in chosen if growth])
        requests = [(table, growth - ((table, growth) in chosen)) for table, growth in requests]
        for table, growth in requests:
            if growth <= 0:
                neighbours += sum(b == a + 1 for a, b in pairwise(table))
                pairs += len(table) - 1
                pool.give_back(table)
        requests = [(table, growth) for table, growth in requests if growth > 0]
    assert neighbours >= least * pairs > 10_000
