"""The manifest reader on manifests that nobody should have written: an answer or an error of ours, never another."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_builders import sealed, stored

from dovetail.errors import CheckpointError
from dovetail.store.format.manifest import MANIFEST, StoredModel, parse_manifest

TinyFolder = Callable[[str], Path]
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.sampled_from([0, 1, -1, 64, 4096, 2**31, 2**32, 2**53, 2**63, 2**64])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=8), st.sampled_from(["f64", "int4"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, tiny_folder: TinyFolder) -> tuple[Path, dict[str, Any]]:
    model = stored(tiny_folder("mixtral"), tmp_path_factory.mktemp("fuzz"), layout="int8", ranks=2)
    return model.path, json.loads((model.path / MANIFEST).read_text())


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


def check(text: bytes) -> bool:
    try:
        parse_manifest(text, "here")
    except CheckpointError as error:
        assert "here" in str(error)  # noqa: PT017
        return False
    return True


def test_the_manifest_itself_is_accepted(manifest: tuple[Path, dict[str, Any]]) -> None:
    assert check(sealed(manifest[1]))


@given(data=st.data())
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_changed_value_anywhere_is_read_or_refused(
    manifest: tuple[Path, dict[str, Any]], data: st.DataObject
) -> None:
    folder, original = manifest
    content = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(places(content)))
        if not path:
            continue
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if data.draw(st.booleans()) and isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent[path[-1]] = data.draw(VALUES)
    text = sealed(content)
    if not check(text) or content["partitions"] != original["partitions"]:
        return
    # What is accepted can be used without leaving its buffers.
    (folder / MANIFEST).write_bytes(text)
    buffers = [memoryview(bytes(partition["size"])) for partition in original["partitions"]]
    if content["kind"] == "model":
        model = StoredModel(folder, buffers)
        for name in model.names():
            assert sum(piece.data.nbytes for piece in model.pieces(name)) > 0


@given(text=st.one_of(st.binary(max_size=200), VALUES.map(lambda value: json.dumps(value).encode())))
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_refused(text: bytes) -> None:
    assert not check(text)
