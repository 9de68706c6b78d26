"""KV pools as contexts grow: making them larger and smaller (S6, S8), and what to do when memory or time runs out.

Admission cannot know how long answers become. Before anybody is evicted, neighbours lend what they hold for tokens to
come, and the cluster is asked to move somebody elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from dovetail.node.admission import Admitter, Grant
from dovetail.node.device import Device
from dovetail.node.instance import Instance
from dovetail.node.lifecycle import Lifecycle
from dovetail.node.protocol import GIVES_WAY, Overcommitted
from dovetail.node.residency import Residency
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.memory import granted_tokens, should_shrink
from dovetail.policy.work import Work

LOOK_AROUND_TURNS = 16  # of an instance: how often it is looked whether contexts have outgrown time and memory
MOST_AHEAD_TURNS = 192  # beyond that nobody knows which answers still run
LENT_TURNS = 32  # whoever lends keeps room for so many, and whoever borrows gets it


class Pools:
    def __init__(self, device: Device, residency: Residency, admit: Admitter, lives: Lifecycle) -> None:
        self._device = device
        self._resizing = device.composition.resizing
        self._watermark = device.composition.memory.watermark
        self._ahead_s = device.composition.relief.ahead_s
        self._instances = device.instances
        self._residency = residency
        self._admit = admit
        self._lives = lives

    def after_leaving(self, instance: Instance, now: float) -> None:
        """A request has left."""
        instance.starved = False
        if instance.batch:
            self.shrink(instance)
            self._device.update(instance)
        else:
            self._lives.emptied(instance, now)

    def fit_in(self, instance: Instance, first: Work, now: float) -> bool:
        """Whether something was done about a pool that its next prompt does not fit: else those who run go on. For one
        whose reader has heard something already somebody may have to go; for others it is only made larger."""
        tokens = first.pending_tokens + 1
        if not instance.running or (instance.rule.in_rounds and first.is_resuming):
            self.make_room(instance, now, first)
            return True
        if not instance.rule.in_rounds or self._residency.planned_kv_tokens(instance) > instance.kv_tokens:
            return False  # it grows already
        self._enlarge(instance, tokens)
        self._device.update(instance)
        return not instance.can_run  # else that waits for memory of others

    def make_room(self, instance: Instance, now: float, prompt: Work | None = None) -> None:
        """S8: the next step, a decode or this prompt, does not fit the KV pool. Enlarge it, or evict the request with
        the longest headroom among those that hold blocks and the prompt itself."""
        while instance.is_short(prefill_tokens := _prefill_tokens(instance, prompt)):
            if self._residency.planned_kv_tokens(instance) > instance.kv_tokens or instance.op_running:
                instance.starved = True  # the growth is under way
                break
            if self._enlarge(instance, prefill_tokens):
                continue
            works = [work for work in instance.works() if instance.holds_blocks(work) or work is prompt]
            found = max(works, key=lambda work: (work.is_best_effort, instance.due_s(work), work.id))
            self._device.evict(instance, found, GIVES_WAY if found.is_best_effort else "kv_short")
            if not instance.batch:
                self.after_leaving(instance, now)
                break
        self._device.update(instance)

    def _enlarge(self, instance: Instance, prefill_tokens: int) -> bool:
        """By memory that is free, or that neighbours do not need yet; False: there is none."""
        return self._grow(instance, prefill_tokens) or self._borrow(instance, prefill_tokens)

    def _grow(self, instance: Instance, prefill_tokens: int) -> bool:
        hosting = instance.hosting
        bare = instance.bare_tokens() + prefill_tokens
        required = max(self._admit.required(hosting, instance.model, instance.lengths()), bare)
        room = self._admit.room(hosting, instance.kv_tokens)
        granted = granted_tokens(bare, self._admit.recommended(hosting, required), room)
        if granted is None or granted <= instance.kv_tokens:
            return False
        self._residency.resize(instance, granted)
        return True

    def _borrow(self, instance: Instance, prefill_tokens: int) -> bool:
        """Take from neighbours what they hold for tokens to come. In place that costs next to nothing, and whoever
        needs it back first finds others who do not need theirs yet."""
        hosting = instance.hosting
        wanted = instance.bare_tokens() + prefill_tokens + LENT_TURNS * len(instance.running)
        if not self._resizing.may_borrow(wanted, hosting.max_kv_tokens):
            return False
        missing = (wanted - self._admit.room(hosting, instance.kv_tokens)) * hosting.kv_bytes_per_token
        # A turn under way may hold blocks of prompts that are counted at its end.
        others = [one for one in self._instances.values() if one is not instance and one.can_run and not one.in_turn]
        spare = [(_spare_bytes(one), one) for one in others]
        if sum(max(size, 0) for size, _ in spare) < missing:
            return False
        for size, one in sorted(spare, key=lambda each: (-each[0], each[1].id)):
            if missing <= 0 or size <= 0:
                break
            block_bytes = one.hosting.block_tokens * one.hosting.kv_bytes_per_token
            blocks = min(-(missing // -block_bytes), size // block_bytes)
            self._residency.resize(one, one.kv_tokens - blocks * one.hosting.block_tokens)
            missing -= blocks * block_bytes
        return self._grow(instance, prefill_tokens)

    def give_way(
        self, target: Instance | None, work: Work, considers: Callable[[], Grant | Refusal]
    ) -> Grant | Refusal:
        """O8: best effort leaves until there is memory for the work, the last that came first; nobody, if all of it
        would not be enough. `target`: the instance that is to take it; None = one that is started."""
        grant: Grant | Refusal = Refusal.MEMORY
        instances = [one for one in self._instances.values() if one.best_effort]
        if not instances or self._missing_bytes(target, work) > self._admit.yielded_bytes(target):
            return grant
        found = [(one, each) for one in instances for each in one.works() if each.is_best_effort]
        for instance, each in sorted(found, key=lambda pair: -pair[1].id):
            self._device.evict(instance, each, GIVES_WAY)
            self._give_back(instance, is_needed=target is None)
            grant = considers()
            if grant is not Refusal.MEMORY:
                break
        return grant

    def _missing_bytes(self, target: Instance | None, work: Work) -> int:
        if target is None:
            return self._admit.missing_bytes(self._device.hostings[work.model], work)
        return self._admit.memory_gap(target, work)

    def _give_back(self, instance: Instance, *, is_needed: bool) -> None:
        """What a request that gave way had; the weights too, if nobody else uses them and they are needed."""
        if not instance.batch:
            self._lives.emptied(instance, self._device.now_s)
            if is_needed and instance.hosting.keep_alive_s != INFINITY:
                self._lives.close(instance)
        else:
            self.shrink(instance, at_once=True)
        self._device.update(instance)

    def shrink(self, instance: Instance, *, at_once: bool = False) -> None:
        """S6, when a request has left. `at_once`: somebody else needs what is too much, however little."""
        if self._admit.is_fixed(instance):
            return
        required = self._admit.required(instance.hosting, instance.model, instance.lengths())
        planned, wanted = (
            self._residency.planned_kv_tokens(instance),
            self._admit.recommended(instance.hosting, required),
        )
        if wanted < planned if at_once else should_shrink(planned, required, self._watermark):
            self._residency.resize(instance, wanted)

    def look_around(self) -> None:
        """Tell when what runs here does not keep its pace any more, or will soon want more memory than there is."""
        found = [one for one in self._instances.values() if one.answers]
        is_slow = sum(one.decode_s() for one in found) > min((one.tpot_s for one in found), default=INFINITY)
        if not is_slow:
            found = [one for one in found if self._is_filling_up(one)]
            if not found:
                return
        running = [
            (one.due_s(work), work, one) for one in found for work in one.running.values() if not work.is_best_effort
        ]
        _, work, instance = max(running, key=lambda each: (each[0], each[1].id))
        self._device.outbox.append(Overcommitted(work.as_of(instance.produced(work)).record(), instance.id))

    def _is_filling_up(self, instance: Instance) -> bool:
        """Within the time that somebody else needs to get ready for one of its answers."""
        turns = 2 * LOOK_AROUND_TURNS
        if decode_s := instance.decode_s():
            turns = max(turns, min(int(self._ahead_s / decode_s), MOST_AHEAD_TURNS))
        loose = instance.tokens + (turns + 2 * instance.hosting.block_tokens) * len(instance.running)
        if loose <= instance.kv_tokens:
            return False
        soon = instance.bare_tokens() + turns * len(instance.running)
        return soon > instance.kv_tokens and soon > self._admit.room(instance.hosting, instance.kv_tokens)


def _prefill_tokens(instance: Instance, prompt: Work | None) -> int:
    """What the prompt needs, unless it was evicted."""
    return prompt.pending_tokens + 1 if prompt is not None and prompt in instance.queue_of(prompt) else 0


def _spare_bytes(instance: Instance) -> int:
    """Of its pool, in whole blocks: what it does not need soon."""
    size = instance.hosting.block_tokens
    first = instance.waiting[0].known_tokens + size if instance.waiting else 0
    soon = instance.bare_tokens() + LENT_TURNS * len(instance.running) + first
    return (instance.kv_tokens - soon) // size * size * instance.hosting.kv_bytes_per_token
