"""`verify` names what is damaged; `gc` removes what nobody needs and never what somebody does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from store_builders import flip_bit, stored, writable_blob

from dovetail.store import Catalogue
from dovetail.store.collect import collect, set_pinned, use_of
from dovetail.store.format.manifest import partition_files
from dovetail.store.paths import StorePaths, source_key
from dovetail.store.verify import verify

TinyFolder = Callable[[str], Path]


def folders(root: Path) -> list[Path]:
    return StorePaths(root).folders()


def test_a_sound_store_verifies_and_reads_shared_blobs_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    one, _ = stored(tiny_folder("llama"), tmp_path, "one"), stored(tiny_folder("llama"), tmp_path, "two")
    seen: list[tuple[int, int]] = []
    found = verify(folders(tmp_path), lambda done, total: seen.append((done, total)))
    assert found.damage == ()
    assert found.models == ("one", "two")
    assert found.bytes == one.manifest.size_bytes
    assert seen[-1] == (found.bytes, found.bytes)


def test_a_flipped_bit_is_named_by_file_chunk_tensor_and_models(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model = stored(tiny_folder("llama"), tmp_path, "one")
    stored(tiny_folder("llama"), tmp_path, "two")
    entry = next(entry for entry in model.manifest.tensors if entry.name == "layers.2.down.weight")
    blob = writable_blob(model.path)
    flip_bit(blob, entry.offset + 5)
    (damage,) = verify(folders(tmp_path)).damage
    assert (damage.file, damage.chunk, damage.models) == (str(blob), 0, ("one", "two"))
    assert "layers.2.down.weight" in damage.tensors
    assert "does not match its checksum" in damage.reason
    Catalogue(tmp_path).pull(str(tiny_folder("llama")), name="one", dtype="f32", force=True)  # which mends it
    assert verify(folders(tmp_path)).damage == ()


def test_only_the_tensors_of_the_damaged_chunk_are_named(tmp_path: Path) -> None:
    from tiny import save_tiny

    save_tiny("llama", tmp_path / "source", vocab_size=90_000)  # 17 MB of embedding: more than one chunk
    model = stored(tmp_path / "source", tmp_path / "store")
    ((_, partition),) = partition_files(model.path)
    assert len(partition.chunks) == 3
    flip_bit(writable_blob(model.path), partition.chunk_bytes + 7)
    (damage,) = verify([model.path]).damage
    assert damage.chunk == 1
    assert damage.tensors[0] == "embed.weight"
    flip_bit(writable_blob(model.path), 0)
    assert next(found.tensors for found in verify([model.path]).damage) == ("embed.weight",)


def test_missing_truncated_and_altered_files_are_all_reported(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    paths = {name: stored(tiny_folder(name), tmp_path, name).path for name in ("llama", "qwen2", "qwen3", "opt")}
    writable_blob(paths["llama"]).unlink()
    os.truncate(writable_blob(paths["qwen2"]), 4096)
    (paths["qwen3"] / "tokenizer.json").write_text("{}")
    flip_bit(paths["opt"] / "manifest.json", 200)
    damage = {found.models[0]: found for found in verify(folders(tmp_path)).damage}
    assert "missing" in damage["llama"].reason
    assert "truncated: 4096 bytes" in damage["qwen2"].reason
    assert damage["qwen3"].file.endswith("qwen3/tokenizer.json")
    assert damage["opt"].file.endswith("opt/manifest.json")


def test_gc_removes_what_nobody_names_and_nothing_else(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model = stored(tiny_folder("llama"), tmp_path)
    paths = StorePaths(tmp_path)
    orphan = tmp_path / "blobs" / "aa" / ("a" * 64)
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"x" * 5000)
    left = paths.staging / f"convert-{source_key('gone')}"
    left.mkdir()
    (left / "partition-0").write_bytes(b"y" * 300)
    (paths.staging / "removed-m").mkdir()
    alive = paths.staging / f"fetch-{source_key('alive')}"
    alive.mkdir()
    with paths.lock(f"source-{source_key('alive')}"):
        planned = collect(paths, dry_run=True)
        assert orphan.exists()
        done = collect(paths)
    assert planned == done
    assert {removal.kind for removal in done.removed} == {"blob", "staging"}
    assert done.freed_bytes == 5300
    assert not orphan.parent.exists()
    assert [path.name for path in paths.staging.iterdir()] == [alive.name]
    assert verify([model.path]).damage == ()
    collect(paths)
    assert not alive.exists()
    assert collect(paths).removed == ()


def test_gc_keeps_every_blob_while_a_manifest_cannot_be_read(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model = stored(tiny_folder("llama"), tmp_path, "mine")
    ((blob, _),) = partition_files(model.path)
    flip_bit(model.path / "manifest.json", 300)
    done = collect(StorePaths(tmp_path))
    assert done.removed == ()
    assert "dovetail rm mine" in done.notes[0]
    assert blob.exists()
    Catalogue(tmp_path).remove("mine")
    assert [removal.kind for removal in collect(StorePaths(tmp_path)).removed] == ["blob"]


def test_gc_of_a_store_that_is_not_there_does_nothing(tmp_path: Path) -> None:
    assert collect(StorePaths(tmp_path / "nowhere")).removed == ()
    assert not (tmp_path / "nowhere").exists()


def aged(root: Path, ages: dict[str, int]) -> None:
    for name, age in ages.items():
        mark = root / "models" / name / "used"
        mark.touch()
        os.utime(mark, (1_700_000_000 - age,) * 2)


@pytest.fixture
def three(tiny_folder: TinyFolder, tmp_path: Path) -> Path:
    for name in ("old", "middle", "new"):
        family = {"old": "llama", "middle": "qwen2", "new": "qwen3"}[name]
        stored(tiny_folder(family), tmp_path, name).close()
    aged(tmp_path, {"old": 300, "middle": 200, "new": 100})
    return tmp_path


def names(root: Path) -> list[str]:
    return [folder.name for folder in folders(root)]


def size_of(root: Path, *models: str) -> int:
    return sum(Catalogue(root).get(name).size_bytes for name in models)


def test_a_limit_removes_the_least_recently_used_first(three: Path) -> None:
    limit = size_of(three, "middle", "new")
    planned = collect(StorePaths(three), limit, dry_run=True)
    assert names(three) == ["middle", "new", "old"]
    done = collect(StorePaths(three), limit)
    assert [(removal.kind, removal.name) for removal in done.removed] == [("model", "old")]
    assert (done.size_bytes, done.over_limit_bytes) == (limit, 0)
    assert planned.size_bytes == done.size_bytes
    assert names(three) == ["middle", "new"]
    assert len(list((three / "blobs").glob("*/*"))) == 2


def test_pinned_and_open_models_stay_whatever_the_limit(three: Path) -> None:
    from dovetail.store.format.manifest import StoredModel

    paths = StorePaths(three)
    set_pinned(paths, three / "models" / "old", True)
    opened = StoredModel(three / "models" / "middle")
    view = opened.pieces("embed.weight")[0].data
    opened.close()  # as a worker does: views of the mapping live on
    aged(three, {"middle": 200})
    assert use_of(paths, three / "models" / "middle").in_use
    done = collect(paths, 0)
    assert names(three) == ["middle", "old"]
    assert done.over_limit_bytes == size_of(three, "middle", "old")
    assert view[0] >= 0
    del view, opened
    assert not use_of(paths, three / "models" / "middle").in_use
    set_pinned(paths, three / "models" / "old", False)
    collect(paths, 0, keep=["old"])
    assert names(three) == ["old"]


def test_a_model_in_a_pool_is_in_use_while_a_view_of_it_lives(three: Path) -> None:
    import numpy as np

    from dovetail.store.format.manifest import StoredModel

    folder, paths = three / "models" / "old", StorePaths(three)
    ((path, _),) = partition_files(folder)
    memory = np.frombuffer(bytearray(path.read_bytes()), np.uint8)  # as a pool's, it can be told when it is let go
    model = StoredModel(folder, [memoryview(memory)])
    aged(three, {"old": 300})
    view = model.pieces("embed.weight")[0].data
    model.close()
    del model, memory
    assert use_of(paths, folder).in_use
    collect(paths, 0)
    assert names(three) == ["old"]
    assert view.nbytes > 0
    del view
    assert not use_of(paths, folder).in_use


def test_a_model_that_shares_its_blobs_with_one_that_stays_is_spared(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    for name, family in (("twin-a", "llama"), ("other", "qwen2"), ("twin-b", "llama")):
        stored(tiny_folder(family), tmp_path, name).close()
    aged(tmp_path, {"twin-a": 300, "other": 200, "twin-b": 100})
    collect(StorePaths(tmp_path), size_of(tmp_path, "twin-a"))
    assert names(tmp_path) == ["twin-a", "twin-b"]  # removing twin-a would have freed nothing


def test_opening_a_model_counts_as_use_and_a_pin_survives_a_new_pull(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model = stored(tiny_folder("llama"), tmp_path)
    paths = StorePaths(tmp_path)
    aged(tmp_path, {"m": 1000})
    before = use_of(paths, model.path).last_used
    stored(tiny_folder("llama"), tmp_path)
    assert use_of(paths, model.path).last_used > before
    set_pinned(paths, model.path, True)
    stored(tiny_folder("llama"), tmp_path, force=True)
    assert use_of(paths, model.path).pinned
