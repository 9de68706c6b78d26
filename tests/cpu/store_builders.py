"""Stores of tiny models, and ways to damage them, for the tests of `store`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.node.ports import Checkpoint
from dovetail.store import Catalogue
from dovetail.store.format.arrays import to_float32
from dovetail.store.format.manifest import MANIFEST, StoredModel, checksum_of, partition_files


def stored(source: Path, root: Path, name: str = "m", **options: Any) -> StoredModel:
    card = Catalogue(root).pull(str(source), name=name, **{"dtype": "f32", "layout": "plain"} | options)
    return StoredModel(Path(card.path))


def flat(checkpoint: Checkpoint, name: str) -> Any:
    return np.concatenate([to_float32(piece).reshape(-1) for piece in checkpoint.pieces(name)])


def alter_manifest(folder: Path, change: Any) -> None:
    """`change` gets the decoded manifest; the checksum is made to fit again, as somebody with intent would."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.unlink()
    path.write_bytes(sealed(content))


def sealed(content: dict[str, Any]) -> bytes:
    zeros = "0" * 64
    text = json.dumps(content | {"checksum": zeros}).encode()
    return text.replace(zeros.encode(), checksum_of(text, zeros).encode(), 1)


def writable_blob(folder: Path, partition: int = 0) -> Path:
    path, _ = partition_files(folder)[partition]
    os.chmod(path, 0o644)
    return path


def flip_bit(path: Path, position: int) -> None:
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
