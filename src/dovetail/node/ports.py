"""What a node needs from the outside, as Protocols. `engine` and `store` implement them and do not know each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dovetail.modelspec import ModelSpec
from dovetail.node.events import Pausable, Victim
from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.sched.turn import Outcome, Turn


class Executor(Protocol):
    """One model instance on one device."""

    def launch(self, turn: Turn) -> None:
        """Begin one iteration. Its outcome is collected before the next one is launched."""

    def collect(self) -> Outcome:
        """Wait until it is done, and say what came of it."""

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        """Commit or release KV memory so that blocks 0..num_blocks-1 can be used, after copying (from, to) blocks."""

    def forget(self, sequence: int) -> None:
        """Drop whatever is kept for this sequence besides its blocks."""

    def close(self) -> None:
        """Free weights and KV memory."""


class HostTensor(NamedTuple):
    """Raw bytes in host memory. `data` may be a view of a mapped file: whoever holds it keeps the mapping alive."""

    dtype: str  # a key of modelspec.DTYPE_BYTES; of the values, where the layout packs them
    shape: tuple[int, ...]
    data: memoryview  # contiguous
    layout: str = "plain"  # row-major; the others are in `dovetail.layouts`


class Checkpoint(Protocol):
    """A model's weights under the canonical names of `modelspec`, wherever they come from."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def in_place(self) -> bool:
        """Tensors are views of memory that stays (a mapped file), so that using them costs no copy."""

    def pieces(self, name: str) -> Sequence[HostTensor]:
        """The tensor `name` as one or more pieces which, concatenated along dimension 0, reshape to its shape."""

    def close(self) -> None: ...


class NodeHandle(Protocol):
    """A node as the cluster sees it, in this process or in another. The controller proposes, the node disposes:
    every answer is the node's own, and the properties may be a little old."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def up(self) -> bool: ...

    @property
    def in_use(self) -> bool: ...

    @property
    def fullness(self) -> float: ...

    @property
    def free_bytes(self) -> int:
        """Memory that a start may be given."""

    def hosting_of(self, model: str) -> Hosting | None:
        """What the model takes there and how fast it runs; None = it is not offered there."""

    def check_join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        """Would `join` accept?"""

    def check_start(self, work: Work, now: float) -> Refusal | None:
        """Would `start` accept?"""

    def join(self, instance_id: int, work: Work, now: float) -> Refusal | None: ...

    def start(self, work: Work, now: float) -> int | Refusal: ...

    def victims_for(self, instance_id: int, work: Work, now: float) -> list[Victim]: ...

    def pausable_for(self, work: Work, now: float) -> list[Pausable]: ...

    def preempt(self, instance_id: int, reason: str) -> None: ...

    def gives_way(self) -> tuple[int, Work] | None:
        """An instance and a long answer on it that may be taken back for a newcomer."""

    def holds(self, instance_id: int, work: Work) -> bool:
        """Whether it runs there."""

    def withdraw(self, instance_id: int, work: Work, now: float) -> None:
        """Take it back. No notice follows."""

    def ease(self, work: Work, now: float) -> None:
        """Let everybody there who did not ask for targets go at a pace at which there is time for this work too."""
