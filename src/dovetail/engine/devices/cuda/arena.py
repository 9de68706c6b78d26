"""Device memory that grows and shrinks in place, as `engine.arena.HostArena` does on the host: addresses are reserved
once, and physical memory is mapped behind their head by CUDA's virtual memory calls. Nothing is copied, no address
changes, and graphs that were captured over the addresses stay valid.

    0 ............ mapped ............................ reserved
    | chunk | chunk |  addresses only, any access faults  |
"""

from __future__ import annotations

from typing import Any

import torch
from cuda.bindings import driver

from dovetail.errors import OutOfMemory

_MOST_CHUNKS = 128  # that an arena is cut into: every call to map one costs some tens of microseconds
_LARGEST_CHUNK = 256 << 20


class CudaArena:
    """Owns a range of device addresses until close(). Whoever shrinks or closes it has made sure that the device is
    done with the tail."""

    def __init__(self, reserve_bytes: int, device: torch.device) -> None:
        torch.cuda.init()
        self._device = device
        self._property = _allocation_property(device.index or 0)
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granule = _checked(driver.cuMemGetAllocationGranularity(self._property, recommended))
        self._chunk_bytes = min(_round_up(reserve_bytes // _MOST_CHUNKS + 1, granule), _LARGEST_CHUNK)
        self.reserved_bytes = _round_up(max(reserve_bytes, 1), self._chunk_bytes)
        self._address = int(_checked(driver.cuMemAddressReserve(self.reserved_bytes, 0, 0, 0)))
        self._handles: list[Any] = []
        self._view: torch.Tensor | None = None

    @property
    def committed_bytes(self) -> int:
        return len(self._handles) * self._chunk_bytes

    def resize(self, num_bytes: int) -> None:
        """Back the first `num_bytes` with memory; give what lies behind them back to the device."""
        assert self._address, "the arena is closed"
        wanted = -(-num_bytes // self._chunk_bytes)
        assert wanted * self._chunk_bytes <= self.reserved_bytes, f"{num_bytes:,} bytes of {self.reserved_bytes:,}"
        before = len(self._handles)
        try:
            while len(self._handles) < wanted:
                self._map_one()
        except OutOfMemory:
            self._unmap_to(before)
            raise
        self._unmap_to(wanted)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the whole range; only what is committed may be touched. Must not outlive the arena."""
        if self._view is None:
            before = len(self._handles)
            self.resize(max(self.committed_bytes, 1))  # torch asks the driver whose address it is
            self._view = torch.as_tensor(_Bytes(self._address, self.reserved_bytes), device=self._device)
            self._unmap_to(before)
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self._view[:count].view(dtype).view(shape)

    def close(self) -> None:
        if self._address:
            self._view = None
            self._unmap_to(0)
            _checked(driver.cuMemAddressFree(self._address, self.reserved_bytes))
            self._address = 0

    def _map_one(self) -> None:
        code, handle = driver.cuMemCreate(self._chunk_bytes, self._property, 0)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(f"the device has no {self._chunk_bytes:,} bytes left")
        _checked((code, handle))
        at = self._address + self.committed_bytes
        _checked(driver.cuMemMap(at, self._chunk_bytes, 0, handle, 0))
        _checked(driver.cuMemSetAccess(at, self._chunk_bytes, [_access(self._device.index or 0)], 1))
        self._handles.append(handle)

    def _unmap_to(self, count: int) -> None:
        while len(self._handles) > count:
            handle = self._handles.pop()
            _checked(driver.cuMemUnmap(self._address + self.committed_bytes, self._chunk_bytes))
            _checked(driver.cuMemRelease(handle))


class _Bytes:
    """What torch makes a tensor of without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _location(device: int) -> Any:
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = device
    return location


def _allocation_property(device: int) -> Any:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = _location(device)
    return wanted


def _access(device: int) -> Any:
    access = driver.CUmemAccessDesc()
    access.location = _location(device)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _checked(answer: tuple[Any, ...]) -> Any:
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise OutOfMemory(f"CUDA's memory calls failed: {code.name}")
    return values[0] if values else None
