"""Imports torch for a worker process: faster than `import torch` does by itself, and with threads that share cores.

`torch._meta_registrations` teaches torch.compile the shapes of every operator. Nothing here compiles, and leaving it
out saves over a quarter of the import (1.7 s to 1.2 s on a 2-core Neoverse-N1).

OpenMP's threads spin for milliseconds at every barrier by default. That is free while they have the cores to
themselves and ruinous when they do not, and here the gateway lives on the same ones: beside a busy neighbour on each of
two Xeon cores, 40 tokens of SmolLM2 were not done after a minute, against 30 ms a token without neighbours; with the
short spin set here a token took 166 ms beside them, and as long as before without.

Must run before anything else imports torch; does nothing if torch is there already.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

_SKIPPED = "torch._meta_registrations"
_SPIN_COUNT = "10000"


def import_torch_for_worker() -> None:
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:  # set by the user: keep it
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    sys.modules[_SKIPPED] = ModuleType(_SKIPPED)
    try:
        import torch  # noqa: F401
    finally:
        del sys.modules[_SKIPPED]  # who needs it after all can still import the real one
