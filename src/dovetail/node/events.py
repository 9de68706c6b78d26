"""What a node tells its driver: commands to its device, and what becomes of requests there. Plain records.

What its controller hears of it is in `protocol`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.node.instance import Instance
from dovetail.node.protocol import Finished, InstanceGone, Notice
from dovetail.policy.iteration import Iteration
from dovetail.policy.work import Work

Turn = Iteration[Instance]


class Computed(NamedTuple):
    """What a device has to say of a turn, beside whose answers have ended."""

    by_request: Mapping[int, int] | None = None  # how many tokens are, of each prompt in it; None = as many as asked
    # How long it took tells of others like it: it was what was asked, no more and no less, with nothing to prepare.
    is_typical: bool = True
    was_ahead: bool = False  # the device began with it when the turn before had ended
    extra: Mapping[int, int] = {}  # by request: tokens that a decode gave it beyond one
    draft_rows: int = 0  # that it computed beyond one for each request
    drafting_s: float = 0.0  # that went by before it, in the same turn, for drafts to be made


AS_ASKED = Computed()


@dataclass(frozen=True, slots=True)
class StartLoad:
    """Bring the weights onto the device. Answer with `load_done` or `load_failed`."""

    instance: int
    model: str
    num_bytes: int
    due_s: float  # deadline of its most urgent request: a link that serves one load at a time goes by it


@dataclass(frozen=True, slots=True)
class StartUnload:
    """Free the weights. Answer with `unload_done`."""

    instance: int
    model: str


@dataclass(frozen=True, slots=True)
class StartResize:
    """Make the KV pool this large. Answer with `resize_done`."""

    instance: int
    model: str
    old_bytes: int
    new_bytes: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Call `timer` at this time with the same two numbers."""

    at_s: float
    instance: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Enter:
    """The work has a place on an instance whose weights are there: it takes part in its turns from now on."""

    work: Work
    instance: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The work goes elsewhere or nowhere: free what the instance holds for it."""

    work: Work
    instance: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    work: Work
    instance: int
    grace_s: float  # that it had; what comes after the first token excuses no late first token


@dataclass(frozen=True, slots=True)
class Resumed:
    """L4: a held work runs from now on, without a prefill."""

    work: Work
    instance: int


Command = StartLoad | StartUnload | StartResize | SetTimer
# What a node's driver carries out or records.
Output = Command | Enter | Leave | Resumed | FirstToken | Finished | InstanceGone
# What a node says: to its driver, to its controller (the records of `protocol`), or to both.
Said = Command | Resumed | FirstToken | Notice
