"""Which device a name stands for. Whatever its kernels need is imported only when it is opened."""

from __future__ import annotations

import os

import torch

from dovetail.engine.devices import Device
from dovetail.errors import Unusable
from dovetail.native import select


def open_device(name: str, threads: int) -> Device:
    """`cpu`, `cuda:N`, or a GPU or a slice of one by its driver's name (`GPU-…`, `MIG-…`). Raises ConfigError
    for what this machine does not have, and kernels that its processor does not run."""
    if name == "cpu":
        from dovetail.engine.devices.cpu import CpuDevice

        select()
        return CpuDevice(threads)
    try:
        from dovetail.engine.devices.cuda.device import CudaDevice
    except ImportError as error:
        raise Unusable(f"device {name}: {error}; GPUs need pip install 'dovetail[cuda]'") from error
    if not torch.cuda.is_available():
        raise Unusable(f"device {name}: torch {torch.__version__} finds no GPU; `dovetail doctor` says what there is")

    if not name.startswith("cuda"):  # of all GPUs this process sees only that; a slice cannot be had otherwise
        os.environ["CUDA_VISIBLE_DEVICES"] = name
        name = "cuda:0"
    return CudaDevice(name)
