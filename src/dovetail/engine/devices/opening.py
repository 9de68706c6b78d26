"""Which device a name stands for. Whatever its kernels need is imported only when it is opened."""

from __future__ import annotations

import os

from dovetail.engine.devices import Device


def open_device(name: str, threads: int) -> Device:
    """`cpu`, `cuda:N`, or a GPU or a slice of one by the driver's own name for it (`GPU-…`, `MIG-…`)."""
    if name == "cpu":
        from dovetail.engine.devices.cpu import CpuDevice

        return CpuDevice(threads)
    from dovetail.engine.devices.cuda.device import CudaDevice

    if not name.startswith("cuda"):  # of all GPUs this process sees only that; a slice cannot be had otherwise
        os.environ["CUDA_VISIBLE_DEVICES"] = name
        name = "cuda:0"
    return CudaDevice(name)
