"""Nodes and models of a simulation from a YAML file, for clusters of several kinds of nodes and sizes of models.

The style is that of `dovetail.yaml`: `nodes` is a list, `models` a mapping by name; an unknown key is an error that
names file, line and key. What the file leaves out comes from the profile and the presets.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dovetail.config import FROM_FILE, Size, describe
from dovetail.errors import ConfigError
from dovetail.profiles.storage import STORAGES

NEIGHBOURS = 8  # shares are out of this many models of the trace that follow each other
Device = Literal["cpu", "gpu"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeSection(_Section):
    """`count` nodes alike."""

    name: str = Field(min_length=1, max_length=64)
    device: Device
    count: int = Field(default=1, ge=1)
    hardware: str | None = None  # a name in the profile or a preset; default: the profile's first of the kind
    storage: str | None = (
        None  # where weights lie, a name in profiles.storage; default: a load takes what the link does
    )
    per_machine: int = Field(default=1, ge=1)  # with storage: so many of the nodes share one
    memory: Size | None = None  # default: the preset's, or the paper's 78 GiB (GPU) and 256 GiB (CPU)

    @field_validator("storage")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in STORAGES:
            raise ValueError(f"{name!r} is unknown, expected one of {', '.join(STORAGES)}")
        return name


class ModelSection(_Section):
    """Some models of the trace, all of one shape: measured (`shape`), or by roofline (the other three)."""

    shape: str | None = None  # a name in the profile
    weights: Size | None = None
    kv_per_token: Size | None = None
    layers: int | None = Field(default=None, ge=1)
    share: int | None = Field(default=None, ge=1, le=NEIGHBOURS)  # of every eight neighbours, in the file's order
    numbers: tuple[int, ...] = ()  # or these, as the trace numbers them
    devices: tuple[Device, ...] = ("cpu", "gpu")
    concurrency: int | None = Field(default=None, ge=1)  # limit of the sllm baselines; default: the profile's, or 1

    @model_validator(mode="after")
    def _complete(self) -> ModelSection:
        by_roofline = (self.weights, self.kv_per_token, self.layers)
        if (self.shape is None) == (by_roofline == (None, None, None)):
            raise ValueError("expected either shape, or weights, kv_per_token and layers")
        if self.shape is None and None in by_roofline:
            raise ValueError("weights, kv_per_token and layers belong together")
        if (self.share is None) == (not self.numbers):
            raise ValueError("expected either share or numbers")
        return self

    @property
    def roofline(self) -> tuple[int, int, int]:
        """Bytes of weights, bytes of KV per token, layers; only where no measured shape is named."""
        assert self.weights is not None
        assert self.kv_per_token is not None
        assert self.layers is not None
        return self.weights, self.kv_per_token, self.layers


class Layout(_Section):
    nodes: tuple[NodeSection, ...] = Field(min_length=1)
    models: dict[str, ModelSection] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Layout:
        names = [node.name for node in self.nodes]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"nodes: the name {twice[0]!r} is given twice")
        total = sum(model.share or 0 for model in self.models.values())
        if total > NEIGHBOURS:
            raise ValueError(f"models: the shares sum to {total}, more than {NEIGHBOURS}")
        return self

    def assign(self, models: Iterable[int]) -> dict[int, str]:
        """Which section each model of the trace belongs to; a model that no section asks for is left out."""
        by_number = {number: name for name, section in self.models.items() for number in section.numbers}
        dealt = [name for name, section in self.models.items() for _ in range(section.share or 0)]
        found = {}
        for model in models:
            place = model % NEIGHBOURS
            name = by_number.get(model) or (dealt[place] if place < len(dealt) else None)
            if name is not None:
                found[model] = name
        return found


def read_layout(path: Path) -> Layout:
    root = _compose(path)
    raw = yaml.safe_load(path.read_text()) if root is not None else {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: line 1: expected a mapping with nodes and models, got {type(raw).__name__}")
    try:
        return Layout.model_validate(raw, context=FROM_FILE)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]["loc"]
        raise ConfigError(f"{path}: line {_line_in(root, first)}: {describe(error)}") from error


def line_of(path: Path | None, *keys: str | int) -> str:
    """`file: line N: ` of a key, for messages about something that was found out later."""
    return f"{path}: line {_line_in(_compose(path), keys)}: " if path is not None else ""


def _compose(path: Path) -> Any:
    try:
        return yaml.compose(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _line_in(node: Any, keys: Iterable[str | int]) -> int:
    """Line of the deepest of the keys that the file has."""
    line = 1
    for key in keys:
        if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            found = [pair for pair in node.value if pair[0].value == str(key)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        else:
            break
    return line
