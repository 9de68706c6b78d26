"""Which device a name stands for. Whatever its kernels need is imported only when it is opened."""

from __future__ import annotations

from dovetail.engine.devices import Device


def open_device(name: str, threads: int) -> Device:
    """`cpu`, or `cuda:N`."""
    if name == "cpu":
        from dovetail.engine.devices.cpu import CpuDevice

        return CpuDevice(threads)
    from dovetail.engine.devices.cuda.device import CudaDevice

    return CudaDevice(name)
