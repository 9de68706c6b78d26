"""When an instance had its last turns, and what on: who may be next goes by it (`policy.rounds`)."""

from __future__ import annotations


class Rhythm:
    __slots__ = ("parted_s", "prompted_s", "spoke_s", "turned_s")

    def __init__(self) -> None:
        self.turned_s = 0.0  # when its last turn ended
        self.parted_s = 0.0  # likewise, of those that computed a part of a prompt
        self.prompted_s = 0.0  # of its prompts, computed since its running requests had a token
        self.spoke_s = 0.0  # when some rows of a batch that is split had theirs

    def turn_ended(self, seconds: float, now: float, *, has_prompts: bool, decodes: bool) -> None:
        self.turned_s = now
        if has_prompts:
            self.parted_s = now
        self.prompted_s = 0.0 if decodes else self.prompted_s + seconds

    def rows_ended(self, seconds: float, now: float, *, is_promised: bool) -> None:
        """A turn of some rows has ended: its prompts and its answers have half of its time each, as if it had decoded
        whole; prompts for which that was promised have what they would have then."""
        self.turned_s = self.spoke_s = now
        self.prompted_s = 0.0 if is_promised else max(self.prompted_s - seconds, 0.0)
