"""One instance while shadow validation plays its turns: its prompts in parts, and its running requests as one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from dovetail.policy.headroom import INFINITY, Candidate, InstanceDemand, Prefill, guards_decodes
from dovetail.policy.latency import prompt_s, prompts_s
from dovetail.policy.parts import (
    MOST_PROMPTS,
    in_parts_s,
    least_s,
    part_limit_s,
    parts_of,
    stretched_s,
    tokens_together,
)
from dovetail.policy.turn_rule import TurnRule

BY_URGENCY = attrgetter("urgent_s")


class Player:
    __slots__ = (
        "batch",
        "begun",
        "deadline_s",
        "decode_s",
        "due_s",
        "frees_bytes",
        "is_settled",
        "latency",
        "latest_s",
        "least_s",
        "left_s",
        "next",
        "overestimate",
        "prefills",
        "prompted_s",
        "ready_s",
        "rule",
        "spoke_s",
        "tpot_s",
        "turned_s",
        "urgent_s",
        "whole_s",
    )

    def __init__(self, demand: InstanceDemand, rule: TurnRule) -> None:
        self.rule = rule
        self.batch = demand.batch
        self.latency = demand.latency
        self.overestimate = demand.overestimate
        self.frees_bytes = demand.frees_bytes
        self.decode_s = demand.decode_s
        self.due_s = demand.decode_deadline_s  # of its running requests
        self.spoke_s = demand.spoke_s
        self.turned_s = demand.turned_s
        self.prompted_s = demand.prompted_s
        self.tpot_s = demand.tpot_s
        self.ready_s = demand.ready_s
        self.prefills: Sequence[Prefill] = demand.prefills
        self.next = 0  # of the prefills
        self.begun = 0  # tokens of it that are computed
        self.is_settled = False  # it has had a token since the last prefill of anybody
        self.whole_s = self.left_s = 0.0  # what is left of it at once, and in parts
        self.least_s = 0.0  # what the smallest part takes
        self.look_ahead()

    def look_ahead(self) -> None:
        """When its next token is due, after any change."""
        due_s, spoke_s, rule = self.due_s, self.spoke_s, self.rule
        deadline_s = due_s
        # No turn keeps a silence that is shorter than an iteration.
        urgent_s, latest_s = spoke_s + rule.turn_silence_s, spoke_s + max(rule.max_silence_s, self.decode_s)
        if due_s < urgent_s:
            urgent_s = due_s
        self.latest_s = due_s if due_s < latest_s else latest_s  # its running requests must have their next token
        if self.next < len(self.prefills):
            first = self.prefills[self.next]
            if first.due_s < deadline_s:
                deadline_s = first.due_s
            if first.urgent_s < urgent_s:
                urgent_s = first.urgent_s
            self._look_at(first)
        self.deadline_s = deadline_s
        self.urgent_s = urgent_s

    def _look_at(self, first: Prefill) -> None:
        whole_s = first.seconds
        self.least_s = first.part_s
        if self.begun:
            assert self.latency is not None
            start, tokens = self.left_of(first)
            whole_s = prompt_s(self.latency, start, tokens) * self.overestimate
            self.least_s = least_s(self.latency, start, tokens) * self.overestimate
        self.whole_s = whole_s
        self.left_s = in_parts_s(whole_s, self.rule.part_s, first.split_s, first.lost_s)

    def left_of(self, first: Prefill) -> tuple[int, int]:
        """Which tokens of the prefill that is next are left: from which on, and how many."""
        return first.start + self.begun, first.tokens - self.begun

    def take(self, candidate: Candidate) -> Prefill | None:
        """The candidate joins; returns its prefill, if it needs one."""
        self.batch += 1
        self.decode_s = candidate.decode_s
        prefill = candidate.prefill if candidate.prefill.seconds else None
        if prefill is not None:
            self.prefills = sorted((*self.prefills, prefill), key=BY_URGENCY) if self.prefills else (prefill,)
        else:
            self._run(candidate.prefill.due_s, candidate.prefill.tpot_s)
        self.look_ahead()
        return prefill

    def prefills_next(self, clock: float) -> bool:
        """Whether a turn of it now is a prefill."""
        if self.next == len(self.prefills):
            return False
        if self.rule.part_s != INFINITY:
            return True  # unless somebody overtakes it
        first = self.prefills[self.next]
        return not self.rule.guards_decodes or not guards_decodes(clock, first.seconds, first.urgent_s, self.latest_s)

    def compose(self, seconds: float, clock: float) -> tuple[float, list[Prefill]]:
        """An iteration for its prompts of about so long, as `policy.turn` makes it: what it takes, and which prefills
        are done with it. With none, a part of the first one is."""
        first = self.prefills[self.next]
        limit_s = part_limit_s(self.rule.part_s, first.split_s)
        if self.latency is None or limit_s < self.left_s <= seconds:  # it has no parts, or nobody comes between them
            return self.left_s, [self._pop()]
        waiting = self.prefills[self.next + 1 : self.next + MOST_PROMPTS] if self.rule.packs_prompts else ()
        start, pending = self.left_of(first)
        more = [one.tokens for one in waiting]
        limit_s = stretched_s(limit_s, self.whole_s, first.lost_s)
        within_s, left_s = min(seconds, limit_s) / self.overestimate, (first.due_s - clock) / self.overestimate
        tokens = tokens_together(self.latency, start, pending, more, within_s, left_s)
        parts = [(start, tokens[0]), *((one.start, one.tokens) for one, _ in zip(waiting, tokens[1:], strict=False))]
        done = [self._pop() for _ in tokens] if tokens[0] == pending else []
        if not done:
            self.begun += tokens[0]
            self._look_at(first)
        return prompts_s(self.latency, parts) * self.overestimate, done

    def parts_of(self, prefill: Prefill, seconds: float) -> tuple[float, float]:
        """How many parts of about so long are left of it, and what one takes."""
        if self.latency is None:
            return 1.0, prefill.seconds
        begun = self.begun if prefill is self.prefills[self.next] else 0
        within_s = seconds / self.overestimate
        count, part_s = parts_of(self.latency, prefill.start + begun, prefill.tokens - begun, within_s)
        return count, part_s * self.overestimate

    def _pop(self) -> Prefill:
        done = self.prefills[self.next]
        self.next += 1
        self.begun = 0
        return done

    def turned(self, spent_s: float, clock: float) -> None:
        """A turn of so long that was spent on a prompt has ended."""
        self.turned_s = clock
        self.prompted_s += spent_s

    def join(self, done: Prefill, clock: float) -> None:
        """What was prefilled runs from now on."""
        if self.decode_s:  # a prefill instance of its own hands it over instead
            self._run(min(done.due_s, clock + done.safety_s) + done.tpot_s, done.tpot_s)
            if clock < self.spoke_s:
                self.spoke_s = clock
        self.look_ahead()

    def _run(self, due_s: float, tpot_s: float) -> None:
        if due_s < self.due_s:
            self.due_s = due_s
        if tpot_s < self.tpot_s:
            self.tpot_s = tpot_s

    def decode(self, times: int, clock: float) -> None:
        self.due_s += times * self.tpot_s
        self.spoke_s = self.turned_s = clock
        self.prompted_s = 0.0
        self.is_settled = True
        self.look_ahead()
