"""The requests of one model on one device by counters (S2, S5), the KV blocks that they hold, and how long they take.

Every decode iteration yields one token for each running request, so a clock per lane replaces a counter per request: a
request that joined at clock j has made clock − j tokens since. Knows nothing of whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import prompt_s
from dovetail.policy.parts import in_parts_s, lost_s, split_s
from dovetail.policy.placement import Hosting
from dovetail.policy.turn_rule import TurnRule
from dovetail.policy.work import Phase, Work


class Members:
    __slots__ = (
        "_lengths",
        "_resting_tokens",
        "best_effort",
        "clock",
        "held",
        "held_tokens",
        "hosting",
        "kv_tokens",
        "overestimate",
        "patient",
        "phase",
        "riding",
        "riding_tokens",
        "rule",
        "running",
        "suspended",
        "tokens",
        "waiting",
    )

    def __init__(self, hosting: Hosting, overestimate: float, phase: Phase, rule: TurnRule) -> None:
        self.hosting = hosting
        self.overestimate = overestimate
        self.phase = phase
        self.rule = rule
        self.waiting: list[Work] = []  # needs a prefill, and somebody waits for it; most urgent first
        self.patient: list[Work] = []  # likewise, of best effort; first come, first served
        self.running: dict[int, Work] = {}
        # Without a turn: copies that are computed here and run elsewhere (L4); who waits for a grammar or an adapter.
        self.held: dict[int, Work] = {}
        self.suspended: dict[int, Work] = {}  # best effort that has KV here and no part in the next decode
        self.held_tokens = 0  # KV of those two and of prompts that are partly computed, with a block to spare each
        self.best_effort = 0  # of all these requests
        self.riding = 0  # of the running ones
        self.kv_tokens = 0  # room in its KV pool
        self.clock = 0  # decode iterations done
        self.tokens = 0  # known tokens of the running batch
        self._resting_tokens = 0  # of who waits or is held and is waited for
        self.riding_tokens = 0  # of best effort in the running batch
        self._lengths: list[tuple[int, int]] | None = None  # as of then

    @property
    def batch(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.held) + len(self.patient) + len(self.suspended)

    @property
    def waited_for(self) -> int:
        """Requests that are not best effort."""
        return self.batch - self.best_effort

    @property
    def has_turns(self) -> bool:
        """Somebody wants an iteration; requests that are held want none."""
        return bool(self.waiting or self.running or self.patient or self.suspended)

    @property
    def answers(self) -> bool:
        """Somebody runs who is waited for."""
        return len(self.running) > self.riding

    @property
    def is_waited_for(self) -> bool:
        """Somebody wants an iteration who is."""
        return bool(self.waiting) or self.answers

    def queue_of(self, work: Work) -> list[Work]:
        """Where it waits for its prefill."""
        return self.patient if work.is_best_effort else self.waiting

    @property
    def frees_bytes(self) -> float:
        """Memory that running it to its end is expected to free: its cache, and its weights the less likely the more
        requests share them, because others keep joining."""
        return self.tokens * self.hosting.kv_bytes_per_token + self.hosting.weight_bytes / max(self.batch, 1)

    def works(self) -> list[Work]:
        return [*self.waiting, *self.running.values(), *self._at_rest()]

    def _at_rest(self) -> list[Work]:
        """Without a place in the running batch, and not among those who wait for one."""
        return [*self.held.values(), *self.patient, *self.suspended.values()]

    def produced(self, work: Work) -> int:
        return work.produced + (self.clock - work.joined_clock if work.id in self.running else 0)

    def due_s(self, work: Work) -> float:
        return work.first_due_s + work.tpot_s * self.produced(work)

    def lengths(self) -> list[tuple[int, int]]:
        """(input, produced) of all its work. Asked for several times between two turns: a list of the caller's own."""
        if self._lengths is None:
            clock = self.clock
            pairs = [(w.input_tokens, w.produced + clock - w.joined_clock) for w in self.running.values()]
            pairs += [(w.input_tokens, w.produced) for w in [*self.waiting, *self._at_rest()]]
            self._lengths = pairs
        return self._lengths.copy()

    def lengths_waited_for(self) -> list[tuple[int, int]]:
        """Without best effort."""
        if not self.best_effort:
            return self.lengths()
        return [(work.input_tokens, self.produced(work)) for work in self.works() if not work.is_best_effort]

    def tokens_of(self, ids: Iterable[int]) -> int:
        """Known tokens of these running requests."""
        running, clock = self.running, self.clock
        works = [running[id] for id in ids]
        return sum([work.input_tokens + work.produced + clock - work.joined_clock for work in works])

    # KV blocks

    def holds_blocks(self, work: Work) -> bool:
        return work.id in self.running or work.computed > 0

    def used_blocks(self) -> int:
        """Exact: each request that has KV here rounds up to whole blocks."""
        size = self.hosting.block_tokens
        clock = self.clock
        total = 0
        for work in self.running.values():
            total += -((work.input_tokens + work.produced + clock - work.joined_clock) // -size)
        if self.held_tokens:
            total += sum(-(work.computed // -size) for work in [*self._at_rest(), *self.waiting])
        return total

    @property
    def best_effort_tokens(self) -> int:
        """Known tokens of best effort whose prompt is computed."""
        return self.riding_tokens + sum([work.computed for work in self.suspended.values()])

    def spare_blocks(self) -> int:
        """How many more may run, so that the next iteration fits the KV pool."""
        return max(self.kv_tokens // self.hosting.block_tokens - self.used_blocks() - len(self.running), 0)

    @property
    def loose_tokens(self) -> int:
        """What `used_blocks` comes to at most, in tokens."""
        return self.tokens + len(self.running) * self.hosting.block_tokens + self.held_tokens

    def bare_tokens(self) -> int:
        """What the KV pool must hold for its next iteration: whole blocks, and one to spare."""
        return (self.used_blocks() + len(self.running) + 1) * self.hosting.block_tokens

    def is_short(self, *prompts: int) -> bool:
        """The next iteration, with prompts that need room for so many more tokens each, could overrun the KV pool."""
        size = self.hosting.block_tokens
        spare_tokens = size * max(len(prompts) - 1, 0)  # each rounds up to whole blocks
        if self.loose_tokens + sum(prompts) + spare_tokens <= self.kv_tokens:
            return False
        more = sum([-(tokens // -size) for tokens in prompts])
        return (self.used_blocks() + len(self.running) + more) * size > self.kv_tokens

    # Estimates

    def decode_s(self, extra_tokens: int = 0, extra_requests: int = 0) -> float:
        """One iteration of everybody who is waited for, overestimated; waiting work counts as if it ran."""
        count = self.waited_for + extra_requests
        if count == 0 or self.phase is Phase.PREFILL:
            return 0.0
        total = self.tokens - self.riding_tokens + extra_tokens + self._resting_tokens
        return self.hosting.latency.decode_s(count, total) * self.overestimate

    def batch_s(self) -> float:
        """One iteration of those who run."""
        return self.hosting.latency.decode_s(len(self.running), self.tokens) * self.overestimate

    def splitting_s(self) -> float:
        """As of `split_s`."""
        return split_s(self.hosting.latency) * self.overestimate if self.rule.part_s != INFINITY else 0.0

    def lost_s(self) -> float:
        """What a prompt takes longer with each further part."""
        return lost_s(self.hosting.latency) * self.overestimate if self.rule.part_s != INFINITY else 0.0

    def at_once_s(self, work: Work, start: int) -> float:
        """What is left of a prompt from this token on, in one piece."""
        return prompt_s(self.hosting.latency, start, work.known_tokens - start) * self.overestimate

    def left_s(self, work: Work, start: int) -> float:
        """The same in parts, if nobody comes between."""
        seconds, part_s = self.at_once_s(work, start), self.rule.part_s
        return seconds if seconds <= part_s else in_parts_s(seconds, part_s, self.splitting_s(), self.lost_s())

    def latest_prefill_s(self, work: Work, seconds: float) -> float:
        """When what is left of its prompt, which takes so long, has to begin at the latest."""
        urgent_s = urgent_prefill_s(work, self.rule.turn_silence_s, seconds)
        return urgent_s - seconds if self.rule.turn_silence_s == INFINITY else urgent_s


FIRST_S = 1e6  # so much earlier has a prompt its turn that goes before all others


def prefill_turn_s(work: Work, silence_s: float, prefill_s: float) -> float:
    """The smallest of prompts has its turn first."""
    urgent_s = urgent_prefill_s(work, silence_s, prefill_s)
    return urgent_s - FIRST_S if work.goes_first else urgent_s


def urgent_prefill_s(work: Work, silence_s: float, prefill_s: float) -> float:
    """By when a prefill should have its turn. Where silence is bounded nobody may run far ahead, so that a prefill that
    waits for its deadline would come too late by what it takes itself."""
    due_s = work.due_s
    if silence_s == INFINITY:
        return due_s
    if work.last_token_s is not None and not work.hold:  # else its reader hears it from elsewhere
        due_s = min(due_s, work.last_token_s + silence_s)
    return due_s - prefill_s
