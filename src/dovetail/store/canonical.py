"""Our own folder: canonical tensors, already fused, in one mapped file, next to all that a ModelCard needs.

    dovetail.json         format version, shape, tokens, type, source
    weights.safetensors   canonical names; float32 norms first, then the matrices in one type; data 64-byte aligned
    tokenizer.json
    chat_template.jinja   where the model has one

Float32 before the 16-bit types keeps every tensor aligned to its own type, since safetensors allows no holes.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import DTYPE_BYTES, ModelSpec
from dovetail.node.ports import Checkpoint, HostTensor
from dovetail.store.arrays import convert
from dovetail.store.files import read_text
from dovetail.store.safetensors_file import DTYPES, SafetensorsFile
from dovetail.store.tokenizer_files import TokenFields
from dovetail.types import ModelCard

CARD, WEIGHTS, TOKENIZER, TEMPLATE = "dovetail.json", "weights.safetensors", "tokenizer.json", "chat_template.jinja"
FORMAT, VERSION = "dovetail-checkpoint", 1
_ALIGNMENT = 64
_HEADER_NAMES = {value: key for key, value in DTYPES.items()}

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class StoredCard(msgspec.Struct, frozen=True):
    """dovetail.json: a ModelCard without what depends on where the folder lies."""

    format: str
    version: int
    spec: ModelSpec
    tokens: TokenFields  # its chat_template is kept in a file of its own
    dtype: str
    source: str
    created: int


class CanonicalFolder:
    """A Checkpoint whose every tensor is one piece, used where it is mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spec: ModelSpec = read_stored_card(path).spec
        self._file = SafetensorsFile(path / WEIGHTS)
        for name, shape in self.spec.tensors():
            if name not in self._file:
                raise DamagedCheckpoint(f"{path / WEIGHTS}: tensor {name} is missing")
            if self._file.shape(name) != shape:
                found = list(self._file.shape(name))
                raise DamagedCheckpoint(f"{path / WEIGHTS}: {name} has shape {found}, {CARD} asks for {list(shape)}")

    @property
    def in_place(self) -> bool:
        return True

    def pieces(self, name: str) -> Sequence[HostTensor]:
        return [self._file.tensor(name)]

    def tokenizer(self) -> tuple[TokenFields, str]:
        return read_tokens(self.path), read_text(self.path / TOKENIZER)

    def close(self) -> None:
        self._file.close()


def is_canonical_folder(path: Path) -> bool:
    return (path / CARD).is_file()


def read_stored_card(path: Path) -> StoredCard:
    try:
        text = (path / CARD).read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path / CARD}: {error.strerror}") from error
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != FORMAT:
            raise DamagedCheckpoint(f"{path / CARD}: format {head.format!r} is not {FORMAT}")
        if head.version != VERSION:
            raise UnsupportedModel(
                f"{path / CARD}: version {head.version}, this release reads {VERSION}; pull it again"
            )
        return msgspec.json.decode(text, type=StoredCard)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{path / CARD}: {error}") from error


def read_tokens(path: Path) -> TokenFields:
    template = path / TEMPLATE
    text = read_text(template) if template.is_file() else None
    return msgspec.structs.replace(read_stored_card(path).tokens, chat_template=text)


def read_card(path: Path, name: str) -> ModelCard:
    stored = read_stored_card(path)
    weights = path / WEIGHTS
    if not weights.is_file():
        raise DamagedCheckpoint(f"{weights}: missing")
    return ModelCard(
        name=name,
        path=str(path),
        spec=stored.spec,
        tokenizer_file=str(path / TOKENIZER),
        source=stored.source,
        dtype=stored.dtype,
        size_bytes=weights.stat().st_size,
        created=stored.created,
        **msgspec.structs.asdict(read_tokens(path)),
    )


def write_canonical(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    tokens: TokenFields,
    tokenizer_json: str,
    dtype: str,
    source: str,
    progress: Progress | None = None,
) -> None:
    """Write the whole folder beside its place, then put it there; a crash leaves the old one or the new one."""
    building = folder.with_name(f".building-{folder.name}-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        with (building / WEIGHTS).open("wb") as file:
            write_weights(checkpoint, file, dtype, progress)
            _flush(file)
        _write_text(building / TOKENIZER, tokenizer_json)
        if tokens.chat_template is not None:
            _write_text(building / TEMPLATE, tokens.chat_template)
        stored = StoredCard(
            format=FORMAT,
            version=VERSION,
            spec=checkpoint.spec,
            tokens=msgspec.structs.replace(tokens, chat_template=None),
            dtype=dtype,
            source=source,
            created=int(time.time()),
        )
        _write_text(building / CARD, msgspec.json.format(msgspec.json.encode(stored)).decode())
        _sync_folder(building)
        _put_in_place(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_weights(checkpoint: Checkpoint, file: BinaryIO, dtype: str, progress: Progress | None = None) -> None:
    """Stream every tensor, a piece at a time."""
    layout = sorted(_layout(checkpoint.spec, dtype), key=lambda entry: -DTYPE_BYTES[entry[2]])
    header, total, done = {}, 0, 0
    for name, shape, kind in layout:
        size = math.prod(shape) * DTYPE_BYTES[kind]
        header[name] = {"dtype": _HEADER_NAMES[kind], "shape": shape, "data_offsets": (total, total + size)}
        total += size
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape, kind in layout:
        end = done + math.prod(shape) * DTYPE_BYTES[kind]
        for piece in checkpoint.pieces(name):
            data = convert(piece, kind).data
            file.write(data)
            done += len(data)
            if progress is not None:
                progress(done, total)
        if done != end:
            raise DamagedCheckpoint(f"{name}: pieces hold {done - end:+d} bytes against shape {list(shape)}")


def recover(folder: Path) -> None:
    """Finish what a crash between the two renames of `_put_in_place` left: bring the old folder back."""
    for old in folder.parent.glob(f".replaced-{folder.name}-*"):
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(folder)


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def _layout(spec: ModelSpec, dtype: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Norms stay in float32: they are small, and Gemma's are 1 plus something that 16 bits would lose."""
    for name, shape in spec.tensors():
        yield name, shape, "f32" if "norm." in name else dtype


def _put_in_place(building: Path, folder: Path) -> None:
    replaced = folder.with_name(f".replaced-{folder.name}-{os.getpid()}")
    if folder.exists():
        folder.rename(replaced)
    building.rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _write_text(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode())
        _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
