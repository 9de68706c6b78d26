"""Whose turn it is on a device, and of which tokens (S2): the one rule, by which a node takes its turns and by which
admission plays them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Generic, NamedTuple

from dovetail.policy.headroom import INFINITY, choose_turn, guards_decodes, is_overtaken
from dovetail.policy.iteration import Iteration, LaneT
from dovetail.policy.lane import Lane
from dovetail.policy.latency import prompt_s
from dovetail.policy.parts import (
    FEWEST_TOKENS,
    MOST_PROMPTS,
    SMOOTH_TOKENS,
    Share,
    begins_by_s,
    is_unhurried,
    least_s,
    part_limit_s,
    stretched_s,
    tokens_together,
    tokens_within,
)
from dovetail.policy.rounds import (
    SMOOTH_LIMIT,
    may_compute,
    next_to_answer,
    part_between_s,
    slice_between_s,
)
from dovetail.policy.rows import awaiting_rows, latest_s, split_rows
from dovetail.policy.turn_rule import TurnRule
from dovetail.policy.work import FEW_TOKENS, Work

HARDLY_LONGER = 1.25  # times what few tokens of a copy take
FEW_PROMPTS = 8  # that wait: of more nobody counts whether they have time


@dataclass(slots=True)
class DeviceSnapshot(Generic[LaneT]):
    """What the choice of a turn goes by."""

    rule: TurnRule
    active: Sequence[LaneT]  # can run and have work, in order of id
    ready: Sequence[LaneT]  # those of them that have not used up a static share of the device
    almost: Sequence[LaneT] = ()  # have work and could run in a moment, for which the device waits
    resizing: Sequence[LaneT] = ()  # have work and could run but for a resize, however long that takes
    joined: Sequence[LaneT] = ()  # an answer was handed over to their running batch and has had nothing there
    parted_s: float = 0.0  # when the last part of a prompt was computed
    is_awaiting: bool = False  # an answer is on its way here
    is_held: bool = False  # by that: nothing is begun

    @property
    def with_work(self) -> list[LaneT]:
        """Those that take turns now or in a moment."""
        return [*self.active, *self.resizing]

    def of_who_is_waited_for(self) -> DeviceSnapshot[LaneT]:
        """Without lanes that have work of best effort only."""
        lanes = (self.active, self.ready, self.almost, self.resizing, self.joined)
        active, ready, almost, resizing, joined = ([one for one in found if one.is_waited_for] for found in lanes)
        is_awaiting, is_held = self.is_awaiting, self.is_held
        return DeviceSnapshot(self.rule, active, ready, almost, resizing, joined, self.parted_s, is_awaiting, is_held)


class Seat(NamedTuple, Generic[LaneT]):
    """A lane as `policy.rounds` sees it."""

    lane: LaneT
    turned_s: float
    prompted_s: float
    spoke_s: float
    latest_s: float
    decode_s: float  # of those who run: whoever waits is not in the next iteration


def seat_of(one: LaneT, rule: TurnRule) -> Seat[LaneT]:
    """Where answers wait for `max_stall`, nobody goes before its turn but who asked for a pace."""
    decode_s = one.batch_s() if one.running else 0.0
    spoke_s = max(one.spoke_s, one.rows_spoke_s)  # a turn of some rows is a turn
    must_s = latest_s(one, rule.max_silence_s, is_promised=rule.max_stall < INFINITY)
    return Seat(one, one.turned_s, one.prompted_s, spoke_s, must_s, decode_s)


def choose(device: DeviceSnapshot[LaneT], now: float) -> Iteration[LaneT] | None:
    """The next iteration; None: nobody can have a turn now."""
    turn = _choose(device, now)
    return _sliced(device, turn) if turn is not None and device.rule.max_stall < INFINITY else turn


class Advanced(NamedTuple):
    """What became of prompts in an iteration."""

    prefilled: list[Work]  # have their token, and run
    caught_up: list[Work]  # are held, and all their tokens are computed


def advance(
    turn: Iteration[LaneT], seconds: float, now: float, pace_tokens: float, computed: Mapping[int, int] | None = None
) -> Advanced:
    """What an iteration that took so long and has ended changes of its lane: one of a device, or of a snapshot's own
    copies. `computed`: how many tokens are, of each of its prompts; None = as many as asked. `pace_tokens` as of
    `Work.pace_from`; infinite = no safety is kept."""
    lane, result = turn.instance, Advanced([], [])
    lane.end_turn()
    if turn.is_best_effort:
        lane.spared_s, lane.has_spared_prompt = now, bool(turn.prompts)
    else:
        lane.turn_ended(seconds, now, turn.rows, prompts=bool(turn.prompts), decodes=turn.decodes)
        if turn.decodes and lane.riding:  # best effort had its tokens: prompts of its own come next
            lane.has_spared_prompt = False
    if turn.decodes:
        lane.decoded(now, turn.rows)
    for share in turn.prompts:
        work = share.work
        if work not in lane.queue_of(work):
            continue  # it left during the turn
        tokens = share.start + share.tokens if computed is None else computed[work.id]
        if tokens < work.known_tokens:
            lane.computed(work, tokens)
        elif work.hold:
            lane.hold(work)
            result.caught_up.append(work)
        else:
            lane.prefilled(work, now, pace_tokens)
            result.prefilled.append(work)
    if result.prefilled:
        lane.refresh()  # once for all of them
    return result


def decode_of(device: DeviceSnapshot[LaneT], lane: LaneT, now: float, *, is_awaited: bool = False) -> Iteration[LaneT]:
    """Of its running batch, or of as much of it as the others who answer may wait for, or one that is on its way
    here."""
    if not device.rule.splits_decodes:
        return Iteration(lane)
    rows = awaiting_rows(lane, now, device.rule.max_silence_s) if is_awaited else None
    if rows is None:
        others_s = [one.batch_s() for one in device.with_work if one is not lane and one.running]
        rows = split_rows(lane, others_s, now, device.rule.max_silence_s)
    return Iteration(lane, rows=rows)


def _sliced(device: DeviceSnapshot[LaneT], turn: Iteration[LaneT]) -> Iteration[LaneT]:
    """With breaks for the answers of others, unless somebody waits whose prompt was promised something: that was
    played without."""
    others_s = sum(one.batch_s() for one in device.active if one is not turn.instance and one.running)
    if not others_s or device.is_awaiting or _is_promised(device):
        return turn
    slice_s = slice_between_s(others_s, device.rule.max_stall, has_prompts=bool(turn.prompts))
    return turn._replace(slice_s=slice_s, round_s=others_s)


def _is_promised(device: DeviceSnapshot[LaneT]) -> bool:
    """Something, to a prompt that waits."""
    return any(work.is_strict or work.produced for one in device.with_work for work in one.waiting)


def _choose(device: DeviceSnapshot[LaneT], now: float) -> Iteration[LaneT] | None:
    rule, active = device.rule, device.active
    for one in device.joined:
        if one.running and one in active:  # else it has left again
            return decode_of(device, one, now)
    if device.is_held:
        return None
    if device.is_awaiting and (answering := _answers_only(active, now)):
        return decode_of(device, answering, now, is_awaited=True)
    candidates = [*device.ready, *device.almost] if device.almost else device.ready
    if rule.in_rounds and len(candidates) > 1:
        return _in_rounds(device, candidates, now)
    chosen = choose_turn(candidates, now, rule.slack_s)
    if chosen is None or chosen in device.almost:
        return None
    if rule.part_s != INFINITY:
        return _in_parts(device, chosen, now)
    return _whole(chosen, now) if chosen.waiting else Iteration(chosen)


def _answers_only(active: Sequence[LaneT], now: float) -> LaneT | None:
    """Somebody who answers and goes on while an answer is on its way here: a part of a prompt would keep that one
    waiting. None: nobody does, or something is more urgent."""
    if any(one.waiting and (one.waiting[0].is_resuming or not _have_time(one, now)) for one in active):
        return None
    return min((one for one in active if one.running), key=lambda one: (one.spoke_s, one.id), default=None)


def _whole(lane: LaneT, now: float) -> Iteration[LaneT]:
    """One prompt, or a decode."""
    first = lane.waiting[0]
    if lane.rule.guards_decodes and lane.running:
        prefill_s, must_s = lane.left_s(first, first.start), latest_s(lane, lane.rule.max_silence_s)
        if guards_decodes(now, prefill_s, lane.urgent_prefill_s(first), must_s):
            return Iteration(lane)
    return Iteration(lane, (Share(first, first.start, first.uncomputed_tokens),), decodes=False)


def _in_parts(device: DeviceSnapshot[LaneT], chosen: LaneT, now: float) -> Iteration[LaneT]:
    """Of the chosen one's first prompt, or a decode. Where it alone has work, prompts that have time leave half of
    it to the answers; in a hurry they go first, and hold nobody else's."""
    if not chosen.waiting:
        return Iteration(chosen)
    rule = device.rule
    if rule.in_rounds and (first := chosen.waiting[0]).is_resuming:
        has_waited = bool(first.hold and chosen.running) and now - chosen.spoke_s >= chosen.batch_s()
        return Iteration(chosen) if has_waited else Iteration(chosen, _resuming(device, chosen), decodes=False)
    split, mixes = chosen.splitting_s(), _mixes(device, chosen, now)
    limit_s = part_limit_s(rule.part_s, split)
    if rule.in_rounds and chosen.running and _have_time(chosen, now):
        decode_s = chosen.decode_s()
        if not mixes and now - chosen.spoke_s >= decode_s:
            return Iteration(chosen)
        shortest_s = SMOOTH_LIMIT * split if len(chosen.waiting) == 1 else limit_s  # together they take less
        limit_s = min(limit_s, max(decode_s, shortest_s))
    return _part_of(device, chosen, now, limit_s, mixes=mixes)


def _in_rounds(device: DeviceSnapshot[LaneT], candidates: Sequence[LaneT], now: float) -> Iteration[LaneT] | None:
    """A part of the most urgent prompt, or a decode of whoever has waited longest for one."""
    rule = device.rule
    seats = {one: seat_of(one, rule) for one in candidates}
    answering = [seat for one, seat in seats.items() if one.running]
    prompting = [one for one in candidates if one.waiting]
    prompter = min(prompting, key=lambda one: one.urgent_prefill_s(one.waiting[0]), default=None)
    if prompter is not None and may_compute(seats[prompter], answering, device.parted_s):
        seconds = part_between_s(seats[prompter], answering, rule.part_s, prompter.splitting_s())
        return None if prompter in device.almost else _part_of(device, prompter, now, seconds, mixes=False)
    if not answering:
        return None
    chosen = next_to_answer(answering, now).lane
    return None if chosen in device.almost else decode_of(device, chosen, now)


def _mixes(device: DeviceSnapshot[LaneT], lane: LaneT, now: float) -> bool:
    """Whether all its running requests have a token in the iteration of its prompts, where nobody else takes turns: it
    takes longer by that, so that where models answer in rounds, its prompts have to have time."""
    if not (device.rule.mixes_decodes and lane.running):
        return False
    return not device.rule.in_rounds or (_have_time(lane, now) and decode_of(device, lane, now).rows is None)


def _part_of(
    device: DeviceSnapshot[LaneT], prompter: LaneT, now: float, limit_s: float, *, mixes: bool
) -> Iteration[LaneT]:
    """As much of its first prompt as can be computed before the running requests of anybody have to go on, and in
    so long; a decode of those who would be late even so. Others wait no longer for it if it mixes."""
    first, decoding = prompter.waiting[0], {one: one.decode_s() for one in device.ready if one.running}
    limit_s = stretched_s(limit_s, prompter.at_once_s(first, first.start), prompter.lost_s())
    if prompter.hosting.layer_s is not None:  # they go before each of its layers
        return Iteration(prompter, _shares(device, prompter, limit_s, now), decodes=False)
    begins_s, strictest = _begins(decoding, now)
    part_s = least_s(prompter.hosting.latency, first.start, first.uncomputed_tokens) * prompter.overestimate
    if strictest is not None:
        remaining_s = prompter.left_s(first, first.start)
        if is_overtaken(now, part_s, prompter.latest_prefill_s(first, remaining_s), begins_s):
            return decode_of(device, strictest, now)
    seconds = min(limit_s, begins_s - now)
    if mixes and len(decoding) > 1:
        mixes = seconds >= part_s + prompter.batch_s()
        seconds -= prompter.batch_s() if mixes else 0.0
    return Iteration(prompter, _shares(device, prompter, seconds, now), decodes=mixes)


def _begins(decoding: Mapping[LaneT, float], now: float) -> tuple[float, LaneT | None]:
    """When somebody has to decode, and who comes first; who is late already waits for its turn like anybody."""
    latest = {one: latest_s(one, one.rule.max_silence_s) for one in decoding}
    in_time = {one: must_s for one, must_s in latest.items() if must_s >= now}
    if not in_time:
        return INFINITY, None
    begins_s = begins_by_s([(must_s, decoding[one]) for one, must_s in in_time.items()])
    return begins_s, min(in_time, key=in_time.__getitem__)


def _shares(device: DeviceSnapshot[LaneT], lane: LaneT, seconds: float, now: float) -> tuple[Share, ...]:
    """Of its first prompt, and of those behind it that had better come along, unless it were late by that."""
    first, scale = lane.waiting[0], lane.overestimate
    others = _that_fit(lane) if device.rule.packs_prompts else iter(())
    left_s, fewest = (first.due_s - now) / scale, _fewest_tokens(device, lane)
    more = (work.uncomputed_tokens for work in others)
    start, pending = first.start, first.uncomputed_tokens
    tokens = tokens_together(lane.hosting.latency, start, pending, more, seconds / scale, left_s, fewest)
    return tuple(Share(work, work.start, count) for work, count in zip(lane.waiting, tokens, strict=False))


def _that_fit(lane: Lane) -> Iterator[Work]:
    """Who waits behind the first, as long as the pool has room for one more with those before."""
    needs = [lane.waiting[0].pending_tokens + 1]
    for work in islice(lane.waiting, 1, MOST_PROMPTS):
        needs.append(work.pending_tokens + 1)
        if lane.is_short(*needs):
            return
        yield work


def _fewest_tokens(device: DeviceSnapshot[LaneT], lane: LaneT) -> int:
    """Of a part of its prompt. Admission plays parts of `FEWEST_TOKENS`, which a prompt has fewer of, so that what
    was promised to one that waits is kept by them alone; an answer that goes on here has been promised that."""
    if not device.rule.splits_decodes or device.rule.max_stall < INFINITY:  # turns with breaks hold nobody's answers
        return FEWEST_TOKENS
    holds_answers = any(one.running for one in device.with_work if one is not lane)
    return SMOOTH_TOKENS if holds_answers and not _is_promised(device) else FEWEST_TOKENS


def _resuming(device: DeviceSnapshot[LaneT], lane: LaneT) -> tuple[Share, ...]:
    """Answers that go on with the next iteration, as many as the pool has room for: they come before prompts and
    before copies of those that go on elsewhere, of which an iteration computes few tokens; fewer while another answer
    may be handed over, and as many as hardly take longer."""
    first, latency = lane.waiting[0], lane.hosting.latency
    most = FEWEST_TOKENS if first.hold and device.is_awaiting else FEW_TOKENS
    if first.hold and first.pending_tokens > most:
        seconds = HARDLY_LONGER * prompt_s(latency, first.computed, most)
        most = max(tokens_within(latency, first.computed, first.pending_tokens, seconds), most)
    shares: list[Share] = []
    needs: list[int] = []  # tokens of each
    is_copy = bool(lane.waiting[0].hold)
    alike = takewhile(lambda work: work.is_resuming and bool(work.hold) == is_copy, lane.waiting)
    for work in islice(alike, MOST_PROMPTS):
        part = min(work.pending_tokens, most)
        needs.append(part + 1)
        if shares and (lane.is_short(*needs) or (is_copy and sum(needs) > most)):
            break
        shares.append(Share(work, work.computed, part))
    return tuple(shares)


def _have_time(lane: Lane, now: float) -> bool:
    """Whether every prompt that waits would be in time if all of them took their time. A crowd has none."""
    if len(lane.waiting) > FEW_PROMPTS:
        return False
    before_s = 0.0
    for work in lane.waiting:
        before_s += lane.left_s(work, work.start)
        if not is_unhurried(now, before_s, work.due_s):
            return False
    return True
