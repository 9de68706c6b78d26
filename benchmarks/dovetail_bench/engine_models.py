"""The models of `bench engines`, each once in every form that some engine reads: GGUF files, an HF folder, our store.

All forms come from one GGUF file, so that every engine computes the same model: the real SmolLM2 as it is published, or
random weights of a known shape. What was made stays for the next run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dovetail.errors import ConfigError
from dovetail.machine import kept_dtype
from dovetail.modelspec import ModelSpec
from dovetail.store import Catalogue
from dovetail.store.format.manifest import StoredModel, read_card
from dovetail.store.hf.names import hf_pieces
from dovetail.store.sources.fetch import fetch
from dovetail_bench.fleet import DEMO, write_random
from dovetail_bench.safetensors_writer import write_safetensors
from dovetail_bench.shapes import SHAPES, TINY

REAL = "SmolLM2-135M"
RANDOM = {**SHAPES, "tiny": TINY}
MODELS = (REAL, *RANDOM)
HF = "hf"

Quantise = Callable[[Path, Path, str], None]  # from, to, type: llama.cpp's own
Report = Callable[[str], None]


class EngineModels:
    """The models under `folder`; `base` gives the tokenizer of the random ones and is the real one."""

    def __init__(self, folder: Path, base: str = DEMO) -> None:
        self.folder = folder
        self.catalogue = Catalogue(folder / "store")
        self._base = base

    def spec(self, model: str) -> ModelSpec:
        return read_card(self.stored(model, "plain"), model).spec

    def stored(self, model: str, layout: str, report: Report = lambda text: None, dtype: str | None = None) -> Path:
        """Its folder in the store. Without a `dtype` it is kept as a model published in bf16 is kept here."""
        dtype = dtype or kept_dtype("bf16")
        name = f"{model}-{layout}-{dtype}".lower()
        source = self.original(model, report)
        report(f"{model}: the form {layout}, {dtype}, of our store")
        return Path(self.catalogue.pull(str(source), name=name, dtype=dtype, layout=layout).path)

    def original(self, model: str, report: Report = lambda text: None) -> Path:
        """The GGUF file that all else is made of."""
        if model not in MODELS:
            raise ConfigError(f"--models: {model!r} is none of {', '.join(MODELS)}")
        path = self._place(model) / "original.gguf"
        if path.exists():
            return path
        report(f"{model}: {'fetching it' if model == REAL else 'writing random weights'}")
        building = path.with_suffix(".building")
        if model == REAL:
            with fetch(self._base) as fetched:
                shutil.copyfile(fetched.path, building)
        else:
            write_random(self.original(REAL, report), building, spec=RANDOM[model], seed=0)
        return building.replace(path)

    def gguf(self, model: str, kind: str, quantise: Quantise, report: Report = lambda text: None) -> Path:
        """All matrices in one of llama.cpp's types."""
        path = self._place(model) / f"{kind}.gguf"
        if not path.exists():
            source = self.original(model, report)
            report(f"{model}: GGUF in {kind}")
            building = path.with_suffix(".building")
            quantise(source, building, kind)
            building.replace(path)
        return path

    def hf(self, model: str, report: Report = lambda text: None) -> Path:
        """A folder as HF publishes it, without a tokenizer: engines are given tokens."""
        path = self._place(model) / HF
        if not path.exists():
            stored = self.stored(model, "plain", report, "bf16")
            report(f"{model}: an HF folder")
            building = path.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            write_hf(stored, building)
            building.replace(path)
        return path

    def _place(self, model: str) -> Path:
        place = self.folder / model
        place.mkdir(parents=True, exist_ok=True)
        return place


def write_hf(stored: Path, folder: Path) -> None:
    """The tensors of a model in our store, unfused, under transformers' names."""
    checkpoint = StoredModel(stored)
    try:
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in checkpoint.spec.tensors():
            pieces = hf_pieces(checkpoint.spec, name, shape)[0]  # one after the other in the fused tensor
            dtype = checkpoint.pieces(name)[0].dtype
            tensors |= {f"model.{piece.name}": (dtype, piece.shape) for piece in pieces}
        data = (piece.data for name, _ in checkpoint.spec.tensors() for piece in checkpoint.pieces(name))
        write_safetensors(folder / "model.safetensors", tensors, data)
        (folder / "config.json").write_bytes(msgspec.json.encode(hf_config(checkpoint.spec)))
    finally:
        checkpoint.close()


def hf_config(spec: ModelSpec) -> dict[str, Any]:
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    return {
        "architectures": [classes[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
