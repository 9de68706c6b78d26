"""The format: what goes in comes out bit for bit, tensors lie where the text says, and a crash leaves no half."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_builders import alter_manifest, flat, flip_bit, stored, writable_blob
from tiny import TINY_CONFIGS

from dovetail.errors import CheckpointError, DamagedCheckpoint, SourceError, UnsupportedModel
from dovetail.layouts import bfloat16_bits
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.store import Catalogue, open_checkpoint, pull
from dovetail.store.checkpoints import ModelFiles
from dovetail.store.format.arrays import as_array, convert, from_array, to_float32
from dovetail.store.format.manifest import (
    CHUNK_BYTES,
    PAGE_BYTES,
    StoredModel,
    partition_files,
    read_card,
    read_manifest,
)
from dovetail.store.publish import recover

TinyFolder = Callable[[str], Path]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_a_stored_model_is_the_original_bit_for_bit(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    original = open_checkpoint(tiny_folder(name))
    copy = stored(tiny_folder(name), tmp_path)
    assert copy.spec == original.spec
    assert copy.in_place
    for key, shape in original.spec.tensors():
        (piece,) = copy.pieces(key)
        assert (piece.shape, piece.dtype, piece.layout) == (shape, "f32", "plain")
        np.testing.assert_array_equal(as_array(piece).reshape(-1), flat(original, key), err_msg=key)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_matrices_are_rounded_as_torch_rounds_and_norms_stay_float32(
    dtype: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    import torch

    original = open_checkpoint(tiny_folder("gemma2"))
    copy = stored(tiny_folder("gemma2"), tmp_path, dtype=dtype)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    for key, _ in original.spec.tensors():
        (piece,) = copy.pieces(key)
        assert piece.dtype == ("f32" if "norm" in key else dtype)
        values = torch.from_numpy(flat(original, key))
        expected = values if "norm" in key else values.to(kind).float()
        np.testing.assert_array_equal(to_float32(piece).reshape(-1), expected.numpy())


def test_partitions_are_laid_out_as_specified(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    model = stored(tiny_folder("qwen2"), tmp_path, dtype="f16")
    ((path, partition),) = partition_files(model.path)
    assert path == tmp_path / "blobs" / partition.digest[:2] / partition.digest
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert path.stat().st_size == partition.size
    assert partition.size % PAGE_BYTES == 0
    entries = model.manifest.tensors
    assert [entry.name for entry in entries] == [name for name, _ in model.spec.tensors()]  # order of use
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)
    assert all(entry.offset % 64 == 0 for entry in entries)
    starts = {entry.name: entry.offset for entry in entries}
    assert all(starts[f"layers.{layer}.attn_norm.weight"] % PAGE_BYTES == 0 for layer in range(model.spec.num_layers))
    content, entry = path.read_bytes(), next(entry for entry in entries if entry.name == "layers.1.down.weight")
    expected = convert(open_checkpoint(tiny_folder("qwen2")).pieces(entry.name)[0], "f16").data
    assert content[entry.offset : entry.offset + entry.size] == bytes(expected)


def test_tensors_can_be_views_of_memory_that_somebody_else_filled(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    mapped = stored(tiny_folder("llama"), tmp_path)
    buffers = [memoryview(bytearray(path.read_bytes())) for path, _ in partition_files(mapped.path)]
    model = StoredModel(mapped.path, buffers)
    (piece,) = model.pieces("layers.0.qkv.weight")
    assert piece.data.readonly
    assert np.shares_memory(as_array(piece), np.frombuffer(buffers[0], np.uint8))
    for name, _ in model.spec.tensors():
        np.testing.assert_array_equal(flat(model, name), flat(mapped, name))
    with pytest.raises(DamagedCheckpoint, match="bytes in memory, the partition has"):
        StoredModel(mapped.path, [buffers[0][:-1]])
    with pytest.raises(DamagedCheckpoint, match="0 buffers for 1 partitions"):
        StoredModel(mapped.path, [])


def test_chunks_cover_the_file_and_the_digest_follows_from_them(tmp_path: Path) -> None:
    from dovetail.store.format.partition_writer import PartitionWriter

    data = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES + 3 * PAGE_BYTES, dtype=np.uint8)
    writer = PartitionWriter(tmp_path / "whole")
    writer.write(data)
    whole = writer.finish(len(data))
    assert len(whole.chunks) == 2
    writer = PartitionWriter(tmp_path / "parts")
    for start in range(0, len(data), 1_000_003):
        writer.write(data[start : start + 1_000_003])
        if start < CHUNK_BYTES <= start + 1_000_003:  # go on as after an interruption, with rubbish at the end
            writer.sync()
            writer.close()
            with (tmp_path / "parts").open("ab") as file:
                file.write(b"torn")
            writer = PartitionWriter(tmp_path / "parts", writer.position, writer.chunks)
    assert writer.finish(len(data)) == whole
    assert (tmp_path / "parts").read_bytes() == data.tobytes()


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    import torch

    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-45, 65504.0]
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = np.concatenate([np.array(special, np.float32), bits.view(np.float32)])
    ours = bfloat16_bits(values)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    number = ~np.isnan(values)
    np.testing.assert_array_equal(ours[number], theirs[number])
    back = to_float32(from_array(ours, "bf16"))
    assert np.isnan(back[~number]).all()
    # The cases that rounding carelessly turns into infinity or zero.
    evil = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32).view(np.float32)
    assert np.isnan(to_float32(from_array(bfloat16_bits(evil), "bf16"))).all()


def test_converting_to_the_same_type_copies_nothing() -> None:
    tensor = from_array(np.arange(4, dtype=np.float16))
    assert convert(tensor, "f16") is tensor
    assert convert(tensor, "f32").dtype == "f32"


def test_progress_counts_every_byte_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    copy = stored(tiny_folder("llama"), tmp_path, progress=lambda _, done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (copy.manifest.size_bytes,) * 2


class Failing:
    """A checkpoint whose disk gives out half-way."""

    def __init__(self, inner: ModelFiles) -> None:
        self.inner = inner
        self.spec: ModelSpec = inner.spec
        self.dtype = inner.dtype
        self.in_place = False

    def pieces(self, name: str) -> Sequence[HostTensor]:
        if name.startswith("layers.1."):
            raise OSError("disk on fire")
        return self.inner.pieces(name)

    def tokenizer(self) -> Any:
        return self.inner.tokenizer()

    def release(self) -> None:
        self.inner.release()

    def close(self) -> None:
        self.inner.close()


def test_a_write_that_fails_leaves_the_old_model(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored(tiny_folder("llama"), tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if "tmp" not in path.parts[len(tmp_path.parts) :])
    monkeypatch.setattr(pull, "open_checkpoint", lambda path: Failing(open_checkpoint(path)))
    with pytest.raises(SourceError, match="disk on fire"):
        stored(tiny_folder("llama_bias"), tmp_path)
    after = StoredModel(before.path)
    assert after.manifest == before.manifest
    np.testing.assert_array_equal(flat(after, "layers.1.qkv.weight"), flat(before, "layers.1.qkv.weight"))
    left = sorted(path for path in tmp_path.rglob("*") if "tmp" not in path.parts[len(tmp_path.parts) :])
    assert [path for path in left if "locks" not in path.parts] == [path for path in files if "locks" not in path.parts]


def test_replacing_leaves_an_open_reader_its_pages(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    first = stored(tiny_folder("llama"), tmp_path)
    before = flat(first, "embed.weight").copy()
    stored(tiny_folder("llama_bias"), tmp_path)
    np.testing.assert_array_equal(flat(first, "embed.weight"), before)
    assert StoredModel(tmp_path / "models" / "m").spec.mlp_bias


def test_a_crash_between_the_two_renames_is_mended(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = stored(tiny_folder("llama"), tmp_path).path
    folder.rename(folder.with_name(".replaced-m"))
    assert Catalogue(tmp_path).get("m").spec.family == "llama"
    recover(Catalogue(tmp_path).paths, folder)
    assert StoredModel(folder).spec.family == "llama"


def test_the_card_has_everything_back(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    original = open_checkpoint(tiny_folder("qwen3"))
    folder = stored(tiny_folder("qwen3"), tmp_path).path
    card = read_card(folder, "m")
    tokens, tokenizer = original.tokenizer()
    assert (card.chat_template, card.eos_token_ids) == (tokens.chat_template, tokens.eos_token_ids)
    assert Path(card.tokenizer_file).read_text() == tokenizer
    assert (card.spec, card.dtype, card.source) == (original.spec, "f32", str(tiny_folder("qwen3")))
    assert card.created > 0


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"version": 99}, UnsupportedModel, "version 99, this release reads 2"),
        ({"format": "other"}, DamagedCheckpoint, "format 'other'"),
        ({"spec": {}}, DamagedCheckpoint, "missing required field"),
        ({"spec": None}, DamagedCheckpoint, "kind model, but without the record of one"),
        ({"kind": "adapter"}, DamagedCheckpoint, "kind adapter, but without the record of one"),
        ({"partitions": []}, DamagedCheckpoint, "0 partitions"),
        ({"files": {"../../etc/passwd": "0" * 64}}, DamagedCheckpoint, "is not a file of this format"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    change: dict[str, Any], kind: type[CheckpointError], text: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = stored(tiny_folder("llama"), tmp_path).path
    alter_manifest(folder, lambda content: content.update(change))
    with pytest.raises(kind, match=text) as caught:
        open_checkpoint(folder)
    assert str(folder / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"offset": 2**40}, "outside its partition"),
        ({"offset": 4097}, "is not a multiple of 64"),
        ({"offset": -64}, "tensors"),
        ({"offset": 0}, "overlap"),
        ({"size": 64}, "follow from shape, type and layout"),
        ({"dtype": "f16"}, "follow from shape, type and layout"),
        ({"dtype": "object"}, "object in layout plain is not known"),
        ({"layout": "pickle"}, "in layout pickle is not known"),
        ({"shape": [2**40, 2**40]}, "follow from shape, type and layout"),
        ({"shape": [0, 48]}, "shape [0, 48]"),
        ({"shape": [-1, -1]}, "tensors"),
        ({"shape": [88, 48]}, "the spec asks for"),
        ({"shape": []}, "shape []"),
        ({"partition": 1}, "partition 1 of 1"),
        ({"name": "layers.9.down.weight"}, "tensor layers.1.down.weight is missing"),
        ({"name": "layers.1.qkv.weight"}, "twice in partition 0"),
        ({"axis": "rows", "sections": [1]}, "do not add up"),
    ],
)
def test_an_entry_that_points_elsewhere_is_refused(
    change: dict[str, Any], text: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = stored(tiny_folder("llama"), tmp_path).path

    def apply(content: dict[str, Any]) -> None:
        next(entry for entry in content["tensors"] if entry["name"] == "layers.1.down.weight").update(change)

    alter_manifest(folder, apply)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert text in str(caught.value)
    assert str(folder / "manifest.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": 4095}, "are not multiples of 4096"),
        ({"chunk_bytes": 0}, "are not multiples of 4096"),
        ({"chunks": []}, "0 checksums"),
        ({"chunks": ["../../../../etc/passwd"]}, "not 64 hexadecimal digits"),
        ({"digest": "/etc/passwd"}, "not 64 hexadecimal digits"),
        ({"digest": "a" * 64}, "does not follow from the checksums"),
    ],
)
def test_a_partition_that_points_elsewhere_is_refused(
    change: dict[str, Any], text: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder = stored(tiny_folder("llama"), tmp_path).path
    alter_manifest(folder, lambda content: content["partitions"][0].update(change))
    with pytest.raises(DamagedCheckpoint, match=text):
        open_checkpoint(folder)


def test_damaged_files_are_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = stored(tiny_folder("llama"), tmp_path).path
    blob = writable_blob(folder)
    content = blob.read_bytes()
    blob.write_bytes(content[:-10])
    with pytest.raises(DamagedCheckpoint, match=rf"{blob}: truncated: {len(content) - 10} bytes"):
        open_checkpoint(folder)
    blob.write_bytes(content + b"x")
    with pytest.raises(DamagedCheckpoint, match=f"{blob}: longer"):
        open_checkpoint(folder)
    blob.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{blob}: missing"):
        open_checkpoint(folder)
    (tmp_path / "elsewhere").write_bytes(content)
    blob.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match=f"{blob}: a symbolic link"):
        open_checkpoint(folder)
    blob.unlink()
    blob.parent.rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / blob.name)
    blob.parent.symlink_to(tmp_path)
    with pytest.raises(DamagedCheckpoint, match=f"{blob.parent}: a symbolic link"):
        open_checkpoint(folder)


def test_any_flipped_bit_of_the_manifest_is_noticed(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = stored(tiny_folder("llama"), tmp_path).path
    manifest = folder / "manifest.json"
    content = manifest.read_bytes()
    for position in np.random.default_rng(3).integers(0, len(content), 60):
        manifest.write_bytes(content)
        flip_bit(manifest, int(position))
        with pytest.raises(CheckpointError, match=str(manifest)):
            read_manifest(folder)
    manifest.write_bytes(content[: len(content) // 2])
    with pytest.raises(DamagedCheckpoint, match=str(manifest)):
        read_manifest(folder)
    os.truncate(manifest, 0)
    with pytest.raises(DamagedCheckpoint, match=str(manifest)):
        read_manifest(folder)
    manifest.unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{manifest}: missing"):
        read_manifest(folder)
