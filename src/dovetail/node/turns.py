"""Whose turn it is on a device, and when the turn under way should end (S2). What a turn does to its requests is the
node's.
"""

from __future__ import annotations

from dovetail.node.events import Turn
from dovetail.node.instance import Instance, State
from dovetail.node.work import Work
from dovetail.policy.headroom import choose_turn, guards_decodes
from dovetail.policy.shadow import TurnRule

# The device waits this long for an instance whose turn it is: in-place resizes take less, a turn of another takes more.
MOMENT_S = 0.005


class Turns:
    def __init__(self, rule: TurnRule, throttle: int) -> None:
        self.turn: Turn | None = None  # under way
        self.started_s = 0.0
        self.throttle = throttle  # instances rest so that none has more than this share of the device; 0 = never
        self._rule = rule
        self._ends_s: float | None = None  # when the turn under way should end, once somebody has asked
        self._active: list[Instance] = []  # can run and have work, in order of id
        self._almost: list[Instance] = []  # have work and could run but for a resize that is under way
        self._rest_until: dict[int, float] = {}  # by instance

    def begin(self, turn: Turn, now: float) -> None:
        turn.instance.begin_turn(turn.prefill)
        self.turn, self.started_s, self._ends_s = turn, now, None

    def end(self) -> Turn:
        turn, self.turn = self.turn, None
        assert turn is not None, "no turn under way"
        turn.instance.end_turn()
        return turn

    def free_at_s(self, now: float) -> float:
        """When the device should be done with the turn under way."""
        if self.turn is None:
            return now
        if self._ends_s is None:  # asked for many times in a turn
            self._ends_s = self.started_s + _expected_s(*self.turn)
        return max(now, self._ends_s)

    def next_prefill(self, instance: Instance, now: float) -> Work | None:
        """The prompt that a turn of the instance would compute; None for a decode."""
        if not instance.waiting:
            return None
        rule, first = self._rule, instance.waiting[0]
        if not rule.guards_decodes or not instance.running:
            return first
        latest_s = min(instance.running_due_s, instance.spoke_s + rule.max_silence_s)
        prefill_s = instance.prefill_s(first.pending_tokens)
        waits = guards_decodes(now, prefill_s, instance.urgent_prefill_s(first), latest_s)
        return None if waits else first

    def choose(self, now: float) -> Instance | None:
        candidates = self._rested(now) if self.throttle else self._active
        if self._almost:
            candidates = candidates + [one for one in self._almost if 0.0 <= one.op_end_s - now <= MOMENT_S]
        chosen = choose_turn(candidates, now, self._rule.slack_s)
        return None if chosen in self._almost else chosen

    def has_only(self, instance: Instance) -> bool:
        """It alone has work that can run, and none of that waits."""
        return self._active == [instance] and not self._almost and not instance.waiting

    def _rested(self, now: float) -> list[Instance]:
        return [one for one in self._active if self._rest_until.get(one.id, 0.0) <= now]

    def rest(self, instance: Instance, now: float) -> float:
        """A static share of a device: after each turn the instance rests until it has had no more than its share.
        Returns until when."""
        until = self.started_s + (now - self.started_s) * min(self.throttle, instance.hosting.slots)
        self._rest_until[instance.id] = until
        return until

    # Who may have turns

    def update(self, instance: Instance) -> None:
        """After anything that decides whether it can run."""
        wanted = instance.has_turns and instance.can_run
        if wanted != (instance in self._active):
            if wanted:
                self._active.append(instance)
                self._active.sort(key=lambda one: one.id)
            else:
                self._active.remove(instance)
        resizes = instance.has_turns and instance.state is State.READY and instance.op_running
        if resizes != (instance in self._almost):
            if resizes:
                self._almost.append(instance)
            else:
                self._almost.remove(instance)

    def forget(self, instance: Instance) -> None:
        self._rest_until.pop(instance.id, None)

    def clear(self) -> None:
        """The device is gone."""
        self._active.clear()
        self._almost.clear()
        self._rest_until.clear()
        self.turn = None


def _expected_s(instance: Instance, prefill: Work | None) -> float:
    latency = instance.hosting.latency
    if prefill is not None:
        duration = latency.prefill_s(prefill.pending_tokens)
    else:
        duration = latency.decode_s(len(instance.running), instance.tokens) if instance.running else 0.0
    return duration * instance.overestimate
