"""Loads launchers of kernels by Triton's own loader in four threads at the same time, as threads of a worker do that
load models, read adapters and compute: each has to be that of its kernel. Needs Triton and a C compiler, no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from types import SimpleNamespace
from unittest import mock

from triton.backends.nvidia import driver

from dovetail.engine.devices.cuda import launch  # changes Triton's loader

KERNELS, ROUNDS = 4, 3000
SOURCE = """#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&def); }
"""
METADATA = SimpleNamespace(
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


def load(number: int) -> int:
    """Which kernel's launcher comes when that of this one is loaded."""
    source = SimpleNamespace(constants={}, signature={0: number}, fn=None)
    return int(driver.CudaLauncher(source, METADATA).launch())


def main() -> None:
    assert launch.OVERLAP is not None
    wrong: list[int] = []
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict("os.environ", {"TRITON_CACHE_DIR": cache}),
        mock.patch.object(driver, "make_launcher", lambda constants, signature, meta: SOURCE % signature[0]),
        mock.patch.object(driver, "library_dirs", return_value=[]),
        mock.patch.object(driver, "libraries", []),
        mock.patch.object(driver, "wrap_handle_tensordesc", lambda launcher, signature, meta: launcher),
    ):
        assert [load(number) for number in range(KERNELS)] == list(range(KERNELS))
        sys.setswitchinterval(1e-5)

        def again(number: int) -> None:
            wrong.extend(found for found in (load(number) for _ in range(ROUNDS // KERNELS)) if found != number)

        threads = [threading.Thread(target=again, args=(number,)) for number in range(KERNELS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, f"{len(wrong)} of {ROUNDS} launchers were those of other kernels"


if __name__ == "__main__":
    main()
