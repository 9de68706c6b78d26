"""Opens weights wherever they lie (our own folder, an HF folder, a GGUF file) and describes them as a ModelCard."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dovetail.errors import DamagedCheckpoint
from dovetail.node.ports import Checkpoint
from dovetail.store.hf_folder import HfFolder, is_hf_folder
from dovetail.store.tokenizer_files import find_tokenizer, read_token_fields
from dovetail.types import ModelCard


def open_checkpoint(path: str | Path) -> Checkpoint:
    path = _existing(path)
    if is_hf_folder(path):
        return HfFolder(path)
    raise _not_a_model(path)


def describe(path: str | Path, name: str) -> ModelCard:
    """The card of a model that is served where it lies, without pulling it."""
    path = _existing(path).resolve()
    if is_hf_folder(path):
        return _describe_hf_folder(path, name)
    raise _not_a_model(path)


def _describe_hf_folder(path: Path, name: str) -> ModelCard:
    checkpoint = HfFolder(path)
    fields = read_token_fields(path)
    card = ModelCard(
        name=name,
        path=str(path),
        spec=checkpoint.spec,
        tokenizer_file=str(find_tokenizer(path)),
        source=str(path),
        dtype=checkpoint.dtype,
        size_bytes=checkpoint.size_bytes,
        created=int((path / "config.json").stat().st_mtime),
        **msgspec.structs.asdict(fields),
    )
    checkpoint.close()
    return card


def _existing(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if not path.exists():
        raise DamagedCheckpoint(f"{path}: no such file or folder")
    return path


def _not_a_model(path: Path) -> DamagedCheckpoint:
    if path.is_dir():
        return DamagedCheckpoint(f"{path}: config.json is missing; this is not a model folder")
    return DamagedCheckpoint(f"{path}: neither a model folder nor a .gguf file")
