"""Our own folder: what goes in comes out bit for bit, types are rounded as IEEE says, and a crash leaves no half."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY_CONFIGS

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import Checkpoint, HostTensor
from dovetail.store.arrays import as_array, bfloat16_bits, convert, from_array, to_float32
from dovetail.store.canonical import CanonicalFolder, read_card, recover, write_canonical
from dovetail.store.checkpoints import ModelFiles, open_checkpoint

TinyFolder = Callable[[str], Path]


def stored(checkpoint: ModelFiles, folder: Path, dtype: str = "f32", **options: Any) -> CanonicalFolder:
    tokens, tokenizer = checkpoint.tokenizer()
    write_canonical(checkpoint, folder, tokens=tokens, tokenizer_json=tokenizer, dtype=dtype, source="here", **options)
    return CanonicalFolder(folder)


def flat(checkpoint: Checkpoint, name: str) -> Any:
    return np.concatenate([as_array(piece).reshape(-1) for piece in checkpoint.pieces(name)])


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_a_stored_model_is_the_original_bit_for_bit(name: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    original = open_checkpoint(tiny_folder(name))
    copy = stored(original, tmp_path / "m")
    assert copy.spec == original.spec
    assert copy.in_place
    for key, shape in original.spec.tensors():
        (piece,) = copy.pieces(key)
        assert (piece.shape, piece.dtype) == (shape, "f32")
        np.testing.assert_array_equal(as_array(piece).reshape(-1), flat(original, key), err_msg=key)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_matrices_are_rounded_as_torch_rounds_and_norms_stay_float32(
    dtype: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    import torch

    original = open_checkpoint(tiny_folder("gemma2"))
    copy = stored(original, tmp_path / "m", dtype)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    for key, _ in original.spec.tensors():
        (piece,) = copy.pieces(key)
        assert piece.dtype == ("f32" if "norm" in key else dtype)
        values = torch.from_numpy(flat(original, key))
        expected = values if "norm" in key else values.to(kind).float()
        np.testing.assert_array_equal(to_float32(piece).reshape(-1), expected.numpy())


def test_tensors_are_aligned_and_readable_by_the_safetensors_package(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    original = open_checkpoint(tiny_folder("qwen2"))
    copy = stored(original, tmp_path / "m", "f16")
    content = (tmp_path / "m" / "weights.safetensors").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0
    for key, _ in original.spec.tensors():
        (piece,) = copy.pieces(key)
        array = np.frombuffer(piece.data, np.uint8)
        assert array.ctypes.data % (4 if piece.dtype == "f32" else 2) == 0
    loaded = load_file(tmp_path / "m" / "weights.safetensors")
    assert set(loaded) == {key for key, _ in original.spec.tensors()}


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
    original = open_checkpoint(tiny_folder("llama"))
    stored(original, tmp_path / "m", progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (4 * original.spec.num_parameters(),) * 2


class Failing:
    """A checkpoint whose disk gives out half-way."""

    def __init__(self, inner: ModelFiles) -> None:
        self.inner = inner
        self.spec: ModelSpec = inner.spec
        self.in_place = False

    def pieces(self, name: str) -> Sequence[HostTensor]:
        if name.startswith("layers.1."):
            raise OSError("disk on fire")
        return self.inner.pieces(name)

    def tokenizer(self) -> Any:
        return self.inner.tokenizer()

    def close(self) -> None:
        self.inner.close()


def test_a_write_that_fails_leaves_the_old_model_and_no_rubbish(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    good = open_checkpoint(tiny_folder("llama"))
    before = flat(stored(good, folder), "layers.1.qkv.weight")
    with pytest.raises(OSError, match="disk on fire"):
        stored(Failing(good), folder)
    np.testing.assert_array_equal(flat(CanonicalFolder(folder), "layers.1.qkv.weight"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_replacing_leaves_an_open_reader_its_pages(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    first = stored(open_checkpoint(tiny_folder("llama")), tmp_path / "m")
    before = flat(first, "embed.weight").copy()
    stored(open_checkpoint(tiny_folder("llama_bias")), tmp_path / "m")
    np.testing.assert_array_equal(flat(first, "embed.weight"), before)
    assert CanonicalFolder(tmp_path / "m").spec.mlp_bias


def test_a_crash_between_the_two_renames_is_mended(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    stored(open_checkpoint(tiny_folder("llama")), folder)
    folder.rename(tmp_path / ".replaced-m-123")
    recover(folder)
    assert CanonicalFolder(folder).spec.family == "llama"


def test_the_card_has_everything_back(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    original = open_checkpoint(tiny_folder("qwen3"))
    stored(original, tmp_path / "m")
    card = read_card(tmp_path / "m", "m")
    tokens, tokenizer = original.tokenizer()
    assert (card.chat_template, card.eos_token_ids) == (tokens.chat_template, tokens.eos_token_ids)
    assert Path(card.tokenizer_file).read_text() == tokenizer
    assert (card.spec, card.dtype, card.source) == (original.spec, "f32", "here")
    assert card.created > 0


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"version": 99}, UnsupportedModel, "version 99, this release reads 1"),
        ({"format": "other"}, DamagedCheckpoint, "format 'other'"),
        ({"spec": {}}, DamagedCheckpoint, "missing required field"),
    ],
)
def test_a_card_of_another_version_is_refused(
    change: dict[str, Any], kind: type[CheckpointError], text: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    stored(open_checkpoint(tiny_folder("llama")), tmp_path / "m")
    path = tmp_path / "m" / "dovetail.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(kind, match=text):
        open_checkpoint(tmp_path / "m")


def test_truncated_weights_are_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    stored(open_checkpoint(tiny_folder("llama")), tmp_path / "m")
    weights = tmp_path / "m" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(DamagedCheckpoint, match="truncated"):
        open_checkpoint(tmp_path / "m")
