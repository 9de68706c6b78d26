"""One iteration of one lane: what is computed, and what that should take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

from dovetail.policy.headroom import INFINITY
from dovetail.policy.lane import Lane, is_spare
from dovetail.policy.latency import Latency, mixed_s, prompt_s, prompts_s
from dovetail.policy.parts import Share

LaneT = TypeVar("LaneT", bound=Lane)


class Iteration(NamedTuple, Generic[LaneT]):
    """Parts of prompts, a token for requests of the running batch, or both."""

    instance: LaneT
    prompts: tuple[Share, ...] = ()
    decodes: bool = True
    rows: tuple[int, ...] | None = None  # of the running batch these decode; None = all of it
    # After so long a device that can stops between two layers, and asks who is let in (`NodeRuntime.interlude`).
    slice_s: float = INFINITY
    round_s: float = 0.0  # what those take

    @property
    def decoding(self) -> Collection[int]:
        """Requests that get a token of the running batch's."""
        if not self.decodes:
            return ()
        running = self.instance.running
        return running if self.rows is None else [id for id in self.rows if id in running]  # others left during it

    @property
    def is_best_effort(self) -> bool:
        """Nobody waits for it."""
        return is_spare(self.instance, self.prompts, decodes=self.decodes)

    @property
    def decoded_tokens(self) -> int:
        """Known tokens of those."""
        return self.instance.tokens if self.rows is None else self.instance.tokens_of(self.decoding)

    @property
    def expected_s(self) -> float:
        """What it is counted with, before it has ended."""
        return self.seconds(self.instance.hosting.latency) * self.instance.overestimate

    def seconds(self, latency: Latency) -> float:
        """What it should take."""
        decoding = self.decoding
        if not self.prompts:
            return latency.decode_s(len(decoding), self.decoded_tokens) if decoding else 0.0
        if len(self.prompts) == 1 and not decoding:
            return prompt_s(latency, self.prompts[0].start, self.prompts[0].tokens)
        parts = [(share.start, share.tokens) for share in self.prompts]
        return mixed_s(latency, len(decoding), self.decoded_tokens, parts) if decoding else prompts_s(latency, parts)
