"""What a node needs from the outside, as Protocols. `engine` and `store` implement them and do not know each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dovetail.modelspec import ModelSpec
from dovetail.sched.turn import Outcome, Turn

if TYPE_CHECKING:
    from dovetail.policy.work import Work


class Executor(Protocol):
    """One model instance on one device."""

    def launch(self, turn: Turn) -> None:
        """Begin one iteration, when all others are collected."""

    def launch_next(self, turn: Turn) -> bool:
        """Begin the iteration after the launched one before that one is collected, if this executor can: all its rows
        are that one's, each with one token, the one which is being computed."""

    def collect(self) -> Outcome:
        """Wait until the first that is launched is done, and say what came of it."""

    def discard(self) -> None:
        """Nobody will collect what is launched."""

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None:
        """Commit or release KV memory so that blocks 0..num_blocks-1 can be used, after copying (from, to) blocks."""

    def forget(self, sequence: int) -> None:
        """Drop whatever is kept for this sequence besides its blocks."""

    def close(self) -> None:
        """Free weights and KV memory."""


class Prefixes(Protocol):
    """The prefix caches of a device's instances."""

    def cached_tokens(self, instance: int, work: Work) -> int:
        """How many of the request's first tokens the instance need not compute, as things are."""


class NoPrefixes:
    """Where nothing is reused."""

    def cached_tokens(self, instance: int, work: Work) -> int:
        return 0


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


class LowRankPart(NamedTuple):
    """What an adapter adds to the rows of one matrix of the model: scaling · second · first."""

    tensor: str  # canonical name of the matrix
    row: int  # of it, where the part begins
    first: HostTensor  # [rank, columns]
    second: HostTensor  # [rows, rank]


class AdapterWeights(Protocol):
    """A LoRA adapter, compared with the model that it is for."""

    @property
    def scaling(self) -> float: ...

    def parts(self) -> Iterator[LowRankPart]: ...

    def close(self) -> None: ...
