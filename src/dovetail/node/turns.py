"""The turns of a device as they are taken: what is under way, when it should end, and who is let in meanwhile.

`policy.turn` chooses the next one; the node carries out what it changes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dovetail.node.device import Device
from dovetail.node.events import Turn
from dovetail.node.instance import Instance
from dovetail.node.underway import Underway
from dovetail.policy.best_effort import is_harmless, seat_beside, spare_of
from dovetail.policy.rounds import is_almost_done, may_stop, next_to_answer
from dovetail.policy.rows import promised_s
from dovetail.policy.turn import DeviceSnapshot, choose, decode_of, seat_of
from dovetail.policy.work import Work

# The device waits this long for an instance whose turn it is: in-place resizes take less, a turn of another takes more.
MOMENT_S = 0.005
LARGEST_CREDIT_S = 5.0  # of best effort: then it has its turn whoever is late by that


class Turns:
    def __init__(self, device: Device) -> None:
        self.throttle = 0  # instances rest so that none has more than this share of the device; 0 = never
        self._device = device
        self._rule = device.rule
        self._state = device.turns

    @property
    def turn(self) -> Turn | None:
        return None if self._state.underway is None else self._state.underway.turn

    def begin(self, turn: Turn, now: float) -> None:
        assert not turn.instance.in_turn, f"instance {turn.instance.id} has an iteration that has stopped"
        turn.instance.begin_turn(turn.prompts, decodes=turn.decodes, rows=turn.rows)
        self._state.underway = Underway(turn, now, beneath=self._state.underway)
        if self._state.joined and turn.decodes:
            self._state.joined = [one for one in self._state.joined if one is not turn.instance]

    def end(self, now: float) -> Underway:
        ended = self._state.underway
        assert ended is not None, "no turn under way"
        self._state.underway = ended.end(now)
        is_best_effort = ended.turn.is_best_effort
        if ended.turn.prompts and not is_best_effort:
            self._state.parted_s = now
        if self._has_best_effort:
            self._owe(now - ended.started_s, is_best_effort=is_best_effort)
        return ended

    @property
    def _has_best_effort(self) -> bool:
        return any(one.best_effort for one in self._state.active)

    def _owe(self, seconds: float, *, is_best_effort: bool) -> None:
        """Best effort has its share of the time that others take. What it has in gaps counts, beforehand too: where
        there are enough of them, nobody's answer stops for it."""
        more_s = -seconds if is_best_effort else self._rule.reserve * seconds
        self._state.owed_s = min(max(self._state.owed_s + more_s, -LARGEST_CREDIT_S), LARGEST_CREDIT_S)

    def free_at_s(self, now: float) -> float:
        """When the device should be done with the turn under way."""
        return now if self._state.underway is None else self._state.underway.free_at_s(now)

    # The next one

    def awaits_until_s(self, now: float) -> float | None:
        """An answer is on its way here: nothing is begun before. None: nothing keeps the device from a turn."""
        if not (self._state.awaiting and self._rule.in_rounds):
            return None
        return self._state.awaiting.until_s([one for one in self._state.active if one.is_waited_for], now)

    def wakes_s(self, now: float) -> float | None:
        """When to ask again because of that, once for each time."""
        until_s, before_s = self.awaits_until_s(now), self._state.wakes_s
        self._state.wakes_s = until_s
        return until_s if until_s != before_s else None

    def choose(self, now: float) -> Turn | None:
        return self._choose(self._snapshot(now), now)

    def _choose(self, snapshot: DeviceSnapshot[Instance], now: float) -> Turn | None:
        if not self._has_best_effort:
            return choose(snapshot, now)
        waited_for = snapshot.of_who_is_waited_for()
        spare = None if snapshot.is_held else spare_of(snapshot.ready, self._rule)
        if spare is not None and self._may_have(spare.seconds, waited_for, now):
            return spare.begin()
        seat_beside(snapshot.active, self._rule)
        return choose(waited_for, now)

    def _may_have(self, seconds: float, waited_for: DeviceSnapshot[Instance], now: float) -> bool:
        """Whether best effort has the device for so long: nobody else wants it, or it is owed that and nobody is late
        by it, or it was owed turns for very long."""
        if not waited_for.with_work or self._state.owed_s >= LARGEST_CREDIT_S:
            return True
        may_have = self._state.owed_s >= seconds
        return may_have and is_harmless(waited_for.with_work, seconds, now, self._rule.max_silence_s)

    def decode_of(self, instance: Instance, now: float) -> Turn:
        """Instead of a prompt that there is no room for."""
        return decode_of(self._snapshot(now), instance, now)

    def _snapshot(self, now: float) -> DeviceSnapshot[Instance]:
        state = self._state
        is_held = self.awaits_until_s(now) is not None
        almost = [one for one in state.almost if 0.0 <= one.op_end_s - now <= MOMENT_S] if state.almost else ()
        return DeviceSnapshot(
            self._rule,
            state.active,
            self._rested(now) if self.throttle else state.active,
            almost,
            state.almost,
            state.joined,
            state.parted_s,
            bool(state.awaiting),
            is_held,
        )

    def interlude(self, now: float, leaving: Collection[int] = ()) -> Turn | None:
        """The turn under way has stopped between two layers: who answers meanwhile, each once, but for these instances.
        None: it goes on."""
        halted = self._state.underway
        assert halted is not None, "no turn under way"
        others = [one for one in self._state.active if one.answers and _may_be_inside(one) and one.id not in leaving]
        seats = [seat_of(one, self._rule) for one in others if one.turned_s <= halted.sliced_s]
        if seats and not self._state.joined:
            chosen = next_to_answer(seats, now)
            left_s, must_s = halted.left_s(now), promised_s(halted.turn, self._rule.max_silence_s)
            spent_s, answers = now - halted.started_s, not halted.turn.prompts
            is_waited_for = answers and is_almost_done(spent_s, halted.own_s, chosen.decode_s)
            if not is_waited_for and may_stop(now, left_s + chosen.decode_s, must_s):
                return self.decode_of(chosen.lane, now)
        halted.sliced_s = now
        return None

    def meanwhile(self, now: float, *, is_layer_here: bool) -> Turn | None:
        """The turn under way has come to a layer that is read from the disk: the next turn of the others, before that
        layer. Once it is here best effort does not go before it. Models that read layers share a disk, and wait."""
        snapshot = self._snapshot(now)
        lanes = [snapshot.active, snapshot.ready, snapshot.almost, snapshot.resizing, snapshot.joined]
        active, ready, almost, resizing, joined = ([one for one in found if _may_be_inside(one)] for found in lanes)
        snapshot = replace(snapshot, active=active, ready=ready, almost=almost, resizing=resizing, joined=joined)
        return choose(snapshot.of_who_is_waited_for(), now) if is_layer_here else self._choose(snapshot, now)

    def caught_up(self, instance: Instance, work: Work, now: float) -> None:
        """One that is held has all its tokens."""
        self._device.update(instance)  # it may have nothing else to do
        if self._rule.in_rounds:
            self._state.awaiting.expect(instance, work, now)

    def joined(self, instance: Instance) -> None:
        """One that was held was handed over and takes part in the next decode, which comes before anything else."""
        if self._rule.in_rounds and instance not in self._state.joined:
            self._state.joined.append(instance)

    def has_only(self, instance: Instance) -> bool:
        """It alone has work that can run, none of that waits, and nothing is awaited."""
        state = self._state
        is_chosen_anew = instance.waiting or instance.patient or instance.suspended
        return state.active == [instance] and not (state.almost or state.awaiting or is_chosen_anew)

    def _rested(self, now: float) -> list[Instance]:
        return [one for one in self._state.active if self._state.rest_until_s.get(one.id, 0.0) <= now]

    def rest(self, instance: Instance, started_s: float, now: float) -> float:
        """A static share of a device: after each turn, which began then, the instance rests until it has had no more
        than its share. Returns until when."""
        until = started_s + (now - started_s) * min(self.throttle, instance.hosting.slots)
        self._state.rest_until_s[instance.id] = until
        return until


def _may_be_inside(instance: Instance) -> bool:
    """Its turn may be let into another one: it has none that has stopped itself, and does not wait for the disk."""
    return not instance.in_turn and instance.hosting.layer_s is None
