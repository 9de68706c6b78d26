"""The block pool under any order of operations: nothing is lost, nothing is handed out twice, the tail drains."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from dovetail.sched.blocks import ROOT_KEY, BlockPool

SIZE = 4


def seal_all(pool: BlockPool, blocks: list[int], tokens: list[int]) -> None:
    key = ROOT_KEY
    for i, block in enumerate(blocks[: len(tokens) // SIZE]):
        key = pool.seal(block, key, tuple(tokens[i * SIZE : (i + 1) * SIZE]))


def test_a_computed_prefix_is_found_again_and_only_whole_blocks_of_it() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(10))
    blocks = pool.allocate(3)
    assert blocks is not None
    seal_all(pool, blocks, tokens)
    pool.release(blocks)
    found, _ = pool.match(tokens, limit=9)
    assert found == blocks[:2]
    other, _ = pool.match([*tokens[:4], 99, 99, 99, 99], limit=8)
    assert other == blocks[:1]
    assert pool.match([99, *tokens[1:]], limit=9)[0] == []


def test_the_limit_keeps_the_last_token_to_compute() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(8))
    blocks = pool.allocate(2)
    assert blocks is not None
    seal_all(pool, blocks, tokens)
    found, _ = pool.match(tokens, limit=len(tokens) - 1)
    assert found == blocks[:1]


def test_cached_prefixes_give_way_oldest_first_when_blocks_run_out() -> None:
    pool = BlockPool(2, SIZE)
    for base in (0, 100):
        blocks = pool.allocate(1)
        assert blocks is not None
        seal_all(pool, blocks, [base] * SIZE)
        pool.release(blocks)
    assert pool.num_cached == 2
    assert pool.allocate(1) is not None
    assert pool.match([0] * SIZE, SIZE)[0] == []
    assert len(pool.match([100] * SIZE, SIZE)[0]) == 1


def test_equal_content_under_different_parents_is_not_confused() -> None:
    pool = BlockPool(8, SIZE)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first is not None
    assert second is not None
    seal_all(pool, first, [1] * SIZE + [7] * SIZE)
    seal_all(pool, second, [2] * SIZE + [7] * SIZE)
    assert pool.match([2] * SIZE + [7] * SIZE, 8)[0] == second


def test_shrinking_waits_for_held_blocks_and_no_longer() -> None:
    pool = BlockPool(8, SIZE)
    low, high = pool.allocate(4), pool.allocate(4)
    assert low is not None
    assert high is not None
    pool.resize(4)
    assert (pool.target, pool.committed) == (4, 8)
    pool.release(high[:3])
    assert pool.committed == 8, "the last block is still held"
    pool.release(high[3:])
    assert pool.committed == 4
    assert pool.allocate(1) is None
    pool.resize(6)
    assert pool.allocate(2) == [4, 5]


class PoolMachine(RuleBasedStateMachine):
    """Allocate, seal, match, release and resize in any order; the model is the list of what is held."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10, SIZE)
        self.holders: list[list[int]] = []

    @rule(target=held, count=st.integers(0, 6), content=st.integers(0, 2), sealed=st.booleans())
    def allocate(self, count: int, content: int, sealed: bool) -> list[int]:
        available = self.pool.num_available
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > available)
        if blocks is None:
            return []
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for holder in self.holders for block in holder}
        assert all(block < self.pool.target for block in blocks)
        if sealed:
            seal_all(self.pool, blocks, [content] * (SIZE * count))
        self.holders.append(blocks)
        return blocks

    @rule(target=held, content=st.integers(0, 2), limit=st.integers(0, 24))
    def match(self, content: int, limit: int) -> list[int]:
        blocks, _ = self.pool.match([content] * 24, limit)
        assert len(blocks) * SIZE <= limit
        self.holders.append(blocks)
        return blocks

    @rule(blocks=consumes(held))
    def release(self, blocks: list[int]) -> None:
        if blocks in self.holders:
            self.holders.remove(blocks)
            self.pool.release(blocks)

    @rule(size=st.integers(0, 16))
    def resize(self, size: int) -> None:
        self.pool.resize(size)
        assert self.pool.target == size

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check()
        held = {block for holder in self.holders for block in holder}
        assert self.pool.num_held == len(held)
        beyond = [block + 1 for block in held if block >= self.pool.target]
        assert self.pool.committed == max([self.pool.target, *beyond])


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
