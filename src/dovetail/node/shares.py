"""What prompts have of iterations, and what is left of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import prompt_s
from dovetail.policy.parts import in_parts_s, split_s
from dovetail.policy.work import Work

if TYPE_CHECKING:
    from dovetail.node.batch import Batch


class Share(NamedTuple):
    """A part of one prompt, or all of it."""

    work: Work
    start: int  # its tokens before are computed
    tokens: int  # that are computed in it

    @property
    def is_last(self) -> bool:
        """With them the prompt is computed."""
        return self.start + self.tokens >= self.work.known_tokens


def splitting_s(instance: Batch) -> float:
    """What a prompt takes longer with each further part."""
    return split_s(instance.hosting.latency) * instance.overestimate if instance.rule.part_s != INFINITY else 0.0


def at_once_s(instance: Batch, work: Work, start: int) -> float:
    """What is left of a prompt from this token on, in one piece."""
    return prompt_s(instance.hosting.latency, start, work.known_tokens - start) * instance.overestimate


def left_s(instance: Batch, work: Work, start: int) -> float:
    """The same in parts, if nobody comes between."""
    seconds = at_once_s(instance, work, start)
    return (
        seconds if seconds <= instance.rule.part_s else in_parts_s(seconds, instance.rule.part_s, splitting_s(instance))
    )


def advance(instance: Batch, work: Work, tokens: int) -> None:
    """So many tokens of a prompt are computed; the rest is left for other turns."""
    block = 0 if work.computed else instance.hosting.block_tokens
    instance.held_tokens += tokens - work.computed + block
    work.computed = tokens
    instance.refresh()


def urgent_prefill_s(work: Work, silence_s: float, prefill_s: float) -> float:
    """By when a prefill should have its turn. Where silence is bounded nobody may run far ahead, so that a prefill that
    waits for its deadline would come too late by what it takes itself."""
    due_s = work.due_s
    if silence_s == INFINITY:
        return due_s
    if work.last_token_s is not None and not work.hold:  # else its reader hears it from elsewhere
        due_s = min(due_s, work.last_token_s + silence_s)
    return due_s - prefill_s


def latest_prefill_s(instance: Batch, work: Work, seconds: float) -> float:
    """When what is left of its prompt, which takes so long, has to begin at the latest."""
    urgent_s = urgent_prefill_s(work, instance.rule.turn_silence_s, seconds)
    return urgent_s - seconds if instance.rule.turn_silence_s == INFINITY else urgent_s
