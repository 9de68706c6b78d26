"""What tests may use of vLLM's package: the tokenizer of the served model, shapes of answers, facts of the platform."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

MISSING = "works with vLLM's own classes, not over HTTP"


class _Unusable(type):
    """A class of vLLM's that may be named but not used."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__get_pydantic_core_schema__":
            return cls
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unusable(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *_: Any, **__: Any) -> Any:
        pytest.skip(f"{MISSING} ({cls.__name__})", allow_module_level=True)

    __add__ = __radd__ = __or__ = __lt__ = __getitem__ = __iter__ = __call__


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """Of the served model, as transformers has it, whatever name is asked for."""
    from transformers import PreTrainedTokenizerFast

    from dovetail.store import Catalogue

    card = Catalogue().get(os.environ["DOVETAIL_TESTED_MODEL"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=card.tokenizer_file, bos_token=card.bos_token, eos_token=card.eos_token
    )
    tokenizer.chat_template = card.chat_template
    return tokenizer


class ModelConfig:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"{MISSING} (ModelConfig)")


class _Embedding(BaseModel):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class _Usage(BaseModel):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0


class EmbeddingResponse(BaseModel):
    id: str = ""
    object: str = "list"
    created: int = 0
    model: str
    data: list[_Embedding]
    usage: _Usage


class _Document(BaseModel):
    text: str | None = None


class _Ranked(BaseModel):
    index: int
    document: _Document
    relevance_score: float


class RerankResponse(BaseModel):
    id: str
    model: str
    usage: _Usage
    results: list[_Ranked]


PLATFORM = SimpleNamespace(
    is_rocm=lambda: False, is_cpu=lambda: True, is_cuda=lambda: False, is_xpu=lambda: False, device_type="cpu"
)

_KNOWN: dict[str, Any] = {
    "get_tokenizer": get_tokenizer,
    "current_platform": PLATFORM,
    "EmbeddingResponse": EmbeddingResponse,
    "RerankResponse": RerankResponse,
    "ModelConfig": ModelConfig,
    "hf_api": lambda: SimpleNamespace(snapshot_download=lambda *_, **__: "/nowhere"),
}


def find(module: str, name: str) -> Any:
    if (module, name) == ("vllm.version", "__version__"):
        import dovetail

        return dovetail.__version__
    if name.startswith(("__", "pytest_")):
        raise AttributeError(name)
    if name.endswith("Error"):
        return type(name, (Exception,), {})
    return _KNOWN.get(name) or _Unusable(name, (), {})
