"""A safetensors file that is not what it says is refused, with the file and the reason in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.store.format.arrays import as_array
from dovetail.store.hf.safetensors_file import SafetensorsFile


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = SafetensorsFile(
        write(tmp_path / "a", {"__metadata__": {"format": "pt"}, "x": entry("F32", [2, 3], 0, 24)}, values.tobytes())
    )
    tensor = file.tensor("x")
    file.close()  # the view keeps the mapping
    np.testing.assert_array_equal(as_array(tensor), values)
    assert tensor.data.readonly
    assert file.metadata == {"format": "pt"}


def test_scalars_and_empty_tensors_are_allowed(tmp_path: Path) -> None:
    header = {"scalar": entry("F16", [], 0, 2), "none": entry("F32", [0, 4], 2, 2)}
    file = SafetensorsFile(write(tmp_path / "a", header, b"\0\0"))
    assert len(file.tensor("scalar").data) == 2
    assert len(file.tensor("none").data) == 0


GOOD = {"x": entry("F32", [4], 0, 16)}
BROKEN: dict[str, tuple[Any, bytes, int | None, str]] = {
    "truncated data": (GOOD, b"\0" * 15, None, "truncated: x ends at byte 16 of 15"),
    "truncated header": (GOOD, b"", 5000, "truncated: header of 5000 bytes"),
    "absurd header": (GOOD, b"", 2**60, "not a safetensors file"),
    "header is not JSON": (b"{nope", b"", None, "header is not JSON"),
    "header is a list": ([1], b"", None, "header is not a JSON object"),
    "unknown type": ({"x": entry("F12", [4], 0, 16)}, b"\0" * 16, None, "unknown dtype 'F12'"),
    "size against shape": ({"x": entry("F32", [5], 0, 16)}, b"\0" * 16, None, "16 bytes do not hold F32 of shape [5]"),
    "a hole": ({"x": entry("F32", [1], 4, 8)}, b"\0" * 8, None, "data begins at 4, expected 0"),
    "an overlap": (
        {"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)},
        b"\0" * 12,
        None,
        "y: data begins at 4, expected 8",
    ),
    "left-over bytes": (GOOD, b"\0" * 20, None, "4 bytes after the last tensor"),
    "negative offsets": ({"x": entry("F32", [1], -4, 0)}, b"", None, "must be whole numbers"),
    "an entry without offsets": ({"x": {"dtype": "F32", "shape": [1]}}, b"", None, "header entry is not"),
}


@pytest.mark.parametrize(("header", "data", "length", "text"), BROKEN.values(), ids=BROKEN)
def test_a_damaged_file_is_refused(header: Any, data: bytes, length: int | None, text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "weights.safetensors", header, data, length)
    with pytest.raises(DamagedCheckpoint) as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(("content", "text"), [(b"", "empty file"), (b"\1\2", "truncated: 2 bytes")])
def test_a_file_shorter_than_its_length_field_is_refused(content: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=text):
        SafetensorsFile(path)
    with pytest.raises(DamagedCheckpoint, match="missing"):
        SafetensorsFile(tmp_path / "b")


def test_integer_tensors_are_only_refused_when_asked_for(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "a", {"ids": entry("I64", [1], 0, 8)}, b"\0" * 8))
    with pytest.raises(UnsupportedModel, match="ids: dtype I64"):
        file.tensor("ids")
