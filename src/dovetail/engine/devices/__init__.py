"""What a worker's models run on. A device makes executors, says what it is, which type it computes in and how fast it
is at best; how its kernels do that is its own business.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dovetail.engine.preemption import PreemptionPoint
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import Checkpoint
from dovetail.policy.placement import DeviceKind
from dovetail.sched.turn import Outcome, Turn

if TYPE_CHECKING:  # without torch, which the pure half must not need
    from dovetail.engine.adapters import AdapterMatrices, PackedAdapter
    from dovetail.engine.executor import ExecutorConfig
    from dovetail.engine.layer_source import LayerSource


@dataclass(frozen=True)
class Peaks:
    """The device at its best, and which share of that whole iterations reach: a first guess, corrected by the first
    iterations."""

    flops: float
    bandwidth: float  # bytes/s
    efficiency: float  # share of both
    floor_s: float  # of an iteration
    layer_s: float  # of each layer
    link: float = math.inf  # bytes/s from host memory; infinite where the device computes with what lies there


class DeviceExecutor(Protocol):
    """`node.ports.Executor`, and what it says of itself."""

    dtype: str
    is_pipelined: bool  # `launch_next` is worth trying
    was_typical: bool  # nothing was compiled, captured or loaded while the iteration collected last ran
    max_blocks: int
    weight_bytes: int
    copied_bytes: int

    @property
    def kv_committed_bytes(self) -> int: ...

    def launch(self, turn: Turn) -> None: ...

    def launch_next(self, turn: Turn) -> bool: ...

    def collect(self) -> Outcome: ...

    def discard(self) -> None: ...

    def run(self, turn: Turn) -> Outcome:
        """Both."""

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]] = ()) -> None: ...

    def forget(self, sequence: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Adaptable(Protocol):
    """An executor that computes rows with LoRA adapters."""

    def add_adapter(self, key: str, adapter: PackedAdapter | None, problem: str = "") -> None:
        """From now on rows may name it, one that is placed; without one they fail with the problem."""

    def remove_adapter(self, key: str) -> None: ...


@runtime_checkable
class Preemptible(Protocol):
    """An executor that can stop between two layers."""

    preemption: PreemptionPoint | None  # of the iterations that are collected; None = they do not stop


@runtime_checkable
class LayerReading(Protocol):
    """An executor that may read layers from the disk with every iteration."""

    layer_source: LayerSource | None  # None = all layers stay


@runtime_checkable
class Arriving(Protocol):
    """An executor whose weights may still be on their way when it has been made."""

    def arrived_share(self) -> float:
        """Of the weights; by any thread. Iterations that are launched before all are there wait for them."""


@runtime_checkable
class Preparable(Protocol):
    """An executor that can do some of its first requests' work before they come."""

    def prepare_next(self) -> bool:
        """A piece of it, some milliseconds, while nothing else is to be computed; False if nothing is left."""


class Device(Protocol):
    kind: DeviceKind
    label: str  # of its profiles: what it is, and how much of it
    memory_bytes: int  # what a node has of it unless told otherwise; of a GPU, of what others leave
    max_batch: int  # sequences in one iteration, unless told otherwise
    max_turn_tokens: int  # tokens in one iteration, unless told otherwise

    def node_bytes(self, asked: int) -> int:
        """What a node has of it that asks for so much; 0 = unless told otherwise. Less, where that is not there."""

    def compute_dtype(self, asked: str, stored: str) -> str:
        """The type that a model is computed in; "auto" = what suits the device."""

    def serves_as_stored(self, dtype: str, form: str) -> bool:
        """Whether a model computed in `dtype` is served from matrices of this type or layout as they lie."""

    def executor(self, checkpoint: Checkpoint, config: ExecutorConfig) -> DeviceExecutor:
        """Takes the checkpoint over, and closes it when it is no longer read."""

    def pack_adapter(self, adapter: AdapterMatrices, spec: ModelSpec, dtype: str) -> PackedAdapter:
        """As executors of this model compute with it, in this type; by any thread. Raises UnsupportedModel if they
        cannot."""

    def use_host_pool(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
        """Models will come from this memory, which stays where it is for as long as the process lives."""

    def expect_models(self, num_bytes: int) -> None:
        """So many bytes of it, from its beginning, are what the models that may be called take."""

    def peaks(self, dtype: str, kept: str) -> Peaks:
        """Of products with weights that are kept in this form and computed in this type."""
