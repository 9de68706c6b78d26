"""The KV blocks of a simulated device, kept as a worker keeps them: each instance has a production block pool, whose
assertions fail where a node promises more blocks than there are, and which finds prefixes as a server's does.

    StartResize   the pool gets its new size at once; blocks beyond the end are relocated (`ModelRunner.resize`)
    turn begins   each request of it gets the blocks of what will be computed (`Scheduler.turn_of`)
    turn ends     full blocks are offered as prefixes; who had the last token lets go of its blocks
                  (`Scheduler.complete`)
    Leave         so does who goes elsewhere (`ModelRunner.drop`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dovetail.node.events import StartResize, Turn
from dovetail.node.instance import Instance
from dovetail.policy.parts import Share
from dovetail.policy.placement import Hosting
from dovetail.policy.work import Work
from dovetail.sched.blocks import ROOT_KEY, BlockPool, PrefixKey

STREAM_TOKENS = 1 << 24  # more than any request has: the numbers of a stream's tokens are its own


class Text(NamedTuple):
    """What a request's tokens are: equal streams are equal text from the beginning."""

    prompt: int  # stream of its prompt
    answer: int  # and of what follows: the same one in a conversation, whose next prompt goes on with the answer

    def tokens(self, work: Work, count: int) -> list[int]:
        prompt, answer = self.prompt * STREAM_TOKENS, self.answer * STREAM_TOKENS
        given = min(work.input_tokens, count)
        return [*range(prompt, prompt + given), *range(answer + given, answer + count)]


class Table:
    """One request's blocks."""

    __slots__ = ("blocks", "computed", "last_key", "num_cached")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.computed = 0  # tokens that will be when the turn under way has ended
        self.num_cached = 0  # leading blocks that are offered for reuse
        self.last_key: PrefixKey = ROOT_KEY


class KvBlocks:
    """Of one device."""

    def __init__(self, texts: Mapping[int, Text] | None = None) -> None:
        self._texts = texts or {}  # by request; one without has a text of its own
        self._pools: dict[int, BlockPool] = {}  # by instance
        self._tables: dict[int, dict[int, Table]] = {}  # by instance, by request

    def resize(self, command: StartResize, hosting: Hosting) -> None:
        num_blocks = command.new_bytes // (hosting.kv_bytes_per_token * hosting.block_tokens)
        pool = self._pools.get(command.instance)
        if pool is None:
            pool = self._pools[command.instance] = BlockPool(0, hosting.block_tokens)
        if num_blocks < pool.target:
            places = dict(pool.relocate(num_blocks))
            for table in self._tables.get(command.instance, {}).values():
                table.blocks[:] = [places.get(block, block) for block in table.blocks]
        pool.resize(num_blocks)
        assert pool.committed == num_blocks
        pool.check()

    def cached_tokens(self, instance: int, work: Work) -> int:
        pool = self._pools.get(instance)
        if pool is None or work.id not in self._texts:
            return 0
        tokens = self._texts[work.id].tokens(work, work.known_tokens)
        return pool.cached_tokens(tokens, len(tokens) - 1)

    def begin(self, turn: Turn) -> Turn:
        """Returns what is computed in fact: the prefix cache may have more of a prompt than when the node asked, or
        less."""
        instance = turn.instance
        for id in turn.decoding:
            work = instance.running[id]
            self._hold(instance, work, work.input_tokens + instance.produced(work))
        prompts = tuple([self._compute(instance, share) for share in turn.prompts])
        return turn._replace(prompts=prompts) if prompts != turn.prompts else turn

    def _compute(self, instance: Instance, share: Share) -> Share:
        work, text = share.work, self._texts.get(share.work.id)
        if text is None:
            self._hold(instance, work, share.start + share.tokens)
            return share
        tables = self._tables.setdefault(instance.id, {})
        if work.id not in tables:
            table = tables[work.id] = Table()
            tokens = text.tokens(work, work.known_tokens)
            table.blocks, table.last_key = self._pools[instance.id].match(tokens, len(tokens) - 1)
            table.num_cached = len(table.blocks)
            table.computed = table.num_cached * instance.hosting.block_tokens
        start = tables[work.id].computed
        count = min(share.tokens + share.is_last, work.known_tokens - start)  # quotas of the last part are one larger
        self._hold(instance, work, start + count)
        return Share(work, start, count)

    def _hold(self, instance: Instance, work: Work, tokens: int) -> None:
        """Blocks for so many tokens of it."""
        pool = self._pools[instance.id]
        table = self._tables.setdefault(instance.id, {}).setdefault(work.id, Table())
        table.computed = tokens
        missing = pool.blocks_for(tokens) - len(table.blocks)
        if missing > 0:
            granted = pool.allocate(missing)
            assert granted is not None, (
                f"instance {instance.id}: request {work.id} needs {missing} more blocks of KV for {tokens} tokens, and "
                f"{pool.num_available} of {pool.target} are free"
            )
            table.blocks += granted

    def end(self, turn: Turn, finished: Iterable[int]) -> None:
        """What the turn has filled may be reused from now on; these requests had their last token in it."""
        instance = turn.instance
        for id in turn.decoding:
            self._ended(instance, instance.running[id], is_last=id in finished)
        for share in turn.prompts:
            self._ended(instance, share.work, is_last=share.work.id in finished)

    def _ended(self, instance: Instance, work: Work, *, is_last: bool) -> None:
        table, text = self._tables.get(instance.id, {}).get(work.id), self._texts.get(work.id)
        if table is not None and text is not None:
            self._cache_full_blocks(table, text, work, self._pools[instance.id])
        if is_last:
            self.release(instance.id, (work.id,))

    @staticmethod
    def _cache_full_blocks(table: Table, text: Text, work: Work, pool: BlockPool) -> None:
        size = pool.block_size
        if (table.num_cached + 1) * size > table.computed:
            return
        tokens = text.tokens(work, table.computed)
        for first in range(table.num_cached * size, table.computed - size + 1, size):
            content = tuple(tokens[first : first + size])
            table.last_key = pool.seal(table.blocks[table.num_cached], table.last_key, content)
            table.num_cached += 1

    def release(self, instance: int, requests: Iterable[int]) -> None:
        tables = self._tables.get(instance, {})
        for request in requests:
            table = tables.pop(request, None)
            if table is not None and table.blocks:
                self._pools[instance].release(table.blocks)

    def forget(self, instance: int) -> None:
        """Its memory is free."""
        pool = self._pools.pop(instance, None)
        assert not self._tables.pop(instance, None), f"instance {instance} is gone, and requests hold blocks of it"
        assert pool is None or not pool.committed, f"instance {instance} is gone, and its pool is not"

    def clear(self) -> None:
        """The device is gone."""
        self._pools.clear()
        self._tables.clear()

    def check(self, instance: Instance) -> None:
        """What is held is at most what the node counts, when everything that it said has been carried out. A turn under
        way holds more already."""
        pool = self._pools.get(instance.id)
        if pool is None:
            return
        pool.check()
        used = instance.used_blocks()
        assert pool.num_held <= used or instance.in_turn, (
            f"instance {instance.id} holds {pool.num_held} blocks, the node counts {used}"
        )

    def check_end(self) -> None:
        assert not self._pools, f"pools of instances {sorted(self._pools)} remain"
