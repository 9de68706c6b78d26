"""A simulated device: answers turns, loads, unloads and resizes with predicted durations and seeded noise.

Replaces the physics only. It knows what the scheduler may not: how many tokens each request will produce.
"""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

from dovetail.node.events import StartLoad, StartResize, Turn
from dovetail.node.instance import Instance
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.latency import TransferModel

NOISE_TABLE = 4096


class Noise:
    """Factors around 1, drawn once and walked through by every device from a place of its own."""

    def __init__(self, rng: Random, deviation: float) -> None:
        low, high = 1 - 3 * deviation, 1 + 3 * deviation
        self.factors = [min(max(rng.gauss(1.0, deviation), low), high) for _ in range(NOISE_TABLE)]
        self._rng = rng

    def start(self) -> int:
        return self._rng.randrange(NOISE_TABLE)


class Device:
    def __init__(self, node: Node, outputs: dict[int, int], transfer: TransferModel, noise: Noise) -> None:
        self.node = node
        self.transfer = transfer
        self.outputs = outputs  # request id → tokens that it will produce
        self.slowdown = 1.0  # a fault: everything takes this much longer
        self.epoch = 0  # counts deaths: answers from before one are void
        self.stalled_until_s = 0.0  # a fault: nothing ends before
        self.failing_loads = 0  # a fault: this many further loads fail
        self.lag_s = 0.0  # a fault: what the node says arrives this late
        self.last_said_s = 0.0
        self.decode_turns = 0
        self.decode_tokens = 0
        self.link_free_s = 0.0
        self._noise = noise.factors
        self._draw = noise.start()
        self._ends: dict[int, list[tuple[int, int, int]]] = {}  # instance → heap of (clock, request, joined)

    def duration_s(self, turn: Turn) -> float:
        instance, prefill = turn
        latency = instance.hosting.latency
        if prefill is None:
            return latency.decode_s(self.count_decode(instance), instance.tokens) * self.next_noise() * self.slowdown
        return latency.prefill_s(prefill.known_tokens) * self.next_noise() * self.slowdown

    def next_noise(self) -> float:
        self._draw = draw = (self._draw + 1) % NOISE_TABLE
        return self._noise[draw]

    def count_decode(self, instance: Instance) -> int:
        """One more iteration of all that run; returns how many those are."""
        batch = len(instance.running)
        self.decode_turns += 1
        self.decode_tokens += batch
        return batch

    def finished(self, turn: Turn) -> list[Work]:
        """Who gets the last token in the turn that ends now."""
        instance, prefill = turn
        if prefill is not None:
            return self._after_prefill(turn, prefill)
        ends = self._ends.get(instance.id)
        done: list[Work] = []
        clock = instance.clock + 1
        while ends and ends[0][0] <= clock:
            _, work_id, joined = heappop(ends)
            work = instance.running.get(work_id)
            if work is not None and work.joined_clock == joined:
                done.append(work)
        return done

    def _after_prefill(self, turn: Turn, work: Work) -> list[Work]:
        instance = turn.instance
        if work not in instance.waiting:
            return []
        left = self.outputs[work.id] - work.produced - 1
        if left <= 0:
            return [work]
        self._note(instance.id, instance.clock + left, work, instance.clock)
        return []

    def joined_running(self, instance_id: int, work: Work) -> None:
        """A request came with its KV blocks and runs without a prefill."""
        left = self.outputs[work.id] - work.produced
        self._note(instance_id, work.joined_clock + left, work, work.joined_clock)

    def _note(self, instance_id: int, clock: int, work: Work, joined: int) -> None:
        heappush(self._ends.setdefault(instance_id, []), (clock, work.id, joined))

    def forget(self, instance_id: int) -> None:
        self._ends.pop(instance_id, None)

    def die(self) -> list[Work]:
        """Returns the work that was on it."""
        self.epoch += 1
        self.link_free_s = 0.0
        self._ends.clear()
        return self.node.fail()

    def load_s(self, command: StartLoad) -> float:
        return self.transfer.load_s(command.num_bytes) * self.slowdown

    def resize_s(self, command: StartResize) -> float:
        return self.transfer.resize_s(command.old_bytes, command.new_bytes) * self.slowdown

    def unload_s(self) -> float:
        return self.transfer.unload_s * self.slowdown
