"""Memory of a node: KV demand (S5), watermark (S6), compromise (S8), and a ledger that no order of operations overruns.

The ledger (S7) keeps two sums over its accounts:

    planned   what everyone will hold once all issued operations are done: decides what may be issued (optimistic)
    held      what everyone may hold right now: an account that shrinks counts at its old size until the shrink is done,
              one that grows counts at its new size from the moment the growth starts (pessimistic)

    invariant after every call:  planned <= capacity  and  held <= capacity

A growth that is issued but would overrun `held` waits in the reservation station. Since planned never exceeds capacity,
every waiting growth fits once the running shrinks are done: nothing can wait forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class OutputMean:
    """S5: running mean of the output lengths seen, started from a guess that counts as `weight` observations."""

    __slots__ = ("_count", "_total")

    def __init__(self, guess: float = 256.0, weight: int = 16) -> None:
        self._total = guess * weight
        self._count = weight

    def add(self, output_tokens: int) -> None:
        self._total += output_tokens
        self._count += 1

    @property
    def value(self) -> float:
        return self._total / self._count


def required_tokens(lengths: Iterable[tuple[int, int]], mean_output: float, floor_tokens: int) -> int:
    """S5: Σ(I + max(O, Ō)), at least the floor; `lengths` are (input, produced) pairs."""
    total = 0.0
    for input_tokens, produced in lengths:
        total += input_tokens + max(produced, mean_output)
    return max(int(total + 0.999), floor_tokens)


class Lengths(Protocol):
    """How long answers are."""

    def most_tokens(self, model: str, lengths: list[tuple[int, int]]) -> tuple[int, int]:
        """When requests of the model of these lengths will hold most: how many of them, and tokens together."""

    @property
    def outputs(self) -> OutputMean: ...


class MemoryDemand(Protocol):
    @property
    def watermark(self) -> float: ...

    @property
    def floor_tokens(self) -> int: ...

    @property
    def weights_share(self) -> float: ...

    @property
    def short_requests(self) -> int: ...

    def tokens(self, known: Lengths, model: str, lengths: list[tuple[int, int]]) -> int:
        """That requests of a model of these lengths, (input, produced) pairs, should have."""


@dataclass(frozen=True, slots=True)
class DemandByModel:
    """As much as the requests that are there will hold at most at one time, by the model's own answers."""

    watermark: float = 0.25  # S6
    floor_tokens: int = 256  # S5: L_min; pools grow and shrink in place, so that a small one costs nothing
    weights_share: float = 1.0  # of a device's memory that weights may take: what is left lets batches grow
    # Where models answer at like length and so many usual requests fit into the floor of a pool, floors are lower, and
    # weights may take more than their share as long as what is left holds so many of each instance. 0 = never.
    short_requests: int = 0

    def tokens(self, known: Lengths, model: str, lengths: list[tuple[int, int]]) -> int:
        return known.most_tokens(model, lengths)[1] + len(lengths)


def recommended_tokens(required: int, watermark: float) -> int:
    """S6."""
    return int(required * (1.0 + watermark) + 0.999)


def should_shrink(current: int, required: int, watermark: float) -> bool:
    """S6: only when the recommendation is below the watermark again, so that load that wavers does not ping-pong."""
    return recommended_tokens(required, watermark) * (1.0 + watermark) < current


def granted_tokens(required: int, recommended: int, available: int) -> int | None:
    """S8: the recommendation if it fits, else whatever fits down to the requirement, else nothing."""
    if available >= recommended:
        return recommended
    return available if available >= required else None


class Part(StrEnum):
    """What an account is of."""

    WEIGHTS = "weights"
    KV = "kv"
    ADAPTER = "adapter"


class Account(NamedTuple):
    part: Part
    owner: int  # an instance, or an adapter's number


class OpKind(StrEnum):
    GROW = "grow"
    SHRINK = "shrink"


@dataclass(frozen=True, slots=True)
class Op:
    """An operation that may run now. Its end must be told to `Ledger.done`."""

    account: Account
    kind: OpKind
    old_bytes: int
    new_bytes: int


class _Account:
    __slots__ = ("held", "planned", "running", "target")

    def __init__(self) -> None:
        self.planned = 0  # after every issued operation
        self.held = 0  # what it may occupy now
        self.running = False  # an operation is under way, towards `target`
        self.target = 0


class Ledger:
    """S7: one node's memory. Each account has at most one operation under way."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.planned = 0
        self.held = 0
        self._accounts: dict[Account, _Account] = {}
        self._station: dict[Account, None] = {}  # growths that wait, in order of issue

    @property
    def available(self) -> int:
        """What a further growth may be issued for."""
        return self.capacity - self.planned

    @property
    def waiting(self) -> int:
        return len(self._station)

    def planned_of(self, account: Account) -> int:
        entry = self._accounts.get(account)
        return entry.planned if entry else 0

    def held_of(self, account: Account) -> int:
        entry = self._accounts.get(account)
        return entry.held if entry else 0

    def is_settled(self, account: Account) -> bool:
        """Nothing of it is under way or waiting."""
        entry = self._accounts.get(account)
        return entry is None or (not entry.running and entry.held == entry.planned)

    def issue(self, account: Account, new_bytes: int) -> list[Op]:
        """Plan `account` at `new_bytes`; the caller has checked `available`. Returns what may start now."""
        assert new_bytes >= 0, f"{account}: {new_bytes} bytes"
        if not new_bytes and account not in self._accounts:
            return []  # it holds nothing and plans nothing: an account that nobody would close
        entry = self._accounts.setdefault(account, _Account())
        assert self.planned - entry.planned + new_bytes <= self.capacity, "planned over capacity"
        self.planned += new_bytes - entry.planned
        entry.planned = new_bytes
        ops = self._start(account, entry)
        self._close(account, entry)  # it may have waited to grow, and will not
        return ops

    def _close(self, account: Account, entry: _Account) -> None:
        """If nothing is left of it."""
        if entry.planned == 0 and entry.held == 0 and not entry.running:
            self._accounts.pop(account, None)

    def done(self, account: Account) -> list[Op]:
        """The account's operation has ended. Returns what may start now, its own next one first."""
        entry = self._accounts[account]
        assert entry.running, f"{account}: no operation under way"
        entry.running = False
        shrunk = entry.target < entry.held
        self.held += entry.target - entry.held
        entry.held = entry.target
        ops = self._start(account, entry)
        self._close(account, entry)
        if shrunk:
            for waiting in list(self._station):
                ops += self._start(waiting, self._accounts[waiting])
        self.check()
        return ops

    def failed(self, account: Account) -> list[Op]:
        """The account's growth came to nothing (a load failed): it holds nothing and plans nothing."""
        entry = self._accounts[account]
        assert entry.running, f"{account}: no operation under way"
        self.planned -= entry.planned
        entry.planned = entry.target = 0
        return self.done(account)

    def clear(self) -> None:
        """The node is gone, and everything on it."""
        self._accounts.clear()
        self._station.clear()
        self.planned = self.held = 0

    def check(self) -> None:
        assert 0 <= self.planned <= self.capacity, f"planned {self.planned} of {self.capacity}"
        assert 0 <= self.held <= self.capacity, f"held {self.held} of {self.capacity}"

    def _start(self, account: Account, entry: _Account) -> list[Op]:
        old = entry.held
        if not entry.running and self.held - old + entry.planned > self.capacity:
            self._station.setdefault(account)  # keeps its place in the order of issue
            return []
        self._station.pop(account, None)
        if entry.running or entry.planned == old:
            return []
        if entry.planned > old:
            self.held += entry.planned - old
            entry.held = entry.planned
        entry.running = True
        entry.target = entry.planned
        kind = OpKind.GROW if entry.target > old else OpKind.SHRINK
        return [Op(account, kind, old, entry.target)]
