"""KV blocks of one model as numbers: who holds which, which can be reused as a prefix, and where the pool ends.

Knows nothing of memory; the executor commits and releases pages to match `committed`.

    0 ............................ target .......... committed
    |  free | cached | held          |  held, retiring  |   not backed by memory

A block is free (in the heap, lowest first, so that the tail drains), cached (a reusable prefix that nobody holds, least
recently used first to go) or held (reference count > 0). Shrinking lowers `target` at once; a held block beyond it
retires when its last holder lets go, and `committed` follows. Always: free + cached + held below target == target.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence

# Of a block's content and of all that comes before it. A sequence's first block has a root as its parent: the salt of
# its request, so that equal text is a prefix only for those who have the same salt, or ROOT_KEY without one; with an
# adapter, that and the salt.
PrefixKey = int | str | tuple[str, str]
ROOT_KEY: PrefixKey = 0


class BlockPool:
    """Reference-counted blocks with prefix reuse. A prefix is found by content, block by block: the index maps
    (key of the parent block, tokens of the block) to a block, so equal keys mean equal text and nothing is hashed away.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 0
        assert block_size > 0
        self.block_size = block_size
        self.target = num_blocks
        self.committed = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))  # a sorted list is a heap
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._index: dict[tuple[PrefixKey, tuple[int, ...]], tuple[int, int]] = {}  # -> (block, key)
        self._content: dict[int, tuple[PrefixKey, tuple[int, ...]]] = {}  # block -> its entry in the index
        self._next_key = 1

    # What there is

    @property
    def num_available(self) -> int:
        """Blocks that allocate() could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return sum(1 for count in self._references if count > 0)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Holding and letting go

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` fresh blocks, or none at all if there are not enough."""
        if count > self.num_available:
            return None
        blocks = [heapq.heappop(self._free) if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            assert self._references[block] == 0
            assert block < self.target
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks. The last ones become the first to be evicted: prefixes outlive tails."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._let_go(block)
        self._trim()

    def match(self, tokens: Sequence[int], limit: int, root: PrefixKey = ROOT_KEY) -> tuple[list[int], PrefixKey]:
        """Hold the longest cached prefix of `tokens` within `limit` tokens; returns its blocks and the last key."""
        found = list(self._matching(tokens, limit, root))
        for block, _ in found:
            self._hold(block)
        return [block for block, _ in found], found[-1][1] if found else root

    def cached_tokens(self, tokens: Sequence[int], limit: int, root: PrefixKey = ROOT_KEY) -> int:
        """How many tokens `match` would find, without holding them."""
        return sum(self.block_size for _ in self._matching(tokens, limit, root))

    def _matching(self, tokens: Sequence[int], limit: int, root: PrefixKey) -> Iterator[tuple[int, PrefixKey]]:
        """The blocks of the longest cached prefix, each with its key."""
        key = root
        for start in range(0, limit - self.block_size + 1, self.block_size):
            entry = self._index.get((key, tuple(tokens[start : start + self.block_size])))
            if entry is None:
                return
            yield entry
            key = entry[1]

    def seal(self, block: int, parent_key: PrefixKey, tokens: tuple[int, ...]) -> int:
        """Offer a full, computed block for reuse. Returns the key under which its content is known."""
        assert len(tokens) == self.block_size
        assert self._references[block] > 0
        content = (parent_key, tokens)
        known = self._index.get(content)
        if known is not None:  # computed twice at the same time: the first one serves as the prefix
            return known[1]
        key = self._next_key
        self._next_key += 1
        self._index[content] = (block, key)
        self._content[block] = content
        return key

    def key_of(self, block: int) -> PrefixKey | None:
        """Of a block that is offered as a prefix: no other text has had it or will. None = it is not."""
        content = self._content.get(block)
        return None if content is None else self._index[content][1]

    # Growing and shrinking

    def resize(self, num_blocks: int) -> None:
        """Move the end of the pool. Growing takes effect at once; `committed` says how far shrinking has come."""
        if num_blocks < self.target:
            self._drop_beyond(num_blocks)
        else:
            self._references.extend([0] * (num_blocks - len(self._references)))
            for block in range(self.target, num_blocks):
                if self._references[block] == 0:
                    heapq.heappush(self._free, block)
        self.target = num_blocks
        self.committed = max(self.committed, num_blocks)
        self._trim()

    def relocate(self, num_blocks: int) -> list[tuple[int, int]]:
        """Make room to end the pool at `num_blocks`: every held block beyond gets a place below. Returns (from, to)
        pairs; the caller copies the contents and renames the blocks in its tables before it calls `resize`."""
        moves: list[tuple[int, int]] = []
        self._drop_beyond(num_blocks)
        for block in range(num_blocks, self.target):
            if self._references[block]:
                assert self._free or self._cached, f"no room below {num_blocks} for what is held beyond it"
                place = heapq.heappop(self._free) if self._free else self._evict()
                self._rename(block, place)
                moves.append((block, place))
        self.target = num_blocks
        return moves

    def drop_cache(self) -> None:
        """Forget every prefix that nobody holds."""
        while self._cached:
            heapq.heappush(self._free, self._evict())

    def check(self) -> None:
        """The invariant of the drawing above."""
        held_below = sum(1 for count in self._references[: self.target] if count > 0)
        assert len(self._free) + len(self._cached) + held_below == self.target
        assert all(self._references[block] == 0 for block in self._free)
        assert all(self._references[block] == 0 for block in self._cached)
        assert self.target <= self.committed
        assert not any(self._references[self.committed :])

    # Inside

    def _hold(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def _let_go(self, block: int) -> None:
        if block >= self.target:
            self._forget(block)
        elif block in self._content:
            self._cached[block] = None
        else:
            heapq.heappush(self._free, block)

    def _rename(self, block: int, place: int) -> None:
        self._references[place], self._references[block] = self._references[block], 0
        content = self._content.pop(block, None)
        if content is not None:
            self._content[place] = content
            self._index[content] = (place, self._index[content][1])

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is not None:
            del self._index[content]

    def _drop_beyond(self, num_blocks: int) -> None:
        self._free = [block for block in self._free if block < num_blocks]
        heapq.heapify(self._free)
        for block in [block for block in self._cached if block >= num_blocks]:
            del self._cached[block]
            self._forget(block)

    def _trim(self) -> None:
        while self.committed > self.target and self._references[self.committed - 1] == 0:
            self.committed -= 1
