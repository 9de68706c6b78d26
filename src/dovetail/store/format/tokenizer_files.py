"""What the gateway must know to talk to a model (tokenizer, chat template, end tokens, defaults), from an HF folder.

Finds and checks; tokenises nothing itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.store.files import read_bytes, read_json, read_text
from dovetail.store.keys import Keys
from dovetail.types import GenerationDefaults


class TokenFields(msgspec.Struct, frozen=True):
    """The fields of a ModelCard that concern text; named as there."""

    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    defaults: GenerationDefaults = GenerationDefaults()


_MAX_TOKEN = (1 << 31) - 1
_DEFAULTS = {
    "temperature": (0.0, 1e3),
    "top_k": (-1, _MAX_TOKEN),
    "top_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}


def tokens_problem(fields: TokenFields) -> str | None:
    """What no sampler could use: key, expectation and value. None = nothing."""
    if not all(0 <= token <= _MAX_TOKEN for token in fields.eos_token_ids):
        return f"eos_token_ids: expected ids of tokens, got {list(fields.eos_token_ids)[:8]}"
    for key, (low, high) in _DEFAULTS.items():
        value = getattr(fields.defaults, key)
        if value is not None and not low <= value <= high:
            return f"defaults.{key}: expected {low:g} to {high:g}, got {value!r}"
    return None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is read here; decoding only this skips building the vocabulary."""

    added_tokens: list[_AddedToken] = []


def find_tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if path.is_file():
        return path
    if (folder / "tokenizer.model").is_file():
        raise UnsupportedModel(
            f"{folder}: has tokenizer.model but no tokenizer.json; save it once with a fast tokenizer of transformers"
        )
    raise DamagedCheckpoint(f"{folder}: tokenizer.json is missing")


def read_token_fields(folder: Path) -> TokenFields:
    tokenizer = find_tokenizer(folder)
    settings = read_json(folder / "tokenizer_config.json", required=False)
    special = read_json(folder / "special_tokens_map.json", required=False)
    generation = read_json(folder / "generation_config.json", required=False)
    eos_token = _token_text(settings.get("eos_token") or special.get("eos_token"))
    return TokenFields(
        chat_template=_chat_template(folder, settings),
        bos_token=_token_text(settings.get("bos_token") or special.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=_eos_token_ids(folder, generation, tokenizer, eos_token),
        add_bos=settings.get("add_bos_token") is True,
        defaults=_defaults(generation, str(folder / "generation_config.json")),
    )


def separator_of(folder: Path) -> int:
    """The token that a tokenizer puts between two texts."""
    settings = read_json(folder / "tokenizer_config.json", required=False)
    special = read_json(folder / "special_tokens_map.json", required=False)
    text = _token_text(settings.get("sep_token") or special.get("sep_token")) or "[SEP]"
    found = [token.id for token in _added_tokens(find_tokenizer(folder)) if token.content == text]
    if not found:
        raise DamagedCheckpoint(f"{folder}: tokenizer.json has no token {text!r}, which is to stand between two texts")
    return found[0]


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    """A file of its own wins over tokenizer_config.json, as in transformers; of several the one called default."""
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return read_text(separate)
    value = read_json(folder / "chat_template.json", required=False).get("chat_template")
    value = value or settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    if value is not None and not isinstance(value, str):
        raise DamagedCheckpoint(f"{folder}: chat_template is neither text nor a list of named texts")
    return value


def _eos_token_ids(folder: Path, generation: dict[str, Any], tokenizer: Path, eos_token: str | None) -> tuple[int, ...]:
    """What the authors' generation config names (or else the model config), and the tokenizer's own end token."""
    config = read_json(folder / "config.json", required=False)
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and token >= 0 for token in ids):
        raise DamagedCheckpoint(f"{folder}: eos_token_id {value!r} is not a token id")
    if eos_token is not None:
        ids = [*ids, *(token.id for token in _added_tokens(tokenizer) if token.content == eos_token)]
    return tuple(dict.fromkeys(ids))


def _added_tokens(tokenizer: Path) -> list[_AddedToken]:
    try:
        return msgspec.json.decode(read_bytes(tokenizer), type=_TokenizerFile).added_tokens
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{tokenizer}: not a tokenizer file: {error}") from error


def _defaults(generation: dict[str, Any], origin: str) -> GenerationDefaults:
    """What the authors recommend. A recommendation that nobody can follow is none."""
    keys = Keys(generation, origin)
    found = {key: keys.optional_number(key) for key in _DEFAULTS}
    usable = {key: value for key, value in found.items() if value is not None and _is_usable(key, value)}
    top_k = usable.pop("top_k", None)
    return GenerationDefaults(top_k=None if top_k is None else int(top_k), **usable)


def _is_usable(key: str, value: float) -> bool:
    low, high = _DEFAULTS[key]
    return low <= value <= high
