"""Device memory that grows and shrinks in place, as `engine.arena.HostArena` does on the host: addresses are reserved
once, and physical memory is mapped behind their head by CUDA's virtual memory calls. Nothing is copied, no address
changes, and graphs that were captured over the addresses stay valid.

    0 ............ mapped ............................ reserved
    | chunk | chunk |  addresses only, any access faults  |
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from dovetail.errors import OutOfMemory

log = logging.getLogger("dovetail.worker")

_MOST_CHUNKS = 128  # that an arena is cut into: every call to map one costs some tens of microseconds
_LARGEST_CHUNK = 256 << 20
_LENT_S = 0.05  # that memory of a model which has gone stays mapped, for one of its shape that comes in its place


class Reclaimer:
    """Gives memory back to the device in a thread of its own, after what still uses it: unmapping a model takes tens of
    milliseconds, and no iteration of another one shall wait for that."""

    def __init__(self) -> None:
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._is_awaited = threading.Event()

    def add(self, order: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="reclaimer")
            self._thread.start()
        self._orders.put(order)

    def wait(self) -> bool:
        """Until all that was ordered is done; False if nothing was."""
        is_busy = self._orders.unfinished_tasks > 0
        self._is_awaited.set()
        self._orders.join()
        self._is_awaited.clear()
        return is_busy

    def hold(self, seconds: float) -> None:
        """For an order: so long, or until somebody lacks memory."""
        self._is_awaited.wait(seconds)

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            try:
                order()
            except (OutOfMemory, RuntimeError):  # the others' memory is to come back all the same
                log.error("memory of the GPU was not given back\n%s", traceback.format_exc())
            finally:
                del order  # and what it holds
                self._orders.task_done()


RECLAIMER = Reclaimer()  # of the process
_LENT = Reclaimer()  # the same for memory that may be used again: orders that rest keep no others waiting


def wait_for_memory() -> bool:
    """Until all that is on its way back to the device is there; False if nothing was."""
    was_lent = _LENT.wait()
    return RECLAIMER.wait() or was_lent


class CudaArena:
    """Owns a range of device addresses until close(). Shrinking and closing return at once: the memory goes back in the
    background, when the device is past the events `in_use`; whoever lacks memory before that waits for it."""

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
        self._unmapped: threading.Event | None = None  # set when addresses behind the head are no longer mapped
        self._lent = 0  # counts `lend` and what ends it
        self._lending = threading.Lock()
        self.in_use: tuple[torch.cuda.Event, ...] = ()  # by what may still read the memory

    @property
    def committed_bytes(self) -> int:
        return len(self._handles) * self._chunk_bytes

    def resize(self, num_bytes: int) -> None:
        """Back the first `num_bytes` with memory; give what lies behind them back to the device."""
        assert self._address, "the arena is closed"
        with self._lending:
            self._lent += 1
        wanted = -(-num_bytes // self._chunk_bytes)
        assert wanted * self._chunk_bytes <= self.reserved_bytes, f"{num_bytes:,} bytes of {self.reserved_bytes:,}"
        before = len(self._handles)
        if wanted > before and self._unmapped is not None:
            self._unmapped.wait()
            self._unmapped = None
        try:
            while len(self._handles) < wanted:
                self._map_one()
        except OutOfMemory:
            self._unmap(self._take_from(before))
            raise
        if wanted < before:
            self._unmapped = self._unmap_later(self._take_from(wanted))

    def lend(self) -> None:
        """Nothing is kept in it for now. The memory goes back in a moment, unless the arena is resized before."""
        events, lent = self.in_use, self._lent

        def unmap() -> None:
            _LENT.hold(_LENT_S)
            torch.cuda.set_device(self._device)
            for event in events:
                event.synchronize()
            done = threading.Event()
            with self._lending:
                chunks = self._take_from(0) if lent == self._lent else []
                if chunks:
                    self._unmapped = done
            try:
                self._unmap(chunks)
            finally:
                done.set()

        _LENT.add(unmap)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the whole range; only what is committed may be touched. Must not outlive the arena."""
        if self._view is None:
            before = len(self._handles)
            self.resize(max(self.committed_bytes, 1))  # torch asks the driver whose address it is
            self._view = bytes_at(self._address, self.reserved_bytes, self._device)
            self._unmap(self._take_from(before))
        count = dtype.itemsize
        for size in shape:
            count *= size
        return self._view[:count].view(dtype).view(shape)

    def close(self) -> None:
        if self._address:
            self._view = None
            with self._lending:
                self._lent += 1
            address, self._address = self._address, 0
            self._unmap_later(self._take_from(0, address), address)

    def _map_one(self) -> None:
        code, handle = driver.cuMemCreate(self._chunk_bytes, self._property, 0)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY and wait_for_memory():
            code, handle = driver.cuMemCreate(self._chunk_bytes, self._property, 0)
        if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemory(f"the device has no {self._chunk_bytes:,} bytes left")
        _checked((code, handle))
        at = self._address + self.committed_bytes
        _checked(driver.cuMemMap(at, self._chunk_bytes, 0, handle, 0))
        _checked(driver.cuMemSetAccess(at, self._chunk_bytes, [_access(self._device.index or 0)], 1))
        self._handles.append(handle)

    def _take_from(self, count: int, begin: int = 0) -> list[tuple[int, Any]]:
        """The chunks behind the first few, which are no longer the arena's: addresses and handles, the last first."""
        begin = begin or self._address
        taken = [(begin + at * self._chunk_bytes, self._handles[at]) for at in range(count, len(self._handles))]
        del self._handles[count:]
        return taken[::-1]

    def _unmap(self, chunks: list[tuple[int, Any]]) -> None:
        for address, handle in chunks:
            _checked(driver.cuMemUnmap(address, self._chunk_bytes))
            _checked(driver.cuMemRelease(handle))

    def _unmap_later(self, chunks: list[tuple[int, Any]], freed: int = 0) -> threading.Event:
        """And give the addresses from `freed` on back. Returns what is set when it is done."""
        events, done = self.in_use, threading.Event()

        def unmap() -> None:
            try:
                torch.cuda.set_device(self._device)
                for event in events:
                    event.synchronize()
                self._unmap(chunks)
                if freed:
                    _checked(driver.cuMemAddressFree(freed, self.reserved_bytes))
            finally:
                done.set()

        RECLAIMER.add(unmap)
        return done


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Memory that somebody else owns: the device's, or the host's where it is registered with the device."""
    return torch.as_tensor(_Bytes(address, size), device=device)


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
