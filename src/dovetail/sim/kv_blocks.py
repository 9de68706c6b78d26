"""The KV blocks of a simulated device, kept as a worker keeps them: each instance has a production block pool, whose
assertions fail where a node promises more blocks than there are. Prefixes are not reused here.

    StartResize   the pool gets its new size at once; blocks beyond the end are relocated (`ModelRunner.resize`)
    turn begins   each request of it gets the blocks of what will be computed (`Scheduler.turn_of`)
    turn ends     who had the last token lets go of its blocks (`Scheduler.complete`)
    Leave         so does who goes elsewhere (`ModelRunner.drop`)
"""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.node.events import StartResize, Turn
from dovetail.node.instance import Instance
from dovetail.node.work import Work
from dovetail.policy.placement import Hosting
from dovetail.sched.blocks import BlockPool


class KvBlocks:
    """Of one device."""

    def __init__(self) -> None:
        self._pools: dict[int, BlockPool] = {}  # by instance
        self._tables: dict[int, dict[int, list[int]]] = {}  # by instance, by request: its blocks

    def resize(self, command: StartResize, hosting: Hosting) -> None:
        num_blocks = command.new_bytes // (hosting.kv_bytes_per_token * hosting.block_tokens)
        pool = self._pools.get(command.instance)
        if pool is None:
            pool = self._pools[command.instance] = BlockPool(0, hosting.block_tokens)
        if num_blocks < pool.target:
            places = dict(pool.relocate(num_blocks))
            for blocks in self._tables.get(command.instance, {}).values():
                blocks[:] = [places.get(block, block) for block in blocks]
        pool.resize(num_blocks)
        assert pool.committed == num_blocks
        pool.check()

    def begin(self, turn: Turn) -> None:
        instance = turn.instance
        for share in turn.prompts:
            self._hold(instance, share.work, share.start + share.tokens)
        for id in turn.decoding:
            work = instance.running[id]
            self._hold(instance, work, work.input_tokens + instance.produced(work))

    def _hold(self, instance: Instance, work: Work, tokens: int) -> None:
        """Blocks for so many tokens of it."""
        pool = self._pools[instance.id]
        blocks = self._tables.setdefault(instance.id, {}).setdefault(work.id, [])
        missing = pool.blocks_for(tokens) - len(blocks)
        if missing > 0:
            granted = pool.allocate(missing)
            assert granted is not None, (
                f"instance {instance.id}: request {work.id} needs {missing} more blocks of KV for {tokens} tokens, and "
                f"{pool.num_available} of {pool.target} are free"
            )
            blocks += granted

    def release(self, instance: int, requests: Iterable[int]) -> None:
        tables = self._tables.get(instance, {})
        for request in requests:
            blocks = tables.pop(request, None)
            if blocks:
                self._pools[instance].release(blocks)

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
