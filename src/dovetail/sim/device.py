"""A simulated device: answers turns, loads, unloads and resizes after a while, with the faults that struck it.

Replaces the physics only. It knows what the scheduler may not: how many tokens each request will produce.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from random import Random

from dovetail.node.events import AS_ASKED, Computed, StartLoad, StartResize, Turn
from dovetail.node.node import Node
from dovetail.policy.parts import Share
from dovetail.policy.placement import Hosting
from dovetail.policy.work import Work
from dovetail.sim.durations import Durations
from dovetail.sim.kv_blocks import KvBlocks
from dovetail.sim.tiers import Machine


class Device:
    def __init__(self, node: Node, outputs: dict[int, int], durations: Durations) -> None:
        self.node = node
        self.outputs = outputs  # request id → tokens that it will produce
        self.durations = durations
        self.slowdown = 1.0  # a fault: everything takes this much longer
        self.epoch = 0  # counts deaths: answers from before one are void
        self.stalled_until_s = 0.0  # a fault: nothing ends before
        self.failing_loads = 0  # a fault: this many further loads fail
        self.dies_telling = False  # a fault: it dies when it has told the next last token
        self.decode_turns = 0
        self.decode_tokens = 0
        self.link_free_s = 0.0
        self.machine: Machine | None = None  # where its weights come from; None = one rate for all
        self.blocks: KvBlocks | None = None  # None = they are not played
        self.drafts: Random | None = None  # None = decodes give one token each
        self.catalogue: dict[str, Hosting] = {}  # what its node offers, where that changes
        self._computed: dict[int, Turn] = {}  # by instance: what of its turn under way is computed in fact
        self._ends: dict[int, list[tuple[int, int]]] = {}  # instance → heap of (clock at which it may end, request)

    def turn_s(self, turn: Turn) -> float:
        if turn.decodes:
            self.decode_turns += 1
            self.decode_tokens += len(turn.decoding)
        if self.blocks is not None:
            turn = self._computed[turn.instance.id] = self.blocks.begin(turn)
        return self.durations.turn_s(self.node, turn) * self.slowdown

    def end(self, turn: Turn) -> tuple[list[int], Computed]:
        """Who gets the last token in the turn that ends now, and how far its prompts came."""
        if self.blocks is None:
            return self._finished(turn, {}), AS_ASKED
        actual = self._computed.pop(turn.instance.id)
        extra = {} if self.drafts is None else self._draw_extra(actual, self.drafts)
        done = self._finished(actual, extra)
        self.blocks.end(actual, done)
        asked, made = (sum(share.tokens for share in one.prompts) for one in (turn, actual))
        is_typical = made == asked  # else some was in the cache; wherever the prompts began, as in a worker
        computed = {one.work.id: one.start + one.tokens for one in actual.prompts} or None
        return done, Computed(computed, is_typical, extra=extra, draft_rows=sum(extra.values()))

    def _finished(self, turn: Turn, extra: Mapping[int, int]) -> list[int]:
        done = [share.work.id for share in turn.prompts if self._ends_with_prompt(turn, share)]
        return done + self._decoded(turn, extra) if turn.decodes else done

    def _draw_extra(self, turn: Turn, drafts: Random) -> dict[int, int]:
        """What drafts give: tokens beyond one, within the block that the request has."""
        instance, found = turn.instance, dict[int, int]()
        for id in turn.decoding:
            work = instance.running[id]
            produced = instance.produced(work)
            room = -(work.input_tokens + produced) % instance.hosting.block_tokens
            count = min(drafts.choice((0, 0, 1, 3)), room, self.outputs[id] - produced - 1)
            if count > 0:
                found[id] = count
        return found

    def _decoded(self, turn: Turn, extra: Mapping[int, int]) -> list[int]:
        instance, ends = turn.instance, self._ends.get(turn.instance.id)
        done: list[int] = []
        clock = instance.clock + 1
        while ends and ends[0][0] <= clock:
            work_id = heappop(ends)[1]
            work = instance.running.get(work_id)
            if (resting := instance.suspended.get(work_id)) is not None:
                heappush(ends, (clock + self.outputs[work_id] - resting.produced, work_id))
                continue
            if work is None or work_id in done:  # one that went and came back within an iteration is noted twice
                continue
            left = self.outputs[work_id] - instance.produced(work) - extra.get(work_id, 0)
            if left <= 1 and (turn.rows is None or work_id in turn.rows):
                done.append(work_id)
            else:  # iterations were of others
                heappush(ends, (clock + max(left - 1, 1), work_id))
        for work_id in extra:  # they end sooner than was noted
            left = self.outputs[work_id] - instance.produced(instance.running[work_id]) - extra[work_id]
            if left > 1:
                self._note(instance.id, clock + left - 1, instance.running[work_id])
            elif work_id not in done:
                done.append(work_id)
        return done

    def _ends_with_prompt(self, turn: Turn, share: Share) -> bool:
        """Whether the prompt's token is its last; else it is known when that comes."""
        instance, work = turn.instance, share.work
        if work not in instance.queue_of(work) or work.hold or not share.is_last:
            return False
        left = self.outputs[work.id] - work.produced - 1
        clock = instance.clock + int(turn.decodes)  # when it joins the running batch
        if left > 0:
            self._note(instance.id, clock + left, work)
        return left <= 0

    def entered(self, instance_id: int, work: Work) -> None:
        """One that brings its KV blocks runs without a prefill."""
        if work.cached:
            left = self.outputs[work.id] - work.produced
            self._note(instance_id, work.joined_clock + left, work)

    def resumed(self, instance_id: int, work: Work) -> None:
        """One that was recomputed while it ran elsewhere."""
        left = self.outputs[work.id] - work.produced
        self._note(instance_id, work.joined_clock + left, work)

    def left(self, instance_id: int, work: Work) -> None:
        if self.blocks is not None:
            self.blocks.release(instance_id, (work.id,))

    def _note(self, instance_id: int, clock: int, work: Work) -> None:
        heappush(self._ends.setdefault(instance_id, []), (clock, work.id))

    def forget(self, instance_id: int) -> None:
        self._ends.pop(instance_id, None)
        if self.blocks is not None:
            self.blocks.forget(instance_id)

    def die(self) -> None:
        self.epoch += 1
        self.dies_telling = False
        self.link_free_s = 0.0
        self._ends.clear()
        self._computed.clear()
        if self.blocks is not None:
            self.blocks.clear()

    def load_end_s(self, command: StartLoad, now: float) -> float:
        """One link, one load at a time."""
        if self.machine is not None:
            end_s = self.machine.begin_load(command.model, self.link_free_s, now, self.slowdown)
        else:
            end_s = max(now, self.link_free_s) + self.load_s(command)
        self.link_free_s = end_s
        return end_s

    def load_s(self, command: StartLoad) -> float:
        return self.durations.load_s(self.node, command) * self.slowdown

    def resize(self, command: StartResize) -> float:
        """Returns how long it takes."""
        if self.blocks is not None:
            self.blocks.resize(command, self.node.instances[command.instance].hosting)
        return self.durations.resize_s(self.node, command) * self.slowdown

    def unload_s(self) -> float:
        return self.durations.unload_s(self.node) * self.slowdown


def requests_of(turn: Turn) -> frozenset[int]:
    """Those that it computes."""
    return frozenset((*(share.work.id for share in turn.prompts), *turn.decoding))
