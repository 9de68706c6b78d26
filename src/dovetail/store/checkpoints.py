"""Opens weights wherever they lie (our own folder, an HF folder, a GGUF file) and describes them as a ModelCard."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.node.ports import Checkpoint
from dovetail.store.format.manifest import StoredModel, is_stored, read_card
from dovetail.store.format.tokenizer_files import TokenFields, find_tokenizer, read_token_fields
from dovetail.store.format.version_one import VersionOneFolder, is_version_one, read_old_card
from dovetail.store.hf.adapters import is_adapter_folder
from dovetail.store.hf.folder import is_hf_folder, open_hf_folder
from dovetail.types import ModelCard


class ModelFiles(Checkpoint, Protocol):
    """Weights together with what else a pull takes over."""

    @property
    def dtype(self) -> str:
        """Storage type of the matrices; one that NumPy lacks where they are quantised."""

    def tokenizer(self) -> tuple[TokenFields, str]:
        """What the card says about text, and the text of tokenizer.json."""

    def release(self) -> None:
        """Lets go of pages that were read; they come back when touched."""


@runtime_checkable
class CodedFiles(Protocol):
    """Weights of which some come quantised, in blocks that can be kept."""

    def coded(self, name: str) -> tuple[tuple[int, str], ...]:
        """Of each part of a matrix its rows and the layout that keeps it to the bit; "" if there is none."""


def open_checkpoint(path: str | Path) -> ModelFiles:
    path = _existing(path)
    if is_stored(path):
        return StoredModel(path)
    if is_version_one(path):
        return VersionOneFolder(path)
    if is_hf_folder(path):
        return open_hf_folder(path)
    if is_gguf(path):
        from dovetail.store.gguf.file import GgufFile  # its package is slow to import; serving does not need it

        return GgufFile(path)
    raise _not_a_model(path)


def describe(path: str | Path, name: str) -> ModelCard:
    """The card of a model that is served where it lies, without pulling it."""
    path = _existing(path).resolve()
    if is_stored(path) or is_version_one(path):
        return read_any_card(path, name)
    if is_hf_folder(path):
        return _describe_hf_folder(path, name)
    if is_gguf(path):
        raise UnsupportedModel(f"{path}: a GGUF file is not served in place; pull it first")
    raise _not_a_model(path)


def read_any_card(path: Path, name: str) -> ModelCard:
    """Of a folder of the store; one that has both forms is read as the newer."""
    return read_old_card(path, name) if is_version_one(path) and not is_stored(path) else read_card(path, name)


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:  # stores of others name files by their digests
        return file.read(4) == b"GGUF"


def _describe_hf_folder(path: Path, name: str) -> ModelCard:
    checkpoint = open_hf_folder(path)
    try:
        return ModelCard(
            name=name,
            path=str(path),
            spec=checkpoint.spec,
            tokenizer_file=str(find_tokenizer(path)),
            source=str(path),
            dtype=checkpoint.float_dtype,
            size_bytes=checkpoint.size_bytes,
            created=int((path / "config.json").stat().st_mtime),
            **msgspec.structs.asdict(read_token_fields(path)),
        )
    finally:
        checkpoint.close()


def _existing(path: str | Path) -> Path:
    path = Path(path).expanduser()
    if not path.exists():
        raise DamagedCheckpoint(f"{path}: no such file or folder")
    return path


def _not_a_model(path: Path) -> CheckpointError:
    if is_adapter_folder(path):
        return UnsupportedModel(
            f"{path}: a LoRA adapter, not a model; name it under models.BASE.adapters in the file, or send it to "
            'POST /v1/load_lora_adapter ({"lora_name": …, "lora_path": …, "base_model_name": …})'
        )
    if path.is_dir():
        return DamagedCheckpoint(f"{path}: config.json is missing; this is not a model folder")
    return DamagedCheckpoint(f"{path}: neither a model folder nor a .gguf file")
