"""A function process: layers of one model, computed for the process at the other end of its socket.

Started as `python -m dovetail.plan.function FD`. Ends when the socket does.
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any, Protocol

from dovetail.engine.torch_import import import_torch_for_worker
from dovetail.errors import DovetailError, EngineFailed
from dovetail.plan.frames import Answer, Call, FunctionDied, Spec, receive, send
from dovetail.plan.resident import KIB, peak_bytes

GPU_CONTEXT_BYTES = 512 * KIB * KIB  # of a process beside its tensors, about


class Computed(Protocol):
    """What a process computes with."""

    def run(self, call: Call, payload: bytearray) -> tuple[Answer, memoryview]: ...


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    spec, _ = receive(connection, Spec)
    try:
        computed = open_computed(spec)
    except DovetailError as error:
        send(connection, Answer(error=str(error)))
        return
    send(connection, Answer(memory_bytes=peak_bytes(), hardware=_hardware(spec.device)))
    while True:
        try:
            call, payload = receive(connection, Call)
        except (FunctionDied, ConnectionResetError):
            return
        answer, output = computed.run(call, payload)
        try:
            send(connection, answer, output)
        except ConnectionError:  # the caller is gone: another stage of the instance has died
            return


def open_computed(spec: Spec) -> Computed:
    if spec.model.endswith(".onnx"):
        from dovetail.plan.onnx_stage import OnnxStage

        return OnnxStage(spec)
    import_torch_for_worker()
    import torch

    torch.set_num_threads(spec.threads)
    if spec.device != "cpu":
        _prepare_gpu(spec.device)
    if "/" in spec.model:
        from dovetail.plan.decoder_stage import DecoderStage

        return DecoderStage(spec)
    return NetworkStage(spec)


class NetworkStage:
    """Layers of a network, on all rows or on a worker's share of them."""

    def __init__(self, spec: Spec) -> None:
        from dovetail.plan.known_chains import chain_named
        from dovetail.plan.networks import build_layers

        self._chain = chain_named(spec.model)
        self._spec = spec
        self._layers = build_layers(int(spec.model.rpartition("-")[2]), spec.first, spec.end, spec.device)

    def run(self, call: Call, payload: bytearray) -> tuple[Answer, memoryview]:
        import torch

        from dovetail.plan.networks import run_layers, run_share, shares_of

        if call.threads:
            torch.set_num_threads(call.threads)
        started = time.perf_counter()
        x = torch.frombuffer(payload, dtype=torch.float32).view(call.shape).to(self._spec.device)
        if call.workers == 1:
            output = run_layers(self._layers, x)
        else:
            share = shares_of(self._chain, self._spec.first, self._spec.end, call.workers)[call.worker]
            output = run_share(self._layers, self._chain, self._spec.first, share, x)
        output = output.cpu().contiguous()
        seconds = time.perf_counter() - started
        return Answer(seconds, tuple(output.shape), _peak_bytes(self._spec.device)), _bytes_of(output)


def _bytes_of(tensor: Any) -> memoryview:
    return tensor.numpy().data.cast("B")  # type: ignore[no-any-return]


def _prepare_gpu(device: str) -> None:
    import torch

    if not torch.cuda.is_available() or (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise EngineFailed(f"{device}: torch {torch.__version__} sees no such GPU")
    # As torch has it by default: convolutions may round their inputs to TF32. Trying kernels out for each batch size
    # would take gigabytes of scratch memory, and choose ones between which times jump.
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False


def _hardware(device: str) -> str:
    import torch

    return "" if device == "cpu" else torch.cuda.get_device_name(device)


def _peak_bytes(device: str) -> int:
    if device == "cpu":
        return peak_bytes()
    import torch

    return torch.cuda.max_memory_reserved(device) + GPU_CONTEXT_BYTES


if __name__ == "__main__":
    main()
