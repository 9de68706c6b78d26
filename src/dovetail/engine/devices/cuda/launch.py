"""How kernels of one iteration follow each other: on Hopper and later a kernel is launched while the one before it
still runs (programmatic dependent launch). It may read weights at once; before it reads what another kernel wrote, it
waits until that one is done. Every kernel of ours waits, so waiting for one's predecessor is waiting for all before it.
"""

# mypy: ignore-errors

from __future__ import annotations

import threading
from functools import wraps

import torch
import triton
import triton.language as tl
from triton.backends.nvidia import driver

HAS_OVERLAP = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
OVERLAP = {"OVERLAP": True, "launch_pdl": True} if HAS_OVERLAP else {"OVERLAP": False}  # arguments of every launch


def _load_one_at_a_time(launchers) -> None:
    """Triton loads what launches a kernel as a C module, all of one name, and Python fills one module object for that
    name. Of two threads that load at the same time one could have the other's kernel launched with its own arguments.
    """
    load, lock = launchers.__init__, threading.Lock()

    @wraps(load)
    def load_alone(launcher, *arguments, **options) -> None:
        with lock:
            load(launcher, *arguments, **options)

    launchers.__init__ = load_alone


if hasattr(driver, "CudaLauncher"):
    _load_one_at_a_time(driver.CudaLauncher)


@triton.jit
def launch_next(OVERLAP: tl.constexpr):
    """The next kernel may be launched; it will wait for this one's end."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """What the kernels before this one wrote can be read from here on."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
