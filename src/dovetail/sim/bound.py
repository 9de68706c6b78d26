"""How many requests of a trace any policy could serve in time: a linear program whose solutions contain every run.

What a run is, whatever decides in it: a device computes one iteration at a time, of one model: parts of prompts, and at
most one token for each of a batch of requests of which it holds weights and KV. Durations are the profile's. A request
is met if its first token comes within its target (with grace: later by one cold start at most) and its last one within
its pace from there on. Lengths and arrivals are known to the policy from the start, weights may lie anywhere at time 0,
moving and resizing are free, and requests that are not met cost nothing.

From a run to a solution: time is cut into slots, and what an iteration computes is shared out to the slots that it
touches by the time it spends in each. Then, by request (only those that are met), pool of nodes alike and slot:

    x  1 if it is met       z  share of its prompt computed      t  1 in the slot of its first token
    f  share of its other tokens            n, c  iterations of its model's decodes, and seconds of them

and these hold, because they hold for every iteration:
- a request has at most one token of an iteration, so (tokens) f <= n for each request of the model;
- an iteration of b requests with T tokens takes at least what every plane under the decode surface says, contexts being
  at least as long as prompts; a prompt takes at least what its tokens cost in the cheapest iteration that could hold
  them (`pools`); all that fits into the seconds of the pool's nodes; a request is in one iteration at a time;
- a batch's KV and its weights fit into a node; weights that are used in a slot lay in memory at its beginning, whole or
  on their way, or were loaded from then on over the nodes' links;
- the prompt is computed before the first token, which is before the others; the last is in time.

With `silence_s`, answers may be silent for so long at most. One that is between its first and its last token during a
whole slot is cut by its tokens into gaps of at most S seconds; let a gap count for the pool where the token at its end
is computed. Then
- a gap needs a token: the slots around have so many;
- the copy of the weights that computes this token was there for the whole gap, or was loaded in it and so took its
  memory for at least the load's L seconds: of gaps g <= S the weights lie in memory for at least min(1, L/S)·g, except
  for the S - L seconds at most by which the last gap reaches out of the slot;
- the KV was there for the whole gap, or the context was computed again since its beginning, in this slot or in the one
  before the token's.
Weights are shared by all requests of a model, so that the largest such claim counts, not the sum.

Shares may be fractions in the program where a run has 0 or 1, which can only let more in. Silence is promised for 99 of
100 answers: one hundredth of all requests is added. Noise has a mean of 1 and is drawn after a turn is chosen: in the
mean over noise no policy gains device time by it (what a request alone needs is counted at its luckiest).

Not covered: faults, KV that is sent from node to node (`disaggregate`), weights in tiers, and who waits for several
cold starts one after another before its first token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.policy.headroom import INFINITY, SloRule
from dovetail.sim.device import Device
from dovetail.sim.linear import LinearProgram, Term
from dovetail.sim.pools import Pool, pools_of
from dovetail.sim.trace import Arrival

LUCKIEST = 3.0  # deviations of noise by which a turn is shorter at the most
PROMISED = 0.99  # of answers keep the promised silence
STRETCH = 1.25  # slots after the last arrival grow by this: few are left then
ROUNDING = 1e-6  # requests


@dataclass(frozen=True)
class Terms:
    """Under which requests count as met."""

    grace: bool = True  # a cold start excuses a late first token
    every_token: bool = False  # each by its own deadline, instead of the last one by the mean pace
    silence_s: float = INFINITY  # within an answer, at most, for 99 of 100 answers
    noise: float = 0.05  # of durations, one deviation
    slot_s: float = 5.0  # coarser is sooner computed and larger


@dataclass(frozen=True)
class Bound:
    requests: int
    met: int  # at most
    variables: int
    rows: int

    @property
    def rate(self) -> float:
        return self.met / self.requests


def bound(devices: Sequence[Device], arrivals: Sequence[Arrival], rule: SloRule, terms: Terms) -> Bound:
    writer = _Writer(devices, arrivals, rule, terms)
    variables, rows = writer.program.size
    _, most = writer.program.solve()
    if terms.silence_s != INFINITY:
        most += (1.0 - PROMISED) * len(arrivals)
    return Bound(len(arrivals), min(int(most + ROUNDING), len(arrivals)), variables, rows)


class _Part(NamedTuple):
    """A request's tokens in one slot, as others of its model see them."""

    variable: int  # share of its tokens after the first
    tokens: int  # so many are these in all
    held: int  # tokens of its context at least


class _Request(NamedTuple):
    """What is known of one before anything is decided."""

    model: str
    input_tokens: int
    others: int  # tokens after the first
    arrival_s: float
    due_s: float  # of its first token, without grace
    pace_s: float  # that the others may take in all
    met: int  # the variable


class _Slots:
    """Time in pieces; those after the last arrival are longer and longer."""

    def __init__(self, last_arrival_s: float, last_end_s: float, slot_s: float) -> None:
        self.edges = [0.0]
        while self.edges[-1] <= last_end_s:
            if self.edges[-1] > last_arrival_s:
                slot_s *= STRETCH
            self.edges.append(self.edges[-1] + slot_s)

    def seconds(self, slot: int) -> float:
        return self.edges[slot + 1] - self.edges[slot]

    def at(self, time_s: float) -> int:
        """The one that begins before this time and ends then or later."""
        return max(bisect_left(self.edges, time_s) - 1, 0)

    def between(self, start_s: float, end_s: float) -> range:
        return range(bisect_right(self.edges, start_s) - 1, self.at(end_s) + 1)


class _Sums:
    """Of a request's variables by slot: what has happened until the end of a slot."""

    def __init__(self, slots: range, met: int) -> None:
        self.slots = slots
        self.by_slot: dict[int, list[int]] = {slot: [] for slot in slots}
        self._met = met

    def until(self, slot: int, factor: float) -> list[Term]:
        if slot >= self.slots[-1]:
            return [(self._met, factor)]
        return [(variable, factor) for one in self.slots if one <= slot for variable in self.by_slot[one]]


class _Writer:
    """Writes the program down, a request at a time, then what they share."""

    def __init__(self, devices: Sequence[Device], arrivals: Sequence[Arrival], rule: SloRule, terms: Terms) -> None:
        self.program = LinearProgram()
        self._silence_s = terms.silence_s
        self._every_token = terms.every_token
        self._luck = 1.0 - LUCKIEST * terms.noise
        self._pools = pools_of(devices, sum(arrival.input_tokens for arrival in arrivals) // len(arrivals))
        self._graces = [pool.longest_load_s if terms.grace else 0.0 for pool in self._pools]
        requests = [self._request(arrival, rule) for arrival in arrivals]
        last_s = max(one.due_s + one.pace_s for one in requests) + max(self._graces)
        slot_s = terms.slot_s if terms.silence_s == INFINITY else max(terms.slot_s, terms.silence_s)
        self._slots = _Slots(arrivals[-1].arrival_s, last_s, slot_s)
        # What requests add to what they share, by pool and slot.
        self._device_s: dict[tuple[int, int], list[Term]] = defaultdict(list)
        self._memory: dict[tuple[int, int], list[Term]] = defaultdict(list)  # in nodes
        # Likewise, by model, pool and slot.
        self._batches: dict[tuple[str, int, int], list[_Part]] = defaultdict(list)
        self._copies: dict[tuple[str, int, int], list[list[Term]]] = defaultdict(list)  # of weights, claimed by each
        self._uses: dict[tuple[str, int, int], list[int]] = defaultdict(list)  # shares that take a whole copy
        for one in requests:
            self._add(one)
        self._share()

    def _request(self, arrival: Arrival, rule: SloRule) -> _Request:
        due_s = arrival.arrival_s + rule.ttft_s(arrival.input_tokens)
        others = arrival.output_tokens - 1
        met = self.program.variable(1.0, gain=1.0)
        model = str(arrival.model)
        return _Request(model, arrival.input_tokens, others, arrival.arrival_s, due_s, others * rule.tpot_s, met)

    def _add(self, one: _Request) -> None:
        alone: dict[int, list[Term]] = defaultdict(list)  # by slot: seconds of its own iterations
        first = self._prompt(one, alone)
        if one.others:
            self._answer(one, first, alone)
        end_s = one.due_s + max(self._graces) + one.pace_s
        for slot, terms in alone.items():
            seconds = min(self._slots.edges[slot + 1], end_s) - max(self._slots.edges[slot], one.arrival_s)
            self.program.at_most(((variable, self._luck * s) for variable, s in terms), seconds)

    # The prompt and the first token

    def _prompt(self, one: _Request, alone: dict[int, list[Term]]) -> _Sums:
        """Returns the variables of its first token."""
        window = self._slots.between(one.arrival_s, one.due_s + max(self._graces))
        computed, first = _Sums(window, one.met), _Sums(window, one.met)
        for number, pool in enumerate(self._pools):
            end_s = one.due_s + self._graces[number]
            if one.model in pool.hostings and self._is_possible(one, pool, end_s):
                seconds = pool.prompt_s(one.model, one.input_tokens)
                for slot in self._slots.between(one.arrival_s, end_s):
                    share = self.program.variable(1.0)
                    computed.by_slot[slot].append(share)
                    self._uses[one.model, number, slot].append(share)
                    self._device_s[number, slot].append((share, seconds))
                    alone[slot].append((share, seconds))
        for slot in window:
            first.by_slot[slot].append(self.program.variable(1.0))
        for sums in (computed, first):
            self.program.equal([(v, 1.0) for some in sums.by_slot.values() for v in some] + [(one.met, -1.0)])
        for slot in window[:-1]:
            self.program.at_most(first.until(slot, 1.0) + computed.until(slot, -1.0))
        return first

    def _is_possible(self, one: _Request, pool: Pool, end_s: float) -> bool:
        """Computed in whatever parts, beside whatever else, a prompt takes no less than by itself."""
        return pool.hostings[one.model].latency.prefill_s(one.input_tokens) * self._luck <= end_s - one.arrival_s

    # The other tokens

    def _answer(self, one: _Request, first: _Sums, alone: dict[int, list[Term]]) -> None:
        slots = self._slots.between(one.arrival_s, one.due_s + max(self._graces) + one.pace_s)
        parts = {  # by pool and slot
            (number, slot): self.program.variable(1.0)
            for number, pool in enumerate(self._pools)
            if one.model in pool.hostings
            for slot in slots
        }
        for (number, slot), share in parts.items():
            self._batches[one.model, number, slot].append(_Part(share, one.others, one.input_tokens))
            seconds = self._pools[number].decode_s(one.model, one.input_tokens)
            alone[slot].append((share, one.others * seconds))
        told = self._told(one, slots, parts)
        fastest_s = min(self._pools[number].decode_s(one.model, one.input_tokens) for number, _ in parts)
        if one.others * fastest_s * self._luck > one.pace_s:
            self.program.equal([(one.met, 1.0)])
        if self._every_token:
            self._keep_up(one, told)
        for slot in first.slots[:-1]:
            self.program.at_most([(told[slot], 1.0), *first.until(slot, -1.0)])
        for slot in first.slots:
            last = self._slots.at(self._slots.edges[slot + 1] + one.pace_s)
            if last < slots[-1]:
                self.program.at_most([*first.until(slot, 1.0), (told[last], -1.0)])
        if self._silence_s != INFINITY:
            self._go_on(one, first, told, parts)

    def _told(self, one: _Request, slots: range, parts: Mapping[tuple[int, int], int]) -> dict[int, int]:
        """By slot: the share of its tokens that it has by the end of it."""
        told: dict[int, int] = {}
        for slot in slots:
            told[slot] = one.met if slot == slots[-1] else self.program.variable(1.0)
            terms = [(told[slot], -1.0)] + [(told[at], 1.0) for at in (slot - 1,) if at in told]
            terms += [(parts[number, slot], 1.0) for number in range(len(self._pools)) if (number, slot) in parts]
            self.program.equal(terms)
        return told

    def _keep_up(self, one: _Request, told: Mapping[int, int]) -> None:
        """Its tokens are due one by one."""
        due_s = one.due_s + max(self._graces)
        for slot, share in told.items():
            due = int((self._slots.edges[slot + 1] - due_s) * one.others / one.pace_s)
            if 0 < due < one.others:
                self.program.at_most([(one.met, due / one.others), (share, -1.0)])

    # Silence

    def _go_on(
        self, one: _Request, first: _Sums, told: Mapping[int, int], parts: Mapping[tuple[int, int], int]
    ) -> None:
        """In slots that lie between its first and its last token."""
        pools = sorted({number for number, _ in parts})
        last = max(told)
        again = {number: self._computed_again(one, number, first.slots[0], last) for number in pools}
        for slot in range(first.slots[0] + 1, last):
            seconds = self._slots.seconds(slot)
            active = {number: self.program.variable(1.0) for number in pools}
            begun = first.until(slot - 1, 1.0)
            self.program.at_most([*begun, (told[slot], -1.0), *((share, -1.0) for share in active.values())])
            for number, share in active.items():
                near = [parts[number, at] for at in (slot - 1, slot, slot + 1)]
                tokens = self._silence_s * one.others / seconds
                self.program.at_most([(share, 1.0), *((part, -tokens) for part in near)])
                if self._pools[number].weight_bytes(one.model):
                    self._occupy(one, number, slot, share, first, again[number])

    def _computed_again(self, one: _Request, number: int, start: int, last: int) -> dict[int, list[int]]:
        """By slot in which a gap ends: how often its context is computed again for that, in that slot or before."""
        pool, found = self._pools[number], {}
        if pool.weight_bytes(one.model):
            cost_s = pool.prompt_s(one.model, one.input_tokens)
            for slot in range(start + 1, last + 1):
                most = self._slots.seconds(slot) / self._silence_s + 1.0
                found[slot] = [self.program.variable(most), self.program.variable(most)]
                for at, variable in zip((slot, slot - 1), found[slot], strict=True):
                    self._device_s[number, at].append((variable, cost_s))
        return found

    def _occupy(
        self, one: _Request, number: int, slot: int, active: int, first: _Sums, again: Mapping[int, list[int]]
    ) -> None:
        """Memory for its weights, claimed for all of its model, and for its KV."""
        pool, seconds, silence_s = self._pools[number], self._slots.seconds(slot), self._silence_s
        load_s = pool.load_s[one.model]
        kept = min(1.0, load_s / silence_s)
        beyond = max(silence_s - load_s, 0.0) / seconds
        self._uses[one.model, number, slot].append(active)
        self._copies[one.model, number, slot].append([(active, kept), *first.until(slot - 1, -beyond)])
        held = self.program.variable(1.0)
        times = [variable for at in (slot, slot + 1) for variable in again[at]]
        self.program.at_most([(active, 1.0), (held, -1.0), *((one, -silence_s / seconds) for one in times)])
        size = one.input_tokens * pool.hostings[one.model].kv_bytes_per_token / pool.memory_bytes
        self._memory[number, slot].append((held, size))

    # What is shared

    def _share(self) -> None:
        for (model, number, slot), batch in self._batches.items():
            self._decode(model, number, slot, batch)
        for (model, number, slot), claims in self._copies.items():
            pool = self._pools[number]
            size = pool.weight_bytes(model) / pool.memory_bytes
            copies = self.program.variable(pool.count / size)
            self._memory[number, slot].append((copies, size))
            for claim in claims:
                self.program.at_most([*claim, (copies, -1.0)])
        self._use_weights()
        for (number, slot), terms in self._device_s.items():
            seconds = self._pools[number].count * self._slots.seconds(slot)
            self.program.at_most([(variable, cost_s / seconds) for variable, cost_s in terms], 1.0)
        for (number, _), terms in self._memory.items():
            self.program.at_most(terms, self._pools[number].count)

    def _use_weights(self) -> None:
        """Whoever computes a prompt, or goes on with an answer, has a whole copy of the weights there in that slot."""
        used: dict[tuple[int, int], list[Term]] = defaultdict(list)
        for (model, number, slot), shares in self._uses.items():
            size = self._pools[number].weight_bytes(model) / self._pools[number].memory_bytes
            if size:
                copy = self.program.variable(1.0)
                used[number, slot].append((copy, size))
                for share in shares:
                    self.program.at_most([(share, 1.0), (copy, -1.0)])
        for (number, slot), terms in used.items():
            self.program.at_most(terms, self._pools[number].most_used(self._slots.seconds(slot)))

    def _decode(self, model: str, number: int, slot: int, batch: Sequence[_Part]) -> None:
        """Iterations of a model in a slot, and their seconds, each as a share of the most that there can be."""
        pool, costs = self._pools[number], self._device_s[number, slot]
        if len(batch) == 1:
            part = batch[0]
            costs.append((part.variable, part.tokens * pool.decode_s(model, part.held)))
            return
        most_s = pool.count * self._slots.seconds(slot)
        most = most_s / pool.decode_s(model, 0)
        turns, spent = self.program.variable(1.0), self.program.variable(1.0)
        costs.append((spent, most_s))
        for part in batch:
            self.program.at_most([(part.variable, 1.0), (turns, -most / part.tokens)])
        for plane in pool.planes[model]:
            own = [(p.variable, p.tokens * (plane.request_s + p.held * plane.token_s) / most_s) for p in batch]
            self.program.at_most([(turns, most * plane.turn_s / most_s), *own, (spent, -1.0)])
        room = (pool.memory_bytes - pool.weight_bytes(model)) / pool.hostings[model].kv_bytes_per_token
        held = [(part.variable, part.tokens * part.held / most / room) for part in batch]
        self.program.at_most([*held, (turns, -1.0)])
