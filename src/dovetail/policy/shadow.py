"""Shadow validation by playing a node's own turns (S4): may a request join without making anybody late?

Plays the rule by which the node chooses turns until the candidate has its first token and everyone else one more token
after it. Instances that are loading or resizing take part from when they are expected to be ready.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.policy.headroom import (
    INFINITY,
    SILENCE_MARGIN_S,
    Candidate,
    InstanceDemand,
    Prefill,
    Refusal,
    choose_turn,
    is_overcommitted,
    is_overtaken,
    must_be_late,
)
from dovetail.policy.parts import (
    FEWEST_TOKENS,
    begins_by_s,
    part_limit_s,
    stretched_s,
)
from dovetail.policy.player import Player
from dovetail.policy.rounds import SMOOTH_LIMIT, may_compute, next_to_answer, part_between_s
from dovetail.policy.turn_rule import TurnRule

# Bounds on what one validation costs. They are reached only where prefills wait by the dozen. In rounds there is a rule
# for what comes after, so that fewer do.
MAX_TURNS, MAX_TURNS_IN_ROUNDS = 192, 64


def validate(
    demands: Sequence[InstanceDemand],
    target: int,
    candidate: Candidate,
    start_s: float,
    rule: TurnRule,
    *,
    is_looked_at: bool = False,
) -> Refusal | None:
    """S4. `start_s` is when the device is next free; None means that all three cases are clear. `is_looked_at`: it is
    known that the pace is kept and that it need not be late by itself."""
    if not is_looked_at and is_overcommitted(demands, target, candidate):
        return Refusal.DECODE_OVERCOMMITTED
    if not is_looked_at and must_be_late(candidate, demands[target], start_s):
        return Refusal.FIRST_TOKEN_LATE
    if (late := _infeasible(demands, candidate, start_s)) is not None:
        return late
    return _Play(demands, target, candidate, rule).run(start_s)


def _infeasible(demands: Sequence[InstanceDemand], candidate: Candidate, start_s: float) -> Refusal | None:
    """What no order of turns could keep: until some deadline there is more to do than time. Most of what is refused is
    found here, at a fraction of what playing it costs."""
    prefills = [(one.due_s, one.seconds) for demand in demands for one in demand.prefills]
    prefills.append((candidate.prefill.due_s, candidate.prefill.seconds))
    prefills.sort()
    running = [one for one in demands if one.decode_deadline_s != INFINITY]
    total_s = 0.0
    for due_s, seconds in prefills:
        if due_s == INFINITY:
            break
        total_s += seconds
        needed_s = total_s
        for one in running:
            if one.decode_deadline_s <= due_s:
                needed_s += (int((due_s - one.decode_deadline_s) / one.tpot_s) + 1) * one.decode_s
        if start_s + needed_s > due_s:
            return Refusal.FIRST_TOKEN_LATE if due_s == candidate.prefill.due_s else Refusal.NEIGHBOUR_LATE
    return None


class _Play:
    """The node's next turns with the candidate on it."""

    __slots__ = ("_awaited", "_in_rounds", "_last_ready_s", "_parted_s", "_players", "_round_s", "_rule", "_waiting")

    def __init__(self, demands: Sequence[InstanceDemand], target: int, candidate: Candidate, rule: TurnRule) -> None:
        joined = Player(demands[target], rule)
        self._awaited = joined.take(candidate)  # the candidate's own prefill, until it is done
        self._players = [Player(one, rule) for index, one in enumerate(demands) if index != target and one.batch]
        self._players.append(joined)
        self._rule = rule
        self._in_rounds = rule.in_rounds and len(self._players) > 1
        self._round_s = self._last_ready_s = 0.0
        self._waiting = 0
        for one in self._players:
            self._round_s += one.decode_s
            self._waiting += len(one.prefills)
            if one.ready_s > self._last_ready_s:
                self._last_ready_s = one.ready_s
        self._parted_s = max(one.parted_s for one in demands)  # when the last part of a prompt was computed

    def run(self, clock: float) -> Refusal | None:
        for _ in range(MAX_TURNS_IN_ROUNDS if self._rule.in_rounds else MAX_TURNS):
            ready = self._players
            if self._last_ready_s > clock:
                ready = [one for one in ready if one.ready_s <= clock]
            until_s = INFINITY
            if self._in_rounds:
                chosen, until_s, clock = self._next_in_rounds(ready, clock)
            else:
                chosen = choose_turn(ready, clock, self._rule.slack_s)
            if chosen is None:
                if self._last_ready_s <= clock:
                    return None
                clock = min(one.ready_s for one in self._players if one.ready_s > clock)
                continue
            is_prefill = until_s > 0.0 and chosen.prefills_next(clock)
            if is_prefill and self._rule.part_s != INFINITY:
                chosen, latest_s = self._overtaking(chosen, ready, clock)
                until_s = min(until_s, latest_s)
                is_prefill = until_s > 0.0
            if is_prefill:
                spent_s, done = chosen.compose(until_s - clock, clock)
                clock += spent_s
                chosen.turned(spent_s, clock)
                self._parted_s = clock
                if not done:
                    continue
                if (late := self._prefilled(chosen, done, clock)) is not None:
                    return late
            else:
                if clock + chosen.decode_s > chosen.latest_s:
                    return Refusal.NEIGHBOUR_LATE
                if chosen.is_settled and (skipped := self._skip_rounds(ready, clock)) > clock:
                    clock = skipped
                    continue
                times = 1 if self._in_rounds else self._in_a_row(chosen, ready, clock)
                clock += times * chosen.decode_s
                chosen.decode(times, clock)
            if not self._waiting and self._is_over(clock):
                return None
        if self._rule.in_rounds:
            return self._goes_on(clock)
        return None if self._awaited is None else Refusal.FIRST_TOKEN_LATE

    def _goes_on(self, clock: float) -> Refusal | None:
        """The rest in rounds, counted instead of played: behind each part of a prompt everybody has a token, and the
        others one more before the prompter's own answers have theirs. Where answers have no time for that, there are
        rounds without a part between, until they are so far ahead again."""
        round_s = self._round_s if len(self._players) == 1 else 2 * self._round_s
        answers = [(one.due_s - clock, one.tpot_s) for one in self._players if one.due_s != INFINITY]
        waiting = [(prefill, one) for one in self._players for prefill in one.prefills[one.next :]]
        for one, player in sorted(waiting, key=lambda found: found[0].urgent_s):
            room_s = min([tpot_s for _, tpot_s in answers], default=INFINITY) - self._round_s
            limit_s = min(self._round_s, part_limit_s(self._rule.part_s, one.split_s))
            limit_s = max(limit_s, SMOOTH_LIMIT * one.split_s)
            count, part_s = player.parts_of(one, max(min(limit_s, room_s), one.part_s))
            parts = -int(-count // 1)
            rounds = float(parts)
            computing_s = count * part_s
            for left_s, tpot_s in answers:
                if computing_s > left_s:
                    rounds = max(rounds, (computing_s - left_s) / max(tpot_s - self._round_s, 1e-9))
            spent_s = computing_s + parts * round_s + (rounds - parts) * self._round_s
            clock += spent_s
            if clock > one.due_s or (answers and part_s + round_s > self._rule.max_silence_s):
                return Refusal.FIRST_TOKEN_LATE if one is self._awaited else Refusal.NEIGHBOUR_LATE
            answers = [(left_s + rounds * tpot_s - spent_s, tpot_s) for left_s, tpot_s in answers]
            answers.append((one.tpot_s, one.tpot_s))
        return None

    def _next_in_rounds(self, ready: Sequence[Player], clock: float) -> tuple[Player | None, float, float]:
        """Whose turn it is by `policy.rounds`; until when it computes a part of its prompt, 0 if it decodes; and the
        time, which is later if rounds could be played as one."""
        answering = [one for one in ready if one.due_s != INFINITY]
        prompting = [one for one in ready if one.next < len(one.prefills)]
        prompter = min(prompting, key=lambda one: one.prefills[one.next].urgent_s, default=None)
        if prompter is None or not may_compute(prompter, answering, self._parted_s):
            return next_to_answer(answering, clock) if answering else None, 0.0, clock
        if not answering:
            return prompter, INFINITY, clock
        first = prompter.prefills[prompter.next]
        part_s = part_between_s(prompter, answering, self._rule.part_s, first.split_s)
        part_s = stretched_s(part_s, prompter.whole_s, first.lost_s)
        clock = self._skip_parts(prompter, answering, part_s, clock)
        return prompter, clock + part_s, clock

    def _skip_parts(self, prompter: Player, answering: Sequence[Player], part_s: float, clock: float) -> float:
        """The time after the rounds that certainly lie before the last parts of its prompt, each with a part so long:
        they are played as one while nobody gets late in them."""
        first, others_s = prompter.prefills[prompter.next], sum(one.decode_s for one in answering)
        count, part_s = prompter.parts_of(first, part_s)
        parts, round_s = 1, part_s + others_s  # of a round, in which everyone else has as many tokens, itself one
        if prompter.due_s != INFINITY:  # between two tokens of its own there are parts for about as long
            others_s -= prompter.decode_s
            parts = max(-int(-prompter.decode_s // part_s), 1)
            round_s = parts * part_s + prompter.decode_s + (parts + 1 if len(answering) > 1 else 0) * others_s
        if count <= parts or round_s > self._rule.max_silence_s:
            return clock
        rounds = count / parts - 1.0
        if self._last_ready_s > clock:
            first_ready = min(one.ready_s for one in self._players if one.ready_s > clock)
            rounds = min(rounds, (first_ready - clock) / round_s)
        own, others = 1, parts + 1 if prompter.due_s != INFINITY else 1
        for one in answering:
            loses_s = round_s - (own if one is prompter else others) * one.tpot_s
            spare_s = one.latest_s - clock - round_s
            if spare_s < max(loses_s, 0.0) * rounds:
                rounds = spare_s / loses_s if loses_s > 0.0 else 0.0
        whole = int(rounds)
        if whole < 1:
            return clock
        clock += whole * round_s
        done = int(prompter.left_of(first)[1] * whole * parts / count)
        prompter.begun += done - done % FEWEST_TOKENS
        prompter.look_ahead()
        for one in answering:
            one.decode(whole * (own if one is prompter else others), clock)
        prompter.turned_s = self._parted_s = clock
        return clock

    def _overtaking(self, chosen: Player, ready: Sequence[Player], clock: float) -> tuple[Player, float]:
        """Who computes: the chosen one its prompt, until the time that is returned, or, with 0, somebody who decodes
        before it."""
        in_time = [one for one in ready if one.due_s != INFINITY and one.latest_s >= clock]
        until_s = begins_by_s([(one.latest_s, one.decode_s) for one in in_time])
        first = chosen.prefills[chosen.next]
        latest_s = first.due_s - chosen.left_s
        if in_time and is_overtaken(clock, chosen.least_s, latest_s, until_s):
            return min(in_time, key=lambda one: one.latest_s), 0.0
        if self._last_ready_s > clock:  # who gets ready meanwhile is looked at after the part under way
            first_ready = min(one.ready_s for one in self._players if one.ready_s > clock)
            until_s = min(until_s, first_ready + self._rule.part_s)
        return chosen, max(until_s, clock)

    def _prefilled(self, player: Player, done: Sequence[Prefill], clock: float) -> Refusal | None:
        """These have their token now, and run; who is late."""
        for one in done:
            if clock > one.due_s:
                return Refusal.FIRST_TOKEN_LATE if one is self._awaited else Refusal.NEIGHBOUR_LATE
            player.join(one, clock)
            if one is self._awaited:
                self._awaited = None
        self._waiting -= len(done)
        for player in self._players:
            player.is_settled = False
        return None

    def _in_a_row(self, chosen: Player, ready: Sequence[Player], clock: float) -> int:
        """How many iterations it has before anybody else is more urgent or gets ready: they are played as one."""
        urgent = INFINITY
        for one in ready:
            if one.urgent_s < urgent and one is not chosen:
                urgent = one.urgent_s
        drains_s = self._drains_s(chosen, ready, urgent, clock)
        if urgent == INFINITY:
            urgent = chosen.due_s  # alone, one more tells enough
        times = int((urgent - chosen.due_s) / chosen.tpot_s) + 1 if urgent > chosen.due_s else 1
        if 0.0 < drains_s < INFINITY:  # nobody else has anything due: it is as good as alone
            times = int(drains_s / chosen.decode_s) + 1
        if self._last_ready_s > clock:
            first_ready = min(one.ready_s for one in self._players if one.ready_s > clock)
            times = min(times, int((first_ready - clock) / chosen.decode_s) + 1)
        return times

    def _skip_rounds(self, ready: Sequence[Player], clock: float) -> float:
        """The time after the rounds of decodes that certainly lie before the next prefill or the next instance that
        gets ready. Once everyone has had a token in time they are played as one: by case 3 each round leaves everyone
        better off."""
        if self._in_rounds and any(one.next < len(one.prefills) for one in ready):
            return clock
        urgent = INFINITY
        for one in ready:
            if one.urgent_s < urgent and one.next < len(one.prefills):
                urgent = one.urgent_s
        group = []
        for one in ready:
            if one.urgent_s < urgent and one.next == len(one.prefills):
                if not one.is_settled:
                    return clock
                group.append(one)
        if not group:
            return clock
        rounds = self._rounds_until(urgent, group, clock)
        if rounds < 1:
            return clock
        clock += rounds * sum([one.decode_s for one in group])
        for one in group:
            one.decode(rounds, clock)
        return clock

    def _rounds_until(self, urgent: float, group: Sequence[Player], clock: float) -> int:
        """How many rounds of all of them come before something that is this urgent, one less to be sure."""
        round_s, rounds = 0.0, INFINITY
        for one in group:
            round_s += one.decode_s
            rounds = min(rounds, (urgent - one.due_s) / one.tpot_s)
        silence_s = urgent - self._rule.turn_silence_s - clock
        if silence_s > 0.0:  # until then a silence is more urgent, however far ahead they are
            rounds = max(rounds, silence_s / round_s)
        if self._last_ready_s > clock:
            first_ready = min(one.ready_s for one in self._players if one.ready_s > clock)
            rounds = min(rounds, (first_ready - clock) / round_s)
        return int(rounds) - 1 if rounds < INFINITY else 0

    def _drains_s(self, chosen: Player, ready: Sequence[Player], urgent: float, clock: float) -> float:
        """How long everyone else has slack, so that it goes on running as what frees most."""
        slack_s = self._rule.slack_s
        if slack_s is None or chosen.deadline_s - clock <= slack_s or chosen.urgent_s - clock <= SILENCE_MARGIN_S:
            return 0.0
        due = min((one.deadline_s for one in ready if one is not chosen), default=0.0)
        return min(due - slack_s, urgent - SILENCE_MARGIN_S) - clock

    def _is_over(self, clock: float) -> bool:
        """Everyone has had a token since the last prefill, or is so far ahead that a round of all cannot make it late:
        from here on case 3 keeps them in time."""
        for one in self._players:
            if not one.is_settled and one.due_s != INFINITY:
                ahead_s = one.latest_s - max(clock, one.ready_s)
                if ahead_s < self._round_s:
                    return False
        return True
