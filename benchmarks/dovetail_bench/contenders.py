"""What takes part in the store bench: something that reads a checkpoint from a cold or warm state and says how long.

A contender gets the files of one checkpoint and answers with bytes, seconds and a checksum of sampled bytes. Making the
state cold or warm is the bench's business, not the contender's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from dovetail_bench import fio, peer_child
from dovetail_bench.peers import PEERS, Peer, PeerProcess, Report, set_up

State = Literal["cold", "warm"]
BOTH: tuple[State, ...] = ("cold", "warm")


class SampleFiles(msgspec.Struct, frozen=True):
    """One checkpoint in every form. All hold the same tensors."""

    name: str
    safetensors: Path
    torch: Path
    stored: Path  # the folder of a model or adapter in our store
    blobs: tuple[Path, ...]  # its partition files
    checksum: int  # of the published tensors, as `peer_child.checksum` computes it
    stored_checksum: int  # of the store's, some of which are several of those in one
    is_adapter: bool = False


class Load(msgspec.Struct, frozen=True):
    bytes: int
    seconds: float
    checksum: int | None = None  # None: nothing was kept that could be compared


class Contender(Protocol):
    name: str
    reads_store: bool  # which of the two checksums its loads must have
    states: tuple[State, ...]

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        """What it reads."""

    def prepare(self, sample: SampleFiles, state: State) -> None:
        """Whatever must not be in the time: memory taken once, an earlier load forgotten."""

    def load(self, sample: SampleFiles) -> Load: ...

    def close(self) -> None: ...


class PeerContender:
    """A loader of `peer_child`, in a process that stays."""

    states = BOTH
    reads_store = False

    def __init__(self, loader: str, python: Path, device: str) -> None:
        self.name = loader
        self._device = device
        self._process = PeerProcess(python, Path(peer_child.__file__), loader)
        self._process.ask({"import": loader, "device": device})

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return (sample.torch if self.name.startswith("torch.load") else sample.safetensors,)

    def prepare(self, sample: SampleFiles, state: State) -> None:
        pass

    def load(self, sample: SampleFiles) -> Load:
        path = str(self.files(sample)[0])
        answer = self._process.ask({"load": self.name, "path": path, "device": self._device})
        return msgspec.convert(answer, Load)

    def close(self) -> None:
        self._process.close()


class HostToDevice(PeerContender):
    """From tensors that are in host memory already."""

    states = ("warm",)


class FioContender:
    """One setting of fio. The best of several is the reference."""

    reads_store = True

    def __init__(self, setting: fio.Setting) -> None:
        self.name = f"fio {setting}"
        self.states: tuple[State, ...] = ("cold",) if setting.direct else ("warm",)
        self._setting = setting

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return (max(sample.blobs, key=lambda path: path.stat().st_size),)

    def prepare(self, sample: SampleFiles, state: State) -> None:
        pass

    def load(self, sample: SampleFiles) -> Load:
        read = fio.run(self.files(sample)[0], self._setting)
        return Load(read.bytes, read.seconds)

    def close(self) -> None:
        pass


class RawRead(FioContender):
    """Our own reads into small buffers, where there is no fio."""

    def __init__(self, state: State) -> None:
        self.name = "raw read (no fio)"
        self.states = (state,)
        self._direct = state == "cold"

    def load(self, sample: SampleFiles) -> Load:
        read = fio.raw_read(self.files(sample)[0], self._direct)
        return Load(read.bytes, read.seconds)


# Loader of peer_child -> the peer whose environment it needs.
CPU_LOADERS = {
    "safetensors mmap": PEERS["safetensors"],
    "safetensors load_file": PEERS["safetensors"],
    "torch.load": PEERS["safetensors"],
    "fastsafetensors": PEERS["fastsafetensors"],
    "runai-model-streamer": PEERS["runai-model-streamer"],
}
CUDA_LOADERS: dict[str, Peer] = {
    "safetensors mmap": PEERS["safetensors"],
    "safetensors load_file": PEERS["safetensors"],
    "torch.load": PEERS["safetensors"],
    "torch.load pinned": PEERS["safetensors"],
    "fastsafetensors": PEERS["fastsafetensors"],
    "runai-model-streamer": PEERS["runai-model-streamer"],
    "torch from host": PEERS["safetensors"],
    "torch from host pinned": PEERS["safetensors"],
}


def start_peer(loader: str, device: str, folder: Path, *, install: bool, report: Report) -> PeerContender:
    """PeerUnavailable where it cannot be had."""
    peer = (CPU_LOADERS if device == "cpu" else CUDA_LOADERS)[loader]
    python = set_up(peer, folder, install=install, report=report)
    kind = HostToDevice if loader.startswith("torch from host") else PeerContender
    return kind(loader, python, device)
