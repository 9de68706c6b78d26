"""When an instance had its last turns, and what on: who may be next goes by it (`policy.rounds`)."""

from __future__ import annotations


class Rhythm:
    __slots__ = ("parted_s", "prompted_s", "turned_s")

    def __init__(self) -> None:
        self.turned_s = 0.0  # when its last turn ended
        self.parted_s = 0.0  # likewise, of those that computed a part of a prompt
        self.prompted_s = 0.0  # of its prompts, computed since its running requests had a token

    def turn_ended(self, seconds: float, now: float, *, has_prompts: bool, decodes: bool) -> None:
        self.turned_s = now
        if has_prompts:
            self.parted_s = now
        self.prompted_s = 0.0 if decodes else self.prompted_s + seconds
