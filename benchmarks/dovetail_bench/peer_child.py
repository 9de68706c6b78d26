"""Runs under a peer's interpreter: one load per line of input, one line of answer. Imports nothing of ours.

    {"load": "torch.load", "path": …, "device": "cpu"}  →  {"bytes": …, "seconds": …, "checksum": …}
    {"import": "torch.load"}                            →  {}

`seconds` spans from the path to tensors whose bytes are all in memory (on a GPU: on it, synchronised). A loader that
maps has its pages touched within that time, since otherwise nothing would have been read.
"""

import gc
import json
import os
import sys
import time
import zlib

SAMPLE_BYTES = 64  # of each tensor, at its start, middle and end
_PAGE = 4096


def safetensors_mmap(path, device):
    from safetensors.torch import load_file

    tensors = load_file(path, device=device, backend="mmap")
    if device == "cpu":
        touch(tensors)
    return tensors


def safetensors_pread(path, device):
    from safetensors.torch import load_file

    return load_file(path, device=device, backend="pread")


def torch_load(path, device):
    import torch

    tensors = torch.load(path, weights_only=True, map_location="cpu")
    return tensors if device == "cpu" else {name: tensor.to(device) for name, tensor in tensors.items()}


def torch_load_pinned(path, device):
    import torch

    tensors = torch.load(path, weights_only=True, map_location="cpu")
    pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
    synchronize(device)
    return moved


def fastsafetensors(path, device):
    from fastsafetensors import fastsafe_open

    with fastsafe_open(path, nogds=True, device=device) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)


def runai_model_streamer(path, device):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(path)  # on the GPU it streams to the host too, and its users copy each tensor from there
        return {name: tensor if device == "cpu" else tensor.to(device) for name, tensor in streamer.get_tensors()}


def host_pageable(path, device):
    """What torch does with tensors in plain host memory; they are there before the clock starts."""
    return {name: tensor.to(device) for name, tensor in _resident(path).items()}


def host_pinned(path, device):
    """The same through memory that is pinned for this load."""
    pinned = {name: tensor.pin_memory() for name, tensor in _resident(path).items()}
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
    synchronize(device)
    return moved


def _resident(path):
    if path not in _RESIDENT:
        from safetensors.torch import load_file

        _RESIDENT.clear()
        _RESIDENT[path] = load_file(path, backend="pread")
    return _RESIDENT[path]


_RESIDENT: dict[str, object] = {}
LOADERS = {
    "safetensors mmap": safetensors_mmap,
    "safetensors load_file": safetensors_pread,
    "torch.load": torch_load,
    "torch.load pinned": torch_load_pinned,
    "fastsafetensors": fastsafetensors,
    "runai-model-streamer": runai_model_streamer,
    "torch from host": host_pageable,
    "torch from host pinned": host_pinned,
}
_IMPORTS = {"fastsafetensors": "fastsafetensors", "runai-model-streamer": "runai_model_streamer"}


def touch(tensors):
    """Read one byte of every page."""
    for tensor in tensors.values():
        _bytes(tensor)[::_PAGE].sum()


def synchronize(device):
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def checksum(tensors):
    """Of the first, middle and last bytes of each tensor, in the order of their names."""
    total = 0
    for name in sorted(tensors):
        data = _bytes(tensors[name])
        for start in sample_starts(data.numel()):
            total = zlib.crc32(bytes(data[start : start + SAMPLE_BYTES].tolist()), total)
    return total


def sample_starts(size: int) -> tuple[int, int, int]:
    return (0, size // 2, max(0, size - SAMPLE_BYTES))


def _bytes(tensor):
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def load(loader, path, device):
    if loader.startswith("torch from host"):
        _resident(path)
    synchronize(device)
    started = time.perf_counter()
    tensors = LOADERS[loader](path, device)
    synchronize(device)
    seconds = time.perf_counter() - started
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {"bytes": size, "seconds": seconds, "checksum": checksum(tensors)}


def save_torch(source, target):
    """The same tensors as torch writes them."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(source), target)
    return {}


def warm_up(loader, device):
    """Everything that a first use costs and a load does not."""
    import torch

    if loader in _IMPORTS:
        __import__(_IMPORTS[loader])
    torch.zeros(1, device=device)
    return {"version": torch.__version__}


def answer(command):
    if "load" in command:
        return load(command["load"], command["path"], command["device"])
    if "save_torch" in command:
        return save_torch(command["source"], command["save_torch"])
    return warm_up(command["import"], command["device"])


def main():
    # Whatever a library prints goes to stderr; the answers alone go where the parent listens.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # the boundary of this process: the parent is told, and asks on
            reply = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        gc.collect()  # what was loaded is given back before the next one
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
