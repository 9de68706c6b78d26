"""Writes the reference pages that come from code: `python tools/reference.py` (or `make reference`).

docs/reference/cli.md from the commands, configuration.md from the records and comments of dovetail/config.py,
metrics.md from the registry of a server. A test holds the pages against what this makes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup

from dovetail import config
from dovetail.cli.main import COMMANDS, build_app
from dovetail.gateway.metrics import Metrics

PAGES = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "This page is written by `make reference` from the code; change it there.\n"
SECTIONS: dict[str, tuple[str, type[BaseModel]]] = {
    "models.NAME": ("a model, by the name under which clients ask for it", config.ModelConfig),
    "models.NAME.slo": ("its targets; default: min(max(0.5 s, input/512), 8 s) and 0.25 s", config.SloConfig),
    "models.NAME.speculative": ("drafts; a mode alone is short for `mode`", config.SpeculativeConfig),
    "server": ("HTTP, limits, logs, survival", config.ServerConfig),
    "server.tls": ("files in PEM, read again with the configuration", config.TlsConfig),
    "nodes": ("a list: one entry for each device", config.NodeConfig),
    "store": ("models on disk and in host memory", config.StoreConfig),
    "mcp": ("tools of MCP servers, called for models", config.McpConfig),
    "mcp.servers.NAME": ("a server of tools, by the name that requests use", config.McpServerConfig),
    "batch": ("files and batches", config.BatchConfig),
    "auth.keys": ("a list: one entry for each key; none = open to this machine", config.KeyConfig),
}  # fmt: skip
DURATIONS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
SIZES = {"GiB": 1024**3, "MiB": 1024**2, "KiB": 1024}
FIELD = re.compile(r"^    (\w+): ([^#]*?)(?:  # (.*))?$")


def main() -> None:
    for name, make in MAKERS.items():
        (PAGES / name).write_text(make())
        print(PAGES / name)


def cli_page() -> str:
    parts = ["# Command line\n", NOTE]
    parts.append(
        "Wrong usage ends with exit status 2, an error with 1 and one line on standard error; `--debug` shows where.\n"
    )
    for name in COMMANDS:
        app = typer.main.get_command(build_app(name))
        assert isinstance(app, TyperGroup)
        parts += _command(f"dovetail {name}", app.commands[name])
    return "\n".join(parts)


def _command(title: str, command: Any) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for name, inner in command.commands.items():
            yield from _command(f"{title} {name}", inner)
        return
    yield f"## {title}\n"
    yield re.sub(r"\s*Example: (.+)", _example, " ".join((command.help or "").split())).replace("\b", "") + "\n"
    rows = [_parameter(each) for each in command.params if each.name != "help" and not getattr(each, "hidden", False)]
    if rows:
        yield "\n".join(["| option | | default |", "| --- | --- | --- |", *rows]) + "\n"


def _example(found: re.Match[str]) -> str:
    return f"\n\nExample: `{found[1]}`"


def _parameter(parameter: Any) -> str:
    told = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    shown = re.search(r"\s*\[default: (.+?)\]", told)
    if shown:
        told, default = told.replace(shown[0], ""), shown[1]
    elif isinstance(default, bool) or default in (None, "", ()) or callable(default):
        default = "required" if parameter.required else ""
    names = parameter.opts if parameter.param_type_name == "option" else [(parameter.metavar or parameter.name).upper()]
    return f"| `{', '.join(names)}` | {told} | {default} |"


def configuration_page() -> str:
    parts = ["# Configuration\n", NOTE]
    parts.append(
        "`dovetail serve --config dovetail.yaml` reads one file; `dovetail init` writes one with comments. An unknown "
        "key is an error that names it. Sizes and durations need a unit (`512MiB`, `2GB`, `500ms`, `10m`; 0 = at once, "
        "negative = never where it is a keep-alive). `${env.NAME}` is filled in. The schema: "
        "[dovetail.schema.json](../dovetail.schema.json). What the keys do: [serving](serving.md).\n"
    )
    comments = _comments()
    for name, (told, section) in SECTIONS.items():
        rows = [
            f"| `{field.alias or key}` | {_default(field)} | {comments.get((section.__name__, key), '')} |"
            for key, field in section.model_fields.items()
        ]
        parts += [f"## {name}\n", f"{told[0].upper()}{told[1:]}.\n"]
        parts.append("\n".join(["| key | default | |", "| --- | --- | --- |", *rows]) + "\n")
    return "\n".join(parts)


def _default(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, BaseModel):
        return ""
    if isinstance(default, bool):
        return "true" if default else "false"
    readers = {getattr(each, "func", None) for each in field.metadata}
    if config._parse_duration in readers:
        return f"`{_with_unit(default, DURATIONS)}`"
    if config._parse_size in readers:
        return f"`{_with_unit(default, SIZES)}`"
    return f"`{list(default) if isinstance(default, tuple) else getattr(default, 'value', default)}`"


def _with_unit(value: float, units: Mapping[str, float]) -> str:
    """As a file says it, in the largest unit that leaves a whole number."""
    unit = next((unit for unit, size in units.items() if value and value % size == 0), "")
    return f"{value / units.get(unit, 1):g}{unit}"


def _comments() -> dict[tuple[str, str], str]:
    """What stands beside and above each field in the source, by class and field."""
    found: dict[tuple[str, str], str] = {}
    owner, above = "", []
    for line in Path(config.__file__).read_text().splitlines():
        if line.startswith("class "):
            owner = line.removeprefix("class ").partition("(")[0]
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        field = FIELD.match(line)
        if field and owner:
            found[owner, field[1]] = " ".join([*above, field[3] or ""]).strip().replace("|", "\\|")
        above = []
    return found


def metrics_page() -> str:
    rows = []
    for family in Metrics().registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        rows.append(f"| `{name}` | {family.type} | {family.documentation} |")
    told = (
        "`GET /metrics`, in Prometheus' text form or in OpenMetrics, as `Accept` says; `/metrics` asks for a key with "
        "`metrics` or `admin` where keys are configured. Names are vLLM's with the prefix `dovetail:` where vLLM has "
        "them; `server.vllm_metrics` adds those under `vllm:`. What the outcomes of "
        "`slo_requests_total` mean: [serving](serving.md#metrics).\n"
    )
    return "\n".join(["# Metrics\n", NOTE, told, "| name | kind | |", "| --- | --- | --- |", *rows, ""])


MAKERS: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
}

if __name__ == "__main__":
    main()
