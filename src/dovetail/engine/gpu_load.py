"""Host memory that a GPU reads by itself (L3). What is copied out of it, and when, is `devices.cuda.weights`."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.errors import OutOfMemory


class PinnedRange:
    """Registering walks every page, so it is done once for a chunk of the pool, never for one load."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address: int | None = None
        code = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        if int(code) != 0:
            reason = torch.cuda.cudart().cudaGetErrorString(code)
            with suppress(RuntimeError):  # reported here, so that CUDA does not report it to an unrelated call
                torch.zeros(1, device="cuda")
            raise OutOfMemory(f"cannot pin {size_bytes:,} bytes of host memory for the GPU: {reason}")
        self._address = address

    def close(self) -> None:
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None
