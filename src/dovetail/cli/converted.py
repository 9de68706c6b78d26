"""Models of another server's configuration, for `init --from`: llama-swap's file, or a Modelfile of Ollama's.

What has no counterpart is not dropped in silence: each model says in a note what was left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dovetail.errors import ConfigError

_FILES = ("-m", "--model")
_HUBS = ("-hf", "-hfr", "--hf-repo")
_KNOWN_KEYS = {"cmd", "aliases", "ttl", "proxy", "name", "description", "checkEndpoint", "metadata", "env", "unlisted"}
_KNOWN_OPTIONS = {"--port", "--host", "--alias", "-a", "--no-webui", "--jinja"}  # of the server's own business
_KEYWORDS = "FROM|PARAMETER|TEMPLATE|SYSTEM|ADAPTER|LICENSE|MESSAGE"
_INSTRUCTION = re.compile(rf'(?im)^[ \t]*({_KEYWORDS})[ \t]+("""[\s\S]*?"""|.*)')
_REFERENCE = re.compile(r"(?:(?P<space>[\w.-]+)/)?(?P<name>[\w.-]+)(?::(?P<tag>[\w.-]+))?")


@dataclass
class FoundModel:
    """As dovetail.yaml is to have it."""

    name: str
    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def models_from(file: Path) -> list[FoundModel]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'no text'}") from error
    if re.search(r"(?im)^\s*FROM\s+\S", text):
        return [_from_modelfile(file, text)]
    return _from_llama_swap(file, text)


def _from_llama_swap(file: Path, text: str) -> list[FoundModel]:
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())[:300]}") from error
    models = config.get("models") if isinstance(config, dict) else None
    if not isinstance(models, dict) or not models:
        raise ConfigError(f"{file}: neither llama-swap's file (models: …) nor a Modelfile (FROM …)")
    preloaded = _names(_at(config, "hooks", "on_startup", "preload"))
    macros = _mapping(config.get("macros"))
    found = []
    for name, model in models.items():
        if not isinstance(model, dict) or not isinstance(model.get("cmd"), str):
            raise ConfigError(f"{file}: models.{name}: it has no cmd")
        own = macros | _mapping(model.get("macros"))
        one = _from_command(f"{file}: models.{name}", str(name), _expanded(model["cmd"], own))
        if aliases := _names(model.get("aliases")):
            one.settings["aliases"] = aliases
        ttl = model.get("ttl", config.get("globalTTL"))
        if isinstance(ttl, int):
            one.settings["keep_alive"] = f"{ttl}s" if ttl > 0 else -1  # 0: never unloaded
        if name in preloaded:
            one.settings["preload"] = True
        one.notes += [f"{key} has no counterpart" for key in sorted(model.keys() - _KNOWN_KEYS - {"macros"})]
        found.append(one)
    return found


def _from_command(where: str, name: str, command: str) -> FoundModel:
    """A llama-server's or vLLM's command line; what is not the model is noted."""
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{where}.cmd: {error}") from error
    source, ignored, served = "", [], False
    pairs = [(word, words[at + 1] if at + 1 < len(words) else "") for at, word in enumerate(words)]
    for word, value in pairs:
        option, equals, joined = word.partition("=")
        value = joined if equals else value
        if option in _HUBS:
            source = f"hf:{value.partition(':')[0]}"
        elif option in _FILES:
            source = f"hf:{value}" if served or ("vllm" in words[0] and not value.startswith(("/", "."))) else value
        elif word == "serve" and value and not value.startswith("-"):
            served, source = True, value if value.startswith(("/", ".", "~")) else f"hf:{value}"
        elif option.startswith("-") and option not in _KNOWN_OPTIONS:
            ignored.append(option)
    if not source:
        raise ConfigError(f"{where}.cmd: it names no model (-m FILE, -hf REPOSITORY, or `vllm serve NAME`)")
    note = [f"not carried over: {' '.join(dict.fromkeys(ignored))}"] if ignored else []
    return FoundModel(name, source, notes=note)


def _from_modelfile(file: Path, text: str) -> FoundModel:
    source, settings, notes = "", {}, []
    for keyword, value in _instructions(text):
        name, _, given = value.partition(" ")
        if keyword == "FROM":
            source = _ollama_source(file, value.strip())
        elif keyword == "PARAMETER" and name == "num_predict" and given.strip().isdigit() and int(given) > 0:
            settings["default_max_tokens"] = int(given)
        else:
            what = f"{keyword} {name}" if keyword == "PARAMETER" else keyword
            notes.append(f"{what}: clients send it with their requests")
    name = file.parent.resolve().name if file.name.lower() == "modelfile" else file.stem
    return FoundModel(name, source, settings, list(dict.fromkeys(notes)))


def _instructions(text: str) -> list[tuple[str, str]]:
    """Keyword and value of each; texts in three quotes may have lines."""
    return [(match[1].upper(), match[2].strip()) for match in _INSTRUCTION.finditer(text)]


def _ollama_source(file: Path, value: str) -> str:
    """A path, or the file of weights that Ollama has for a name."""
    path = Path(value).expanduser()
    beside = path if path.is_absolute() else file.parent / path
    if beside.exists():
        return str(beside.resolve())
    match = _REFERENCE.fullmatch(value)
    store = Path(os.environ.get("OLLAMA_MODELS") or Path.home() / ".ollama" / "models")
    if match is not None:
        folder, tag = f"{match['space'] or 'library'}/{match['name']}", match["tag"] or "latest"
        for manifest in sorted(store.glob(f"manifests/*/{folder}/{tag}")):
            blob = _weights_of(store, manifest)
            if blob is not None:
                return str(blob)
    raise ConfigError(f"{file}: FROM {value}: neither a file nor a model in Ollama's store {store}")


def _weights_of(store: Path, manifest: Path) -> Path | None:
    try:
        layers = json.loads(manifest.read_text())["layers"]
        digests = [str(one["digest"]) for one in layers if str(one["mediaType"]).endswith("image.model")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{manifest}: not a manifest of Ollama's") from error
    blobs = [store / "blobs" / digest.replace(":", "-") for digest in digests]
    return next((blob for blob in blobs if blob.is_file()), None)


def _expanded(command: str, macros: Mapping[str, Any]) -> str:
    for _ in range(8):  # macros may name macros
        command = re.sub(r"\$\{([\w-]+)\}", lambda match: str(macros.get(match[1], match[0])), command)
    return command


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _names(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else []


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
