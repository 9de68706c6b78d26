"""What vLLM's tests take from their `tests.utils`: a server to speak to. Here one Dovetail server for all of them; its
one small model is called as each of them wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

__all__ = ["ROCM_ENV_OVERRIDES", "ROCM_EXTRA_ARGS", "VLLM_PATH", "RemoteOpenAIServer"]

ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}
VLLM_PATH = Path(os.environ.get("DOVETAIL_VLLM", "/nowhere"))
TESTED = os.environ.get("DOVETAIL_TESTED_MODEL", "smollm2-135m-instruct")
# What a test starts its server with and this one cannot be told; the cases are about that.
NOT_THERE = {
    "--enable-prompt-embeds": "prompts as embeddings",
    "--return-tokens-as-token-ids": "an option of the request (return_tokens_as_token_ids), not of the server",
    "--root-path": "a root path (a proxy's)",
    "--enable-force-include-usage": "usage that the operator forces upon clients",
    "--enable-return-routed-experts": "which experts a token went to",
    "--tool-server": "tools that the server calls",
    "--load-format": "formats of weights of vLLM's own",
}


def missing(name: str) -> pytest.MarkDecorator:
    """Any other name of theirs: what a decorator of it marks is left out."""
    if name.startswith("__"):
        raise AttributeError(name)
    return pytest.mark.skip(reason=f"needs {name} of vLLM's own test tools")


class OurServer:
    """Started at the first use, ended with the session."""

    process: subprocess.Popen[str] | None = None
    url = ""

    @classmethod
    def start(cls) -> str:
        if cls.process is None:
            command = [sys.executable, "-m", "dovetail", "serve", TESTED, "--port", "0", "--json"]
            cls.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert cls.process.stdout is not None
            cls.url = json.loads(cls.process.stdout.readline())["url"]
        return cls.url

    @classmethod
    def stop(cls) -> None:
        if cls.process is not None:
            cls.process.terminate()
            cls.process.wait(60)
            cls.process = None

    @classmethod
    def admin(cls, method: str, path: str, body: Any = None) -> httpx.Response:
        from dovetail.cli.ps import key_header

        return httpx.request(method, cls.url + path, json=body, headers=key_header(cls.url), timeout=120)


class RemoteOpenAIServer:
    DUMMY_API_KEY = "none"

    def __init__(self, model: str, vllm_serve_args: list[str], **_: Any) -> None:
        for option in vllm_serve_args:
            if option.split("=")[0] in NOT_THERE:
                pytest.skip(f"not there: {NOT_THERE[option.split('=')[0]]}")
        self.url_root = OurServer.start()
        self._names = [model, *_named(vllm_serve_args)]

    def __enter__(self) -> RemoteOpenAIServer:
        self._set_aliases(self._names)
        return self

    def __exit__(self, *_: object) -> None:
        self._set_aliases([])

    def _set_aliases(self, names: list[str]) -> None:
        aliases = [name for name in dict.fromkeys(names) if name != TESTED]
        answer = OurServer.admin("PATCH", f"/api/models/{TESTED}", {"aliases": aliases, "default_max_tokens": 2048})
        assert answer.status_code == 200, answer.text

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options(options) | {"base_url": self.url_root})

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        given = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 120}
        return given | options


def _named(arguments: list[str]) -> list[str]:
    if "--served-model-name" not in arguments:
        return []
    rest = arguments[arguments.index("--served-model-name") + 1 :]
    return rest[: next((at for at, each in enumerate(rest) if each.startswith("--")), len(rest))]
