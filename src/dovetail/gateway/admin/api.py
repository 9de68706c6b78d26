"""The records of the admin API: what may be asked of a running server, and how it describes its models.

Unlike OpenAI's bodies these refuse unknown fields: a setting that is misspelt must not be ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dovetail.config import Duration, ModelClass, ModelConfig, SloConfig
from dovetail.types import ServiceClass

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

# Where an instance is in its life, and where its weights are.
State = Literal["absent", "host", "loading", "ready", "serving", "idle"]
Tier = Literal["remote", "disk", "host", "device"]


class AddModel(ModelConfig):
    """An entry of `models` in dovetail.yaml, and its name."""

    name: str = Field(pattern=NAME)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.model_validate(self.model_dump(by_alias=True, exclude={"name"}))


class ChangeModel(BaseModel):
    """What may change while a model is served; what is left out stays."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    slo: SloConfig | None = None
    service_class: ModelClass | None = Field(default=None, alias="class")
    keep_alive: Duration | None = None
    preload: bool | None = None
    aliases: tuple[str, ...] | None = None
    default_max_tokens: int | None = Field(default=None, ge=1)

    @property
    def changes(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)


class PullState(BaseModel):
    name: str
    source: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    stage: str = Field(description="download, unpack or convert")
    done_bytes: int
    total_bytes: int = Field(description="0 = not known")
    started: float = Field(description="Unix seconds")
    error: str | None = None


class LogLine(BaseModel):
    number: int
    time: float = Field(description="Unix seconds")
    level: str
    logger: str
    message: str


class LogLines(BaseModel):
    object: Literal["list"] = "list"
    data: list[LogLine]
    last: int = Field(description="number of the newest line, for `after` of the next request")


class PullList(BaseModel):
    object: Literal["list"] = "list"
    data: list[PullState]


class ModelState(BaseModel):
    name: str
    aliases: list[str]
    source: str
    parent: str | None = Field(default=None, description="of an adapter: the model that it is for")
    state: State
    tier: Tier = Field(description="where its weights are")
    node: str | None = Field(default=None, description="where it is loaded")
    unfinished: int = Field(default=0, description="requests that it has not answered yet")
    service_class: ServiceClass = Field(serialization_alias="class")
    slo: SloConfig = Field(description="seconds; null = the default for the prompt's length")
    keep_alive: float = Field(description="seconds; negative = for ever")
    preload: bool
    default_max_tokens: int = Field(description="of a chat without max_tokens, within the context")
    size_bytes: int = Field(default=0, description="on disk")
    weight_bytes: int = Field(default=0, description="in memory")
    kv_bytes: int = Field(default=0, description="KV memory in use")
    requests: int = Field(default=0, description="with targets, since the server started")
    attainment: float | None = Field(default=None, description="share of them that met their targets")
    ttft_p50_s: float | None = None
    tpot_p50_s: float | None = None
    pull: PullState | None = Field(default=None, description="while it is on its way, and if it could not be had")


class ModelStates(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelState]


class Ended(BaseModel):
    """A model was removed or unloaded."""

    name: str
    unfinished: int = Field(description="requests that it was answering; they finish unless force was given")


class ConfigState(BaseModel):
    file: str | None
    loaded_at: float = Field(description="Unix seconds")
    problem: str | None = Field(description="why the last reading was refused; the configuration is that of before")
    needs_restart: list[str] = Field(description="keys that differ in the file and take a restart")
    config: dict[str, Any]
