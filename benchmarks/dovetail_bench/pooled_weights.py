"""Random weights of a shape in a host pool as a server has one: the same chunks, leases and registration, no disk."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dovetail.codings import GROUP
from dovetail.engine.devices.cuda.device import CudaDevice
from dovetail.layouts import packed_bytes
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.store.host_pool.pool import CHUNK_BYTES, HostPool
from dovetail_bench.gpu_engines import LAYOUTS

ALIGNMENT = 4096


class PooledWeights:
    """The bytes of one model, filled by the device. Layers share nothing: copies meet no cache of the host's."""

    def __init__(self, spec: ModelSpec, device: CudaDevice, precision: str = "16") -> None:
        self.spec, self.layout = spec, LAYOUTS[precision]
        self.places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, shape in spec.tensors():
            layout = self.layout if len(shape) > 1 else "plain"
            own = packed_bytes(layout, "bf16" if layout == "plain" else "f32", shape)
            self.places[name] = size, own
            size += -(-own // ALIGNMENT) * ALIGNMENT
        self.pool = HostPool.create((size // CHUNK_BYTES + 2) * CHUNK_BYTES)
        device.use_host_pool(self.pool.address + self.pool.chunk_offset(0), self.pool.capacity_bytes, CHUNK_BYTES)
        self.lease = self.pool.reserve("weights", size)
        self.lease.populate(0, size)
        self._fill(spec)
        self.lease.advance(size)
        self.lease.commit()

    def open(self) -> PooledCheckpoint:
        return PooledCheckpoint(self)

    def close(self) -> None:
        self.lease.close()
        self.pool.close()

    def _fill(self, spec: ModelSpec) -> None:
        """Values that a model can compute with: small, and of norms ones; scales of codes likewise."""
        values = torch.empty(CHUNK_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02).cpu()
        codes = torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8, device="cuda").cpu()
        shapes = dict(spec.tensors())
        for name, (begin, size) in self.places.items():
            is_coded = self.layout != "plain" and len(shapes[name]) > 1
            source = codes if is_coded else values.view(torch.uint8)
            for piece in self.lease.pieces(begin, begin + size):
                target = torch.frombuffer(piece, dtype=torch.uint8)
                target.copy_(source[: len(target)])
            if "norm." in name:
                self._set(begin, begin + size, torch.bfloat16, 1.0)
            elif is_coded:
                self._set(begin + size - 2 * math.prod(shapes[name]) // GROUP, begin + size, torch.float16, 0.02 / 64)

    def _set(self, begin: int, end: int, dtype: torch.dtype, value: float) -> None:
        for piece in self.lease.pieces(begin, end):
            torch.frombuffer(piece, dtype=dtype).fill_(value)


class PooledCheckpoint:
    """One model of them; several may be open."""

    in_place = True

    def __init__(self, weights: PooledWeights) -> None:
        self.spec, self._weights = weights.spec, weights
        self._shapes = dict(self.spec.tensors())
        self._view = weights.lease.view()

    def wait(self, name: str | None = None) -> None:
        """All of it is there."""

    def pieces(self, name: str) -> Sequence[HostTensor]:
        begin, size = self._weights.places[name]
        layout = self._weights.layout if len(self._shapes[name]) > 1 else "plain"
        dtype, data = "bf16" if layout == "plain" else "f32", self._view[begin : begin + size]
        return [HostTensor(dtype, self._shapes[name], data, layout)]

    def chunks(self, name: str) -> list[memoryview]:
        begin, size = self._weights.places[name]
        return self._weights.lease.pieces(begin, begin + size)

    def close(self) -> None:
        """The bytes are those of all that are open."""
