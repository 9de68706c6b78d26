"""Encoders of Hugging Face folders: their `config.json` as a ModelSpec, their tensors' names, and how their vectors are
made, which sentence-transformers keeps in files of its own (modules.json, 1_Pooling/config.json)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import EncoderSpec, ModelSpec, ScoreSpec
from dovetail.store.files import read_json, read_json_list
from dovetail.store.format.tokenizer_files import separator_of
from dovetail.store.hf.names import Piece
from dovetail.store.hf.rope import parse_rope
from dovetail.store.hf.shapes import activation, num_layers, windows_of_types
from dovetail.store.keys import Keys

Pooling = Literal["cls", "mean", "last"]

ENCODER_PREFIXES = ("", "bert.", "roberta.", "model.")
MODULES = "modules.json"
_FLAG = "pooling_mode_"
_POOLINGS: dict[str, Pooling] = {
    "cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean", "lasttoken": "last",
}  # fmt: skip
_BERT_LAYER = {
    "attn_norm": "attention.output.LayerNorm",
    "out": "attention.output.dense",
    "mlp_norm": "output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
}
_SCORES = {  # their names have no prefix, but for BERT's pooler
    "bert": {"score.dense": "bert.pooler.dense", "score.out": "classifier"},
    "xlm_roberta": {"score.dense": "classifier.dense", "score.out": "classifier.out_proj"},
    "modernbert": {"score.dense": "head.dense", "score.norm": "head.norm", "score.out": "classifier"},
}
_BERT_TOP = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
}
_MODERN_LAYER = {
    "attn_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "out": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "down": "mlp.Wo",
}
_MODERN_TOP = {"embed": "embeddings.tok_embeddings", "embed_norm": "embeddings.norm", "final_norm": "final_norm"}


def _bert(keys: Keys) -> ModelSpec:
    return ModelSpec(family="bert", **_learned(keys, offset=0))


def _roberta(keys: Keys) -> ModelSpec:
    """Positions begin behind the one of padding."""
    return ModelSpec(family="xlm_roberta", **_learned(keys, offset=keys.whole("pad_token_id") + 1))


def _learned(keys: Keys, offset: int) -> dict[str, Any]:
    keys.require("position_embedding_type", "absolute")
    keys.require("is_decoder", False)
    keys.require("add_cross_attention", False)
    return {
        **_shape(keys),
        "context_length": keys.integer("max_position_embeddings") - offset,
        "norm_eps": keys.number("layer_norm_eps"),
        "activation": activation(keys, "hidden_act"),
        "gated_mlp": False,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "position_offset": offset,
        "encoder": EncoderSpec(
            token_types=keys.integer("type_vocab_size"), norm_after=True, score=_score(keys, ScoreSpec())
        ),
    }


def _modernbert(keys: Keys) -> ModelSpec:
    layers, period = num_layers(keys), keys.integer("global_attn_every_n_layers")
    types = keys.sequence("layer_types") or [
        "sliding_attention" if layer % period else "full_attention" for layer in range(layers)
    ]
    parameters = Keys(keys.mapping("rope_parameters"), f"{keys.origin}: rope_parameters")
    full, local = parameters.mapping("full_attention"), parameters.mapping("sliding_attention")
    scaling, bias = keys.mapping("rope_scaling"), keys.flag("attention_bias")
    reach = keys.with_changes({"sliding_window": keys.integer("local_attention") // 2})
    return ModelSpec(
        family="modernbert",
        **_shape(keys),
        context_length=keys.integer("max_position_embeddings"),
        norm_eps=keys.number("norm_eps"),
        norm_bias=keys.flag("norm_bias"),
        activation=activation(keys, "hidden_activation"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        rope=parse_rope({"rope_theta": keys.get("global_rope_theta")} | scaling | full, keys),
        rope_local=parse_rope({"rope_theta": keys.get("local_rope_theta")} | scaling | local, keys),
        windows=windows_of_types(reach, types),
        encoder=EncoderSpec(first_norm=False, score=_score(keys, _modern_score(keys))),
    )


def _modern_score(keys: Keys) -> ScoreSpec:
    pooling = keys.get("classifier_pooling")
    if pooling not in ("cls", "mean"):
        raise keys.unsupported("classifier_pooling", pooling)
    return ScoreSpec(pooling, activation(keys, "classifier_activation"), keys.flag("classifier_bias"), norm=True)


def _score(keys: Keys, head: ScoreSpec) -> ScoreSpec | None:
    """Of a model that was made to classify, if into one class only: a reranker."""
    names = keys.sequence("architectures")
    if not any(isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names):
        return None
    labels = keys.get("num_labels") or len(keys.mapping("id2label")) or 2
    if labels != 1:
        raise keys.unsupported("num_labels", labels)
    return head


def _shape(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if hidden % heads:
        raise keys.damaged("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers(keys),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": keys.integer("intermediate_size"),
        "norm": "layer",
        "tied_embeddings": True,  # there is no head
    }


ENCODERS: dict[str, Callable[[Keys], ModelSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "modernbert": _modernbert,
}


def encoder_prefix_mark(spec: ModelSpec) -> str:
    """What every file of the family has behind its prefix."""
    return "layers.0." if spec.family == "modernbert" else "encoder.layer.0."


def encoder_pieces(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    modern = spec.family == "modernbert"
    if not name.startswith("layers."):
        module, kind = name.rsplit(".", 1)
        return _spelled((_MODERN_TOP if modern else _BERT_TOP)[module], kind, shape)
    _, layer, part = name.split(".", 2)
    module, kind = part.rsplit(".", 1)
    prefix = f"layers.{layer}." if modern else f"encoder.layer.{layer}."
    if module == "qkv" and not modern:
        names = ("query", "key", "value")
        size = (spec.hidden_size, *shape[1:])
        return [tuple(Piece(f"{prefix}attention.self.{each}.{kind}", size) for each in names)]
    return _spelled(prefix + (_MODERN_LAYER if modern else _BERT_LAYER)[module], kind, shape)


def _spelled(module: str, kind: str, shape: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """The first BERTs called a norm's weight and bias gamma and beta."""
    ways: list[tuple[Piece, ...]] = [(Piece(f"{module}.{kind}", shape),)]
    if module.endswith("LayerNorm"):
        ways.append((Piece(f"{module}.{'gamma' if kind == 'weight' else 'beta'}", shape),))
    return ways


def score_piece(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> Piece:
    """By its whole name in the file."""
    module, kind = name.rsplit(".", 1)
    return Piece(f"{_SCORES[spec.family][module]}.{kind}", shape)


def with_own_pooling(spec: ModelSpec, folder: Path) -> ModelSpec:
    """As sentence-transformers would: without files of its own, the mean of all states as they are."""
    assert spec.encoder is not None
    if spec.encoder.score is not None:
        has_types = spec.family == "bert" and spec.encoder.token_types > 1  # RoBERTa's tokenizers know one type only
        separator = separator_of(folder) if has_types else None
        return msgspec.structs.replace(spec, encoder=msgspec.structs.replace(spec.encoder, separator=separator))
    if not (folder / MODULES).is_file():
        return spec
    encoder = spec.encoder
    for module in read_json_list(folder / MODULES):
        kind, path = _module(folder, module)
        if kind == "Pooling":
            encoder = msgspec.structs.replace(encoder, pooling=_pooling(folder / path / "config.json"))
        elif kind == "Normalize":
            encoder = msgspec.structs.replace(encoder, normalize=True)
        elif kind != "Transformer":
            raise UnsupportedModel(f"{folder / MODULES}: the module {kind} is not supported")
    return msgspec.structs.replace(spec, encoder=encoder)


def _module(folder: Path, module: Any) -> tuple[str, str]:
    kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(path, str) or Path(path).name != path:
        raise DamagedCheckpoint(f"{folder / MODULES}: expected modules with a type and the name of a folder")
    return kind.rsplit(".", 1)[-1], path


def _pooling(path: Path) -> Pooling:
    """One of the flags, or (newer files) the name of it."""
    settings = read_json(path)
    flags = [key.removeprefix(_FLAG) for key, value in settings.items() if key.startswith(_FLAG) and value]
    mode = settings.get("pooling_mode") or (flags[0] if len(flags) == 1 else flags)
    if not isinstance(mode, str) or mode not in _POOLINGS:
        raise UnsupportedModel(f"{path}: pooling_mode = {mode!r} is not supported (known: cls, mean, lasttoken)")
    return _POOLINGS[mode]
