"""Reads folders of the first form (dovetail.json and weights.safetensors), which this release no longer writes.

They are served where they lie. `pull` of the same source adds a manifest and blobs to such a folder, from its own
files; `gc` then removes the old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.store.files import read_bytes, read_text
from dovetail.store.format.manifest import FORMAT, TEMPLATE, TOKENIZER, VERSION
from dovetail.store.format.tokenizer_files import TokenFields
from dovetail.store.hf.safetensors_file import SafetensorsFile
from dovetail.types import ModelCard

CARD, WEIGHTS = "dovetail.json", "weights.safetensors"
OLD_FILES = (CARD, WEIGHTS)


class _Card(msgspec.Struct, frozen=True):
    format: str
    version: int
    spec: ModelSpec
    tokens: TokenFields
    dtype: str
    source: str
    created: int


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


class VersionOneFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._card = _read(path)
        self.spec: ModelSpec = self._card.spec
        self._file = SafetensorsFile(path / WEIGHTS)
        for name, shape in self.spec.tensors():
            if name not in self._file:
                raise DamagedCheckpoint(f"{path / WEIGHTS}: tensor {name} is missing")
            if self._file.shape(name) != shape:
                found = list(self._file.shape(name))
                raise DamagedCheckpoint(f"{path / WEIGHTS}: {name} has shape {found}, {CARD} asks for {list(shape)}")

    @property
    def dtype(self) -> str:
        return self._card.dtype

    @property
    def in_place(self) -> bool:
        return True

    def pieces(self, name: str) -> Sequence[HostTensor]:
        return [self._file.tensor(name)]

    def tokenizer(self) -> tuple[TokenFields, str]:
        return _tokens(self.path, self._card), read_text(self.path / TOKENIZER)

    def release(self) -> None:
        self._file.release()

    def close(self) -> None:
        self._file.close()


def is_version_one(path: Path) -> bool:
    return (path / CARD).is_file()


def read_old_card(path: Path, name: str) -> ModelCard:
    card = _read(path)
    weights = path / WEIGHTS
    if not weights.is_file():
        raise DamagedCheckpoint(f"{weights}: missing")
    return ModelCard(
        name=name,
        path=str(path),
        spec=card.spec,
        tokenizer_file=str(path / TOKENIZER),
        source=card.source,
        dtype=card.dtype,
        size_bytes=weights.stat().st_size,
        created=card.created,
        **msgspec.structs.asdict(_tokens(path, card)),
    )


def _tokens(path: Path, card: _Card) -> TokenFields:
    template = path / TEMPLATE
    text = read_text(template) if template.is_file() else None
    return msgspec.structs.replace(card.tokens, chat_template=text)


def _read(path: Path) -> _Card:
    text = read_bytes(path / CARD)
    try:
        head = msgspec.json.decode(text, type=_Head)
        if head.format != FORMAT:
            raise DamagedCheckpoint(f"{path / CARD}: format {head.format!r} is not {FORMAT}")
        if head.version != 1:
            raise UnsupportedModel(f"{path / CARD}: version {head.version}, this release reads 1 and {VERSION}")
        return msgspec.json.decode(text, type=_Card)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{path / CARD}: {error}") from error
