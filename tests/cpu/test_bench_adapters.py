"""`bench adapters`: its models are no two the same file and whole, its adapters fit the base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.store import Catalogue
from dovetail.store.checking import check_weights
from dovetail.store.format.manifest import read_manifest
from dovetail.store.hf.adapter_parts import open_adapter, target_rows_of
from dovetail_bench.adapters import make_adapters, make_copies

pytestmark = pytest.mark.slow  # whole contests of processes


def test_models_are_distinct_and_adapters_fit(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "store")
    base = catalogue.pull(str(tiny_folder("llama")), name="base")
    models = make_copies(catalogue, base, 3, lambda *_: None)
    assert [model.name for model in models] == ["copy-00", "copy-01", "copy-02"]
    for model in models:
        folder = Path(model.card.path)
        check_weights(folder, read_manifest(folder))
    assert len({model.blobs for model in models}) == 3
    adapters = make_adapters(catalogue, tmp_path / "adapters", base, ["x", "y", "z"], (2, 3), lambda *_: None)
    ranks = []
    for name in adapters.values():
        weights = open_adapter(catalogue.existing(name), base.spec)
        parts = list(weights.parts())
        ranks.append(parts[0].first.shape[0])
        assert len(parts) == len(target_rows_of(base.spec))
    assert ranks == [2, 3, 2]
