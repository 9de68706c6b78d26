"""How kernels of one iteration follow each other: on Hopper and later a kernel is launched while the one before it
still runs (programmatic dependent launch). It may read weights at once; before it reads what another kernel wrote, it
waits until that one is done. Every kernel of ours waits, so waiting for one's predecessor is waiting for all before it.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

HAS_OVERLAP = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
OVERLAP = {"OVERLAP": True, "launch_pdl": True} if HAS_OVERLAP else {"OVERLAP": False}  # arguments of every launch


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
