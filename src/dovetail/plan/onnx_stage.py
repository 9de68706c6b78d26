"""A stage of an ONNX model in a function process, computed by onnxruntime on the CPU. Loads no library but its own."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from dovetail.errors import EngineFailed
from dovetail.plan.frames import Answer, Call, Spec
from dovetail.plan.resident import peak_bytes


class OnnxStage:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._threads = spec.threads
        self._session = self._open()

    def run(self, call: Call, payload: bytearray) -> tuple[Answer, memoryview]:
        x = np.frombuffer(payload, np.float32).reshape(call.shape)
        if call.threads and call.threads != self._threads:
            self._threads = call.threads
            self._session = None  # its memory goes before the next one's comes
            self._session = self._open()
            self._compute(x)  # a session's first run takes memory
        started = time.perf_counter()
        try:
            output = self._compute(x)
        except _failures() as error:
            return Answer(error=f"{self._spec.model}: {error}"), memoryview(b"")
        seconds = time.perf_counter() - started
        return Answer(seconds, tuple(output.shape), peak_bytes()), output.data.cast("B")

    def _compute(self, x: Any) -> Any:
        (output,) = self._session.run(None, {self._session.get_inputs()[0].name: x})
        return np.ascontiguousarray(output, dtype=np.float32)

    def _open(self) -> Any:
        try:
            import onnxruntime
        except ImportError:
            raise EngineFailed("models from ONNX files need onnxruntime; install dovetail[plan]") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a quota counts every turn
        try:
            return onnxruntime.InferenceSession(self._spec.model, options, providers=["CPUExecutionProvider"])
        except _failures() as error:
            raise EngineFailed(f"{self._spec.model}: {error}") from error


def _failures() -> tuple[type[Exception], ...]:
    """onnxruntime has a class for each status, and no common one."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    names = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NoSuchFile", "NotImplemented", "EPFail")
    return (state.RuntimeException, *(getattr(state, name) for name in names))
