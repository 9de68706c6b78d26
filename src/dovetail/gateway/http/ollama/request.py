"""What Ollama's clients ask, and the chat or completion that it comes to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import (
    FAIL_FAST,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StopString,
)
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.http.options import check_options, ignored_options
from dovetail.gateway.http.sampling import SamplingBody
from dovetail.gateway.text.tools.schema import Tool

# Of `options`: how much memory and which devices, which the server decides by itself.
_HARMLESS = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "use_mmap", "use_mlock",
        "low_vram", "f16_kv", "vocab_only", "logits_all",
    }
)  # fmt: skip


class OllamaOptions(SamplingBody):
    model_config = ConfigDict(extra="allow")

    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    num_predict: int | None = Field(default=None, description="-1 and -2: the server's own limit")
    repeat_penalty: float | None = None

    @model_validator(mode="after")
    def _check_options(self) -> OllamaOptions:
        extra = {key: value for key, value in (self.model_extra or {}).items() if key not in _HARMLESS}
        check_options(extra, type(self).model_fields)
        return self

    def as_ours(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True, exclude=set(self.model_extra or ()))
        limit = given.pop("num_predict", None)
        penalty = given.pop("repeat_penalty", None)
        if limit is not None and limit > 0:
            given["max_tokens"] = limit
        return given | ({} if penalty is None else {"repetition_penalty": penalty})


class OllamaBody(StrictBody):
    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    stream: bool | None = Field(default=None, description="on unless false")
    format: Literal["json", ""] | dict[str, Any] | None = Field(default=None, description="json, or a schema")
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_options(self) -> OllamaBody:
        check_options(self.model_extra or {}, type(self).model_fields)
        return self

    @property
    def served_name(self) -> str:
        return self.model.removesuffix(":latest")

    def shared(self) -> dict[str, Any]:
        """Fields of ours that chat and completion have in common."""
        fields = self.options.as_ours() if self.options else {}
        if isinstance(self.format, dict):
            schema = JsonSchemaFormat(name="format", schema=self.format)
            fields["response_format"] = ResponseFormat(type="json_schema", json_schema=schema)
        elif self.format == "json":
            fields["response_format"] = ResponseFormat(type="json_object")
        return {"model": self.served_name, **fields}

    def thinking(self) -> dict[str, Any]:
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        return {} if self.think is None else {"enable_thinking": self.think}

    def reports(self) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": self.top_logprobs} if self.logprobs else {}

    def warnings(self) -> tuple[str, ...]:
        return ignored_options(self.model_extra or {})


class OllamaMessage(Message):
    images: list[str] | None = None
    thinking: str | None = None

    def as_ours(self, at: int) -> Message:
        if self.images:
            raise InvalidRequest("images are not supported; models here read text", param=f"messages[{at}].images")
        fields: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"images", "thinking"})
        if self.thinking:
            fields["reasoning_content"] = self.thinking
        return Message(**fields)


class OllamaChat(OllamaBody):
    messages: Annotated[list[OllamaMessage], FAIL_FAST] = Field(default_factory=list, max_length=4096)
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(default=None, max_length=512)

    def as_chat(self) -> ChatRequest:
        messages = [message.as_ours(at) for at, message in enumerate(self.messages)]
        tools = self.tools or None
        return ChatRequest(messages=messages, tools=tools, **self.shared(), **self.thinking(), **self.reports())


class OllamaGenerate(OllamaBody):
    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = Field(default=None, description="the prompt as it is, without the model's template")
    images: list[str] | None = None

    def as_ours(self) -> ChatRequest | CompletionRequest:
        if self.images:
            raise InvalidRequest("images are not supported; models here read text", param="images")
        if self.raw or self.suffix:
            logprobs = (self.top_logprobs or 0) if self.logprobs else None
            return CompletionRequest(prompt=self.prompt, suffix=self.suffix, logprobs=logprobs, **self.shared())
        system = [Message(role="system", content=self.system)] if self.system else []
        said = [*system, Message(role="user", content=self.prompt)]
        return ChatRequest(messages=said, **self.shared(), **self.thinking(), **self.reports())


class OllamaEmbed(StrictBody):
    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=512)
    input: str | Annotated[list[str], Field(max_length=2048), FAIL_FAST] = Field(default_factory=list)
    prompt: str | None = Field(default=None, description="of the older path, which has one text")
    truncate: bool | None = Field(default=None, description="on unless false")
    dimensions: int | None = Field(default=None, ge=1)
    options: OllamaOptions | None = None

    @model_validator(mode="after")
    def _check_options(self) -> OllamaEmbed:
        check_options(self.model_extra or {}, type(self).model_fields)
        return self


class OllamaShow(StrictBody):
    model: str = Field(default="", max_length=512)
    name: str = Field(default="", max_length=512, description="what older clients call it")
