"""Whose turn it is on a device, how much of its prompts the turn computes, and when the turn under way should end (S2).
What a turn does to its requests is the node's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from dovetail.node.device import Device
from dovetail.node.events import Turn
from dovetail.node.instance import Instance
from dovetail.node.rows import awaiting_rows, batch_s, latest_s, promised_s, split_rows
from dovetail.node.shares import Share, latest_prefill_s, left_s, splitting_s
from dovetail.node.underway import Underway
from dovetail.policy.headroom import INFINITY, choose_turn, guards_decodes, is_overtaken
from dovetail.policy.parts import (
    FEWEST_TOKENS,
    MOST_PROMPTS,
    SMOOTH_TOKENS,
    begins_by_s,
    is_unhurried,
    least_s,
    part_limit_s,
    saves,
    together_s,
    tokens_within,
)
from dovetail.policy.placement import DeviceKind
from dovetail.policy.rounds import (
    LEAST_SINGLES,
    SMOOTH_LIMIT,
    is_almost_done,
    may_compute,
    may_stop,
    next_to_answer,
    part_between_s,
    slice_between_s,
)
from dovetail.policy.shadow import TurnRule
from dovetail.policy.work import FEW_TOKENS, Work

# The device waits this long for an instance whose turn it is: in-place resizes take less, a turn of another takes more.
MOMENT_S = 0.005
FEW_PROMPTS = 8  # that wait: of more nobody counts whether they have time


class _Seat(NamedTuple):
    """An instance as `policy.rounds` sees it."""

    instance: Instance
    turned_s: float
    prompted_s: float
    spoke_s: float
    latest_s: float
    decode_s: float  # of those who run: whoever waits is not in the next iteration

    @classmethod
    def of(cls, one: Instance, rule: TurnRule) -> _Seat:
        """Where answers wait for `max_stall`, nobody goes before its turn but who asked for a pace."""
        decode_s = batch_s(one) if one.running else 0.0
        spoke_s = max(one.spoke_s, one.rhythm.spoke_s)  # a turn of some rows is a turn
        must_s = latest_s(one, rule.max_silence_s, is_promised=rule.max_stall < INFINITY)
        return cls(one, one.rhythm.turned_s, one.rhythm.prompted_s, spoke_s, must_s, decode_s)


class Turns:
    def __init__(self, device: Device) -> None:
        knobs = device.knobs
        # Instances rest so that none has more than this share of the device; 0 = never.
        self.throttle = knobs.shares if knobs.shares > 1 and device.kind is DeviceKind.GPU else 0
        self._device = device
        self._rule = device.rule
        self._state = device.turns

    @property
    def turn(self) -> Turn | None:
        return None if self._state.underway is None else self._state.underway.turn

    def begin(self, turn: Turn, now: float) -> None:
        turn.instance.begin_turn(turn.prompts, decodes=turn.decodes, rows=turn.rows)
        self._state.underway = Underway(turn, now, beneath=self._state.underway)
        if self._state.joined and turn.decodes:
            self._state.joined = [one for one in self._state.joined if one is not turn.instance]

    def end(self, now: float) -> Underway:
        ended = self._state.underway
        assert ended is not None, "no turn under way"
        self._state.underway = ended.end(now)
        turn, seconds = ended.turn, now - ended.started_s
        instance = turn.instance
        instance.end_turn()
        if turn.rows is not None:
            instance.rhythm.rows_ended(seconds, now, is_promised=any(work.is_strict for work in instance.waiting))
        else:
            instance.rhythm.turn_ended(seconds, now, has_prompts=bool(turn.prompts), decodes=turn.decodes)
        if turn.prompts:
            self._state.parted_s = now
        return ended

    def free_at_s(self, now: float) -> float:
        """When the device should be done with the turn under way."""
        return now if self._state.underway is None else self._state.underway.free_at_s(now)

    # The next one

    def awaits_until_s(self, now: float) -> float | None:
        """An answer is on its way here: nothing is begun before. None: nothing keeps the device from a turn."""
        if not (self._state.awaiting and self._rule.in_rounds):
            return None
        return self._state.awaiting.until_s(self._state.active, now)

    def wakes_s(self, now: float) -> float | None:
        """When to ask again because of that, once for each time."""
        until_s, before_s = self.awaits_until_s(now), self._state.wakes_s
        self._state.wakes_s = until_s
        return until_s if until_s != before_s else None

    def choose(self, now: float) -> Turn | None:
        turn = self._choose(now)
        return self._sliced(turn) if turn is not None and self._rule.max_stall < INFINITY else turn

    def interlude(self, now: float) -> Turn | None:
        """The turn under way has stopped between two layers: who answers meanwhile, each once. None: it goes on."""
        halted = self._state.underway
        assert halted is not None, "no turn under way"
        own = halted.turn.instance
        others = [one for one in self._state.active if one is not own and one.running]
        seats = [_Seat.of(one, self._rule) for one in others if one.rhythm.turned_s <= halted.sliced_s]
        if seats and not self._state.joined:
            chosen = next_to_answer(seats, now)
            left_s, must_s = halted.left_s(now), promised_s(halted.turn, self._rule.max_silence_s)
            spent_s, answers = now - halted.started_s, not halted.turn.prompts
            is_waited_for = answers and is_almost_done(spent_s, halted.own_s, chosen.decode_s)
            if not is_waited_for and may_stop(now, left_s + chosen.decode_s, must_s):
                return self.decode_of(chosen.instance, now)
        halted.sliced_s = now
        return None

    def _sliced(self, turn: Turn) -> Turn:
        """With breaks for the answers of others, unless somebody waits whose prompt was promised something: that was
        played without."""
        instance = turn.instance
        others_s = sum(batch_s(one) for one in self._state.active if one is not instance and one.running)
        if not others_s or self._state.awaiting or self._is_promised():
            return turn
        slice_s = slice_between_s(others_s, self._rule.max_stall, has_prompts=bool(turn.prompts))
        return turn._replace(slice_s=slice_s, round_s=others_s)

    def _choose(self, now: float) -> Turn | None:
        for one in self._state.joined:
            if one.running and one in self._state.active:  # else it has left again
                return self.decode_of(one, now)
        if self.awaits_until_s(now) is not None:
            return None
        if self._state.awaiting and (answering := self._answers_only(now)):
            return self.decode_of(answering, now, is_awaited=True)
        candidates = self._rested(now) if self.throttle else self._state.active
        runnable = candidates
        if self._state.almost:
            candidates = candidates + [one for one in self._state.almost if 0.0 <= one.op_end_s - now <= MOMENT_S]
        if self._rule.in_rounds and len(candidates) > 1:
            return self._in_rounds(candidates, now)
        chosen = choose_turn(candidates, now, self._rule.slack_s)
        if chosen is None or chosen in self._state.almost:
            return None
        if self._rule.part_s != INFINITY:
            return self._in_parts(chosen, runnable, now)
        return self._whole(chosen, now) if chosen.waiting else Turn(chosen)

    def _answers_only(self, now: float) -> Instance | None:
        """Somebody who answers and goes on while an answer is on its way here: a part of a prompt would keep that one
        waiting. None: nobody does, or something is more urgent."""
        active = self._state.active
        if any(one.waiting and (one.waiting[0].is_resuming or not _have_time(one, now)) for one in active):
            return None
        return min((one for one in active if one.running), key=lambda one: (one.spoke_s, one.id), default=None)

    def _whole(self, instance: Instance, now: float) -> Turn:
        """One prompt, or a decode."""
        first = instance.waiting[0]
        if self._rule.guards_decodes and instance.running:
            prefill_s, latest_s = left_s(instance, first, first.start), self._latest_s(instance)
            if guards_decodes(now, prefill_s, instance.urgent_prefill_s(first), latest_s):
                return Turn(instance)
        return Turn(instance, (Share(first, first.start, first.uncomputed_tokens),), decodes=False)

    def _in_parts(self, chosen: Instance, runnable: Sequence[Instance], now: float) -> Turn:
        """Of the chosen one's first prompt, or a decode. Where it alone has work, prompts that have time leave half of
        it to the answers; in a hurry they go first, and hold nobody else's."""
        if not chosen.waiting:
            return Turn(chosen)
        if self._rule.in_rounds and (first := chosen.waiting[0]).is_resuming:
            has_waited = bool(first.hold and chosen.running) and now - chosen.spoke_s >= batch_s(chosen)
            most = (
                FEWEST_TOKENS if first.hold and self._state.awaiting else FEW_TOKENS
            )  # another may be handed over meanwhile
            return Turn(chosen) if has_waited else Turn(chosen, _resuming(chosen, most), decodes=False)
        split = splitting_s(chosen)
        limit_s = part_limit_s(self._rule.part_s, split)
        if self._rule.in_rounds and chosen.running and _have_time(chosen, now):
            decode_s = chosen.decode_s()
            if now - chosen.spoke_s >= decode_s:
                return Turn(chosen)
            shortest_s = SMOOTH_LIMIT * split if len(chosen.waiting) == 1 else limit_s  # together they take less
            limit_s = min(limit_s, max(decode_s, shortest_s))
        return self._part_of(chosen, runnable, now, limit_s)

    def _in_rounds(self, candidates: Sequence[Instance], now: float) -> Turn | None:
        """A part of the most urgent prompt, or a decode of whoever has waited longest for one."""
        seats = {one: _Seat.of(one, self._rule) for one in candidates}
        answering = [seat for one, seat in seats.items() if one.running]
        prompting = [one for one in candidates if one.waiting]
        prompter = min(prompting, key=lambda one: one.urgent_prefill_s(one.waiting[0]), default=None)
        if prompter is not None and may_compute(seats[prompter], answering, self._state.parted_s):
            seconds = part_between_s(seats[prompter], answering, self._rule.part_s, splitting_s(prompter))
            runnable = [one for one in candidates if one not in self._state.almost]
            return None if prompter in self._state.almost else self._part_of(prompter, runnable, now, seconds)
        if not answering:
            return None
        chosen = next_to_answer(answering, now).instance
        return None if chosen in self._state.almost else self.decode_of(chosen, now)

    def decode_of(self, instance: Instance, now: float, *, is_awaited: bool = False) -> Turn:
        """Of its running batch, or of as much of it as the others who answer may wait for, or one that is on its way
        here."""
        if not self._rule.splits_decodes:
            return Turn(instance)
        rows = awaiting_rows(instance, now, self._rule.max_silence_s) if is_awaited else None
        if rows is None:
            others_s = [batch_s(one) for one in self._state.with_work if one is not instance and one.running]
            rows = split_rows(instance, others_s, now, self._rule.max_silence_s)
        return Turn(instance, rows=rows)

    def _part_of(self, prompter: Instance, runnable: Sequence[Instance], now: float, limit_s: float) -> Turn:
        """As much of its first prompt as can be computed before the running requests of anybody have to go on, and in
        so long; a decode of those who would be late even so."""
        first, decoding = prompter.waiting[0], {one: one.decode_s() for one in runnable if one.running}
        begins_s, strictest = self._begins(decoding, now)
        if strictest is not None:
            remaining_s = left_s(prompter, first, first.start)
            part_s = least_s(prompter.hosting.latency, first.start, first.uncomputed_tokens) * prompter.overestimate
            if is_overtaken(now, part_s, latest_prefill_s(prompter, first, remaining_s), begins_s):
                return self.decode_of(strictest, now)
        return self._turn_of_parts(prompter, min(limit_s, begins_s - now), now)

    def _begins(self, decoding: Mapping[Instance, float], now: float) -> tuple[float, Instance | None]:
        """When somebody has to decode, and who comes first; who is late already waits for its turn like anybody."""
        in_time = {one: latest_s for one in decoding if (latest_s := self._latest_s(one)) >= now}
        if not in_time:
            return INFINITY, None
        begins_s = begins_by_s([(latest_s, decoding[one]) for one, latest_s in in_time.items()])
        return begins_s, min(in_time, key=in_time.__getitem__)

    def _turn_of_parts(self, instance: Instance, seconds: float, now: float) -> Turn:
        decodes = self._rule.mixes_decodes and bool(instance.running)
        if decodes:
            seconds -= instance.decode_s()
        return Turn(instance, self._shares(instance, seconds, now), decodes)

    def _latest_s(self, instance: Instance) -> float:
        """When its running requests must have their next token."""
        return latest_s(instance, self._rule.max_silence_s)

    def _shares(self, instance: Instance, seconds: float, now: float) -> tuple[Share, ...]:
        """Of its first prompt, and of those behind it that had better come along, unless it were late by that."""
        first, latency = instance.waiting[0], instance.hosting.latency
        seconds /= instance.overestimate
        fewest = self._fewest_tokens(instance)
        tokens = tokens_within(latency, first.start, first.uncomputed_tokens, seconds, fewest)
        shares = [Share(first, first.start, tokens)]
        if not self._rule.packs_prompts or tokens < first.uncomputed_tokens:
            return tuple(shares)
        if fewest < FEWEST_TOKENS:
            seconds = min(seconds, LEAST_SINGLES * latency.prefill_s(fewest))
        alone_s = latency.prefill_s(tokens)
        seconds = together_s(seconds, alone_s, (first.due_s - now) / instance.overestimate)
        for work in instance.waiting[1:MOST_PROMPTS]:
            more = work.uncomputed_tokens
            if not saves(latency, tokens, more) or latency.prefill_s(tokens + more) > seconds:
                break
            if instance.is_short(*[share.work.pending_tokens + 1 for share in shares], work.pending_tokens + 1):
                break
            shares.append(Share(work, work.start, more))
            tokens += more
        return tuple(shares)

    def caught_up(self, instance: Instance, work: Work, now: float) -> None:
        """One that is held has all its tokens."""
        self._device.update(instance)  # it may have nothing else to do
        if self._rule.in_rounds:
            self._state.awaiting.expect(instance, work, now)

    def joined(self, instance: Instance) -> None:
        """One that was held was handed over and takes part in the next decode, which comes before anything else."""
        if self._rule.in_rounds and instance not in self._state.joined:
            self._state.joined.append(instance)

    def _fewest_tokens(self, instance: Instance) -> int:
        """Of a part of its prompt. Admission plays parts of `FEWEST_TOKENS`, which a prompt has fewer of, so that what
        was promised to one that waits is kept by them alone; an answer that goes on here has been promised that."""
        if not self._rule.splits_decodes or self._rule.max_stall < INFINITY:  # turns with breaks hold nobody's answers
            return FEWEST_TOKENS
        holds_answers = any(one.running for one in self._state.with_work if one is not instance)
        return SMOOTH_TOKENS if holds_answers and not self._is_promised() else FEWEST_TOKENS

    def _is_promised(self) -> bool:
        """Something, to a prompt that waits."""
        return any(work.is_strict or work.produced for one in self._state.with_work for work in one.waiting)

    def has_only(self, instance: Instance) -> bool:
        """It alone has work that can run, none of that waits, and nothing is awaited."""
        return self._state.active == [instance] and not (self._state.almost or instance.waiting or self._state.awaiting)

    def _rested(self, now: float) -> list[Instance]:
        return [one for one in self._state.active if self._state.rest_until_s.get(one.id, 0.0) <= now]

    def rest(self, instance: Instance, started_s: float, now: float) -> float:
        """A static share of a device: after each turn, which began then, the instance rests until it has had no more
        than its share. Returns until when."""
        until = started_s + (now - started_s) * min(self.throttle, instance.hosting.slots)
        self._state.rest_until_s[instance.id] = until
        return until


def _resuming(instance: Instance, most: int) -> tuple[Share, ...]:
    """Answers that go on with the next iteration, as many as the pool has room for: they come before prompts and
    before copies of those that go on elsewhere, of which an iteration computes so many tokens at most."""
    shares: list[Share] = []
    needs: list[int] = []  # tokens of each
    is_copy = bool(instance.waiting[0].hold)
    alike = takewhile(lambda work: work.is_resuming and bool(work.hold) == is_copy, instance.waiting)
    for work in islice(alike, MOST_PROMPTS):
        part = min(work.pending_tokens, most)
        needs.append(part + 1)
        if shares and (instance.is_short(*needs) or (is_copy and sum(needs) > most)):
            break
        shares.append(Share(work, work.computed, part))
    return tuple(shares)


def _have_time(instance: Instance, now: float) -> bool:
    """Whether every prompt that waits would be in time if all of them took their time. A crowd has none."""
    if len(instance.waiting) > FEW_PROMPTS:
        return False
    before_s = 0.0
    for work in instance.waiting:
        before_s += left_s(instance, work, work.start)
        if not is_unhurried(now, before_s, work.due_s):
            return False
    return True
