"""Layouts and partitions of whole models: the engine computes from every form, to the bit where the form keeps bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch
from drive import logits_of, make_executor
from store_builders import flat, stored
from tiny import VOCAB_SIZE, save_tiny
from tiny_gguf import Q, save_tiny_gguf
from tried import tried

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import UnsupportedModel
from dovetail.layouts import BY_ROWS, CELLS, Quantised, coding_of, pack_codes, unpack, unpack_codes
from dovetail.native import levels
from dovetail.node.ports import HostTensor
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.catalogue import _has_form
from dovetail.store.format.arrange import bounds
from dovetail.store.pull import Form, Pull

TinyFolder = Callable[[str], Path]
FAMILIES = ["llama", "llama_bias", "qwen3", "gemma2", "opt", "mixtral"]
# Rows of whole blocks, of every quantised type
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def logits(path: Path, dtype: str = "f32", weights: str = "resident", level: str = "auto") -> torch.Tensor:
    """`resident` fuses what lies apart in either, so that both make the same matrix products."""
    return computed(make_executor(path, dtype=dtype, weights=weights, level=level))


def computed(executor: CpuExecutor) -> torch.Tensor:
    try:
        return torch.stack(logits_of(executor, TOKENS, [7, 8]))
    finally:
        executor.close()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_logits_after_conversion_are_those_of_the_folder_bit_for_bit(
    family: str, dtype: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    model = stored(tiny_folder(family), tmp_path, dtype=dtype)
    expected = logits(tiny_folder(family), dtype)
    assert torch.equal(logits(model.path, dtype), expected)
    assert torch.equal(logits(model.path, dtype, "auto"), expected)  # mapped, as a worker uses it


@pytest.mark.parametrize("kind", [Q.F16, Q.Q8_0])
def test_logits_after_conversion_are_those_of_the_gguf_bit_for_bit(kind: Q, tmp_path: Path) -> None:
    # Rows of whole blocks of 32, as quantised types need.
    save_tiny_gguf("llama", tmp_path / "m.gguf", kind, hidden_size=96, intermediate_size=128)
    model = stored(tmp_path / "m.gguf", tmp_path / "store", layout="auto")
    assert torch.equal(logits(model.path), logits(tmp_path / "m.gguf"))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama_bias"}))  # whose one key/value head cannot be cut
@pytest.mark.parametrize("layout", ["plain", "amx-bf16", "int8", "int4"])
def test_a_model_cut_in_two_is_put_together_again_as_it_was(
    family: str, layout: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    whole = stored(tiny_folder(family), tmp_path, "whole", layout=layout)
    cut = stored(tiny_folder(family), tmp_path, "cut", layout=layout, ranks=2)
    assert len(cut.manifest.partitions) == 2
    for name, shape in whole.spec.tensors():
        pieces = cut.pieces(name)
        assert sum(np.prod(piece.shape) for piece in pieces) == np.prod(shape), name
        both = flat(cut, name), flat(whole, name)
        if layout in CELLS and any(entry.axis == "columns" for entry in cut.manifest.tensors if entry.name == name):
            np.testing.assert_allclose(
                *both, atol=0.2 if layout == "int4" else 0.01
            )  # a share's groups begin elsewhere
        else:
            np.testing.assert_array_equal(*both, err_msg=name)
    if layout == "plain":
        assert torch.equal(logits(cut.path), logits(tiny_folder(family)))


def test_shares_are_what_a_rank_multiplies(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    """Checked against slices of the whole, written out by hand."""
    original = open_checkpoint(tiny_folder("llama"))
    model, spec = stored(tiny_folder("llama"), tmp_path, ranks=2), original.spec

    def whole(name: str) -> Any:
        return flat(original, name).reshape(dict(spec.tensors())[name])

    def share(name: str, rank: int) -> Any:
        tensor = model.share(name, rank)
        return unpack(tensor.layout, tensor.dtype, tensor.shape, tensor.data)

    q, k, v = np.split(whole("layers.1.qkv.weight"), [spec.q_size, spec.q_size + spec.kv_size])
    gate, up = np.split(whole("layers.1.gate_up.weight"), 2)
    for rank in range(2):
        halves = [np.split(part, 2)[rank] for part in (q, k, v)]
        np.testing.assert_array_equal(share("layers.1.qkv.weight", rank), np.concatenate(halves))
        halves = [np.split(part, 2)[rank] for part in (gate, up)]
        np.testing.assert_array_equal(share("layers.1.gate_up.weight", rank), np.concatenate(halves))
        for name in ("layers.1.out.weight", "layers.1.down.weight"):
            np.testing.assert_array_equal(share(name, rank), np.split(whole(name), 2, axis=1)[rank])
        start, stop = bounds(spec.vocab_size, rank, 2)
        np.testing.assert_array_equal(share("lm_head.weight", rank), whole("lm_head.weight")[start:stop])
        np.testing.assert_array_equal(share("final_norm.weight", rank), whole("final_norm.weight"))


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
@pytest.mark.parametrize(("layout", "tolerance"), [("amx-bf16", 0.03), ("int8", 0.15), ("int4", 1.0)])
def test_the_engine_computes_from_packed_weights(
    family: str, layout: str, tolerance: float, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    model = stored(tiny_folder(family), tmp_path, layout=layout)
    kinds = {entry.name: (entry.dtype, entry.layout) for entry in model.manifest.tensors}
    assert kinds["layers.0.attn_norm.weight"] == ("f32", "plain")
    assert kinds["layers.0.out.weight"][1] == CELLS.get(layout, layout)
    executor = make_executor(model.path, level="torch")
    assert 0 < executor.copied_bytes < executor.weight_bytes  # what is plain stays in place
    executor.close()
    unpacked = stored(model.path, tmp_path / "unpacked")  # the same values, written out plainly
    assert torch.equal(logits(model.path, level="torch"), logits(unpacked.path, level="torch"))
    if family == "qwen3":  # a router may choose other experts after rounding
        error = (logits(model.path) - logits(tiny_folder(family))).abs().max()
        assert 0 < error < tolerance


@pytest.mark.parametrize("level", tried(levels()[1:]))
@pytest.mark.parametrize("family", ["qwen3", "llama_bias", "opt"])  # tied; untied; with biases and learned positions
@pytest.mark.parametrize("layout", CELLS)
def test_quantised_weights_are_multiplied_where_they_lie(
    layout: str, family: str, level: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    model = stored(tiny_folder(family), tmp_path, layout=layout)
    head = "embed.weight" if model.spec.tied_embeddings else "lm_head.weight"
    assert next(entry.layout for entry in model.manifest.tensors if entry.name == head) == "int8-g32"
    executor = make_executor(model.path, level=level)
    biases = sum(np.prod(shape) for name, shape in model.spec.tensors() if name.endswith(".bias"))
    assert executor.copied_bytes <= 4 * biases
    executor.close()
    exact = logits(model.path, level="torch")  # of the same weights, activations in float32
    error = (logits(model.path, level=level) - exact).norm() / exact.norm()
    assert 0 < error < 0.03


@pytest.mark.parametrize("level", tried(levels()[1:]))
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", CELLS)
def test_quantised_experts_are_multiplied_where_they_lie(layout: str, family: str, level: str, tmp_path: Path) -> None:
    """Every token takes every expert, or rounding might choose others."""
    count = {"mixtral": 5, "qwen3_moe": 6}[family]
    save_tiny(family, tmp_path / "m", num_experts_per_tok=count)
    model = stored(tmp_path / "m", tmp_path / "store", layout=layout)
    executor = make_executor(model.path, level=level)
    assert (executor.copied_bytes, executor.level) == (0, level)
    executor.close()
    exact = logits(model.path, level="torch")
    error = (logits(model.path, level=level) - exact).norm() / exact.norm()
    assert 0 < error < 0.03


class ByRows:
    """A checkpoint whose quantised matrices lie as earlier releases wrote them: row by row, or in cells."""

    in_place = True

    def __init__(self, model: Any, layout: str, in_cells: bool) -> None:
        self.spec, self._model, self._layout, self._in_cells = model.spec, model, layout, in_cells

    def pieces(self, name: str) -> list[HostTensor]:
        (piece,) = self._model.pieces(name)
        if piece.layout not in CELLS.values():
            return [piece]
        layout = BY_ROWS[self._layout]
        codes, scales = unpack_codes(piece.layout, piece.shape, piece.data)
        if self._layout == "int8":
            scales = (scales[0].astype(np.float32).max(axis=1, keepdims=True),)
        if self._in_cells:
            old = pack_codes(layout, piece.shape, Quantised(codes, scales))
            return [HostTensor(piece.dtype, piece.shape, memoryview(old), layout)]
        columns = piece.shape[1]
        packed = coding_of(layout, columns).pack(codes)
        data = packed[:, :columns] if self._layout == "int8" else packed ^ np.uint8(0x88)
        flat = np.ascontiguousarray(data).reshape(-1)
        old = np.concatenate([flat, np.zeros(-flat.size % 64, np.uint8), scales[0].reshape(-1).view(np.uint8)])
        return [HostTensor(piece.dtype, piece.shape, memoryview(old), self._layout)]

    def close(self) -> None:
        self._model.close()


@pytest.mark.parametrize("level", tried(levels()))
@pytest.mark.parametrize("layout", CELLS)
def test_weights_of_an_earlier_release_give_the_same_numbers(
    layout: str, level: str, tiny_folder: TinyFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = stored(tiny_folder("qwen3"), tmp_path, layout=layout)
    config = ExecutorConfig(kv_bytes=1 << 24, block_size=4, dtype="f32", level=level)
    found = []
    for in_cells in (False, True):
        old = CpuExecutor(ByRows(open_checkpoint(model.path), layout, in_cells), config)
        old.resize(old.max_blocks)
        found.append(computed(old))
        assert ("pull the model again" in caplog.text) == (level != "torch")
    assert torch.equal(*found)


@pytest.mark.parametrize("old", ["int8", "int8-cells"])
def test_a_pull_of_a_model_of_an_earlier_release_writes_it_anew(
    old: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    catalogue, source = Catalogue(tmp_path), str(tiny_folder("qwen3"))
    catalogue.pull(source, layout="int8", dtype="f32")
    (entry,) = catalogue.entries()
    form = Pull(catalogue.paths, source, None, Form("f32", "int8"))
    assert _has_form(entry, form)
    tensors = tuple(
        msgspec.structs.replace(tensor, layout={"int8-g32": old}.get(tensor.layout, tensor.layout))
        for tensor in entry.manifest.tensors
    )
    earlier = entry._replace(manifest=msgspec.structs.replace(entry.manifest, tensors=tensors))
    assert not _has_form(earlier, form)


def test_a_stored_model_can_be_pulled_into_another_form(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tiles = stored(tiny_folder("llama"), tmp_path / "a", layout="amx-bf16", dtype="bf16", ranks=2)
    plain = stored(tiles.path, tmp_path / "b", dtype="bf16")
    direct = stored(tiny_folder("llama"), tmp_path / "c", dtype="bf16")
    assert plain.manifest.partitions == direct.manifest.partitions


@pytest.mark.parametrize(
    ("ranks", "text"), [(3, "2 key/value heads cannot be shared by 3"), (0, "over 0 devices"), (2000, "over 2000")]
)
def test_a_cut_that_does_not_fit_is_refused(ranks: int, text: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        Catalogue(tmp_path).pull(str(tiny_folder("llama")), ranks=ranks)
    assert Catalogue(tmp_path).entries() == []


def test_equal_weights_are_stored_once(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    one, two = stored(tiny_folder("llama"), tmp_path, "one"), stored(tiny_folder("llama"), tmp_path, "two")
    other = stored(tiny_folder("llama"), tmp_path, "other", dtype="bf16")
    assert one.manifest.partitions == two.manifest.partitions != other.manifest.partitions
    assert len(list((tmp_path / "blobs").glob("*/*"))) == 2
    catalogue = Catalogue(tmp_path)
    assert catalogue.remove("one") < one.manifest.size_bytes  # the other still needs the blob
    np.testing.assert_array_equal(flat(catalogue_model(catalogue, "two"), "embed.weight"), flat(two, "embed.weight"))
    assert catalogue.remove("two") > one.manifest.size_bytes
    assert len(list((tmp_path / "blobs").glob("*/*"))) == 1


def catalogue_model(catalogue: Catalogue, name: str) -> Any:
    return open_checkpoint(catalogue.get(name).path)


BLOCKS = {
    Q.Q8_0: "int8-g32",
    Q.Q5_0: "int8-g32",
    Q.Q5_1: "int8-g32-min",
    Q.Q4_0: "int4-g32",
    Q.Q4_1: "int4-g32-min",
    Q.IQ4_NL: "int8-g32",
    Q.Q3_K: "int8-k16",
    Q.Q4_K: "int4-k32-min",
    Q.Q5_K: "int8-k32-min",
    Q.Q6_K: "int8-k16",
    Q.TQ1_0: "int4-g32",
    Q.TQ2_0: "int4-g32",
}


def blocks(kind: Q, rows: int, columns: int, seed: int = 0) -> Any:
    """Random blocks of a type: any bits, with scales that are small numbers."""
    size, length = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // size, length), np.uint8)
    halves = {Q.Q6_K: [208], Q.Q3_K: [108], Q.TQ1_0: [52], Q.TQ2_0: [64]}
    for at in halves.get(kind, [0, 2] if "min" in BLOCKS[kind] else [0]):
        raw[:, :, at + 1] = raw[:, :, at + 1] & 0x83 | (0x08 if "-k" in BLOCKS[kind] else 0x14)  # 2⁻¹³, 2⁻¹⁰
    return raw.reshape(rows, -1)


def save_blocks(family: str, path: Path, kind: Q, mixed: Mapping[str, Q] | None = None) -> None:
    """A model whose matrices are random blocks of a type, some of another (by a part of their names)."""
    save_tiny_gguf(family, path, Q.F32, **WHOLE_BLOCKS)
    replaced = {}
    for number, tensor in enumerate(gguf.GGUFReader(path).tensors):
        if len(tensor.shape) > 1 and "gate_inp" not in tensor.name:
            own = next((other for part, other in (mixed or {}).items() if part in tensor.name), kind)
            columns, *rest = (int(size) for size in tensor.shape)
            raw = blocks(own, int(np.prod(rest)), columns, number)
            replaced[tensor.name] = (raw.reshape(*reversed(rest), -1), own)
    save_tiny_gguf(family, path, Q.F32, replace=replaced, **WHOLE_BLOCKS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda q: q.name)
def test_blocks_of_a_gguf_are_kept_to_the_bit(kind: Q, family: str, ranks: int, tmp_path: Path) -> None:
    """llama.cpp's order of rows undone, matrices fused, cut for devices: still the numbers that the file stands for."""
    save_blocks(family, tmp_path / "m.gguf", kind)
    exact = stored(tmp_path / "m.gguf", tmp_path / "exact")  # dequantised, in float32
    model = stored(tmp_path / "m.gguf", tmp_path / "store", layout="auto", ranks=ranks)
    assert model.manifest.layout == "gguf"
    layouts = {entry.name: entry.layout for entry in model.manifest.tensors}
    for name, _ in model.spec.tensors():
        is_matrix = name.endswith(".weight") and "norm" not in name and "router" not in name
        axes = {entry.axis for entry in model.manifest.tensors if entry.name == name}
        if "-k" in BLOCKS[kind] and ranks > 1 and axes == {"columns"}:
            assert layouts[name] == "int8-g32"  # 256 columns cannot be cut in two
            continue
        assert layouts[name] == (BLOCKS[kind] if is_matrix else "plain"), name
        np.testing.assert_array_equal(flat(model, name), flat(exact, name), err_msg=name)
    again = stored(model.path, tmp_path / "again", layout="auto", ranks=1)
    if ranks == 1:
        assert again.manifest.partitions == model.manifest.partitions


@pytest.mark.parametrize("level", tried(levels()))
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_matrix_of_several_types_is_kept_in_pieces(family: str, level: str, tmp_path: Path) -> None:
    """As files of the type Q4_K_M are: q4_K, with q6_K for the values and here and there elsewhere."""
    mixed = {"attn_v": Q.Q6_K, "ffn_up": Q.Q5_0, "ffn_down": Q.Q6_K, "token_embd": Q.Q4_1, "output.weight": Q.Q6_K}
    save_blocks(family, tmp_path / "m.gguf", Q.Q4_K, mixed)
    exact = stored(tmp_path / "m.gguf", tmp_path / "exact")
    model = stored(tmp_path / "m.gguf", tmp_path / "store", layout="auto")
    found = [entry.layout for entry in model.manifest.tensors if entry.name == "layers.0.qkv.weight"]
    assert found == ["int4-k32-min", "int4-k32-min", "int8-k16"]
    for name, _ in model.spec.tensors():
        np.testing.assert_array_equal(flat(model, name), flat(exact, name), err_msg=name)
    again = stored(model.path, tmp_path / "again", layout="auto")
    assert again.manifest.partitions == model.manifest.partitions
    executor = make_executor(model.path, level=level)
    assert (executor.copied_bytes == 0) == (level != "torch")
    executor.close()
    wanted = logits(exact.path, level="torch")
    difference = logits(model.path, level=level) - wanted
    if level == "torch" or family == "llama":  # a router may choose other experts after rounding
        assert difference.norm() / wanted.norm() < (1e-5 if level == "torch" else 0.03)


def test_a_type_without_a_layout_of_its_own_gets_eight_bits(tmp_path: Path) -> None:
    raw = np.zeros((256, gguf.GGML_QUANT_SIZES[Q.Q2_K][1]), np.uint8)
    raw[:, :80] = np.random.default_rng(0).integers(0, 256, (256, 80), np.uint8)
    raw[:, 81:84:2] = 0x18
    save_tiny_gguf(
        "llama", tmp_path / "m.gguf", Q.Q8_0, replace={"blk.1.ffn_down.weight": (raw, Q.Q2_K)}, **WHOLE_BLOCKS
    )
    exact = stored(tmp_path / "m.gguf", tmp_path / "exact")
    model = stored(tmp_path / "m.gguf", tmp_path / "store", layout="auto")
    assert {entry.layout for entry in model.manifest.tensors} == {"plain", "int8-g32"}
    wanted = flat(exact, "layers.1.down.weight")
    np.testing.assert_allclose(flat(model, "layers.1.down.weight"), wanted, atol=np.abs(wanted).max() / 250)


@pytest.mark.parametrize(("kind", "layout"), [(Q.F16, "plain"), (Q.Q8_0, "gguf"), (Q.Q4_0, "gguf")])
def test_what_comes_quantised_is_kept_as_it_comes(kind: Q, layout: str, tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf", kind, **WHOLE_BLOCKS)
    model = stored(tmp_path / "m.gguf", tmp_path / "store", layout="auto")
    assert model.manifest.layout == layout
    again = stored(model.path, tmp_path / "again", layout="auto")
    assert again.manifest.layout == layout
    assert torch.equal(logits(model.path), logits(again.path))


def test_what_has_no_blocks_cannot_be_kept_in_them(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no GGUF blocks"):
        stored(tiny_folder("llama"), tmp_path, layout="gguf")


@pytest.mark.parametrize("level", tried(levels()))
def test_a_four_bit_gguf_gives_the_logits_of_its_own_weights(level: str, tmp_path: Path) -> None:
    """Its head is a matrix that eight bits hold exactly, so that all that is left is the rounding of activations."""
    head = np.random.default_rng(1).integers(-127, 128, (VOCAB_SIZE, 256)).astype(np.float32)
    head[:, ::32] = 127
    save_tiny_gguf("llama", tmp_path / "m.gguf", Q.Q4_0, replace={"output.weight": (head, Q.F32)}, **WHOLE_BLOCKS)
    exact = logits(stored(tmp_path / "m.gguf", tmp_path / "exact").path, level="torch")
    found = logits(stored(tmp_path / "m.gguf", tmp_path / "store", layout="int4").path, level=level)
    if level == "torch":
        assert torch.equal(found, exact)
    assert (found - exact).norm() / exact.norm() < 0.03
