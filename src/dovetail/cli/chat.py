"""`run`: a chat in the terminal, through a running server or a private one without HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import quote

import msgspec
import typer

from dovetail.cli.completion import local_models
from dovetail.cli.output import print_json
from dovetail.cli.ps import DEFAULT_URL, Url, error_message, key_header
from dovetail.cli.wait_bar import WaitBar
from dovetail.config import Config
from dovetail.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from dovetail.gateway.service import Service
    from dovetail.gateway.text.translate import GenerationRequest

_LOOK_S = 0.1  # how often a bar is moved
_MARK = ": dovetail "  # begins a comment in a stream that says what the answer waits for
COMPLETION_TOKENS = 256  # of a completion, where nobody says: a text has no end of its own
CALM_TEMPERATURE = 0.7  # where neither the user nor the model's authors say: at 1.0 small models ramble
_HELP = "/clear forgets the conversation, /bye leaves (so does Ctrl-D), Ctrl-C stops an answer."


@dataclass
class Conversation:
    system: str | None
    options: dict[str, Any]  # sampling, as in a completion's body
    is_text: bool = False  # its only message is continued as it is, without the chat template
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def body(self, model: str) -> dict[str, Any]:
        if self.is_text:
            return {
                "model": model,
                "prompt": self.messages[-1]["content"],
                "max_tokens": COMPLETION_TOKENS,
            } | self.options
        return {"model": model, "messages": self.messages} | self.options


@dataclass
class Piece:
    text: str = ""
    finish: str | None = None
    num_tokens: int = 0
    standing: dict[str, Any] | None = None  # before the first text: what it waits for


class Backend(Protocol):
    """Something that answers conversations."""

    async def open(self, bar: WaitBar) -> None: ...

    def answer(self, conversation: Conversation) -> AsyncGenerator[Piece, None]: ...

    async def close(self) -> None: ...


def run(
    model: Annotated[
        str,
        typer.Argument(
            help="A name from `dovetail list`, a folder, or a source as for `pull`.", autocompletion=local_models
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="Answer this and leave; read from standard input where that is piped.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 = always the likeliest token.  [default: the model authors', else 0.7]", min=0, max=2),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.")] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Continue the prompt as plain text, not as a chat.")
    ] = False,
    url: Url = DEFAULT_URL,
    store: Annotated[
        Path | None, typer.Option(help="Where models are kept.  [default: $DOVETAIL_HOME, ~/.cache/dovetail]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON for programs.")] = False,
) -> None:
    """Chat with a model in the terminal.

    Example: dovetail run smollm2-135m-instruct "What is a dovetail joint?"
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().strip()
        if not prompt:
            raise InvalidRequest("the prompt on standard input is empty")
    if prompt is None and (as_json or complete):
        raise InvalidRequest(f"{'--json' if as_json else '--complete'} needs a prompt")
    if complete and system is not None:
        raise InvalidRequest("--system is for chats: --complete continues the prompt alone")
    given = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    conversation = Conversation(system, {key: value for key, value in given.items() if value is not None}, complete)
    backend: Backend = RemoteChat(url, model) if _serves(url, model) else LocalChat(model, store)
    with asyncio.Runner() as runner:
        try:
            with WaitBar() as bar:
                runner.run(backend.open(bar))
            if prompt is None:
                _converse(runner, backend, conversation)
            else:
                _answer_once(runner, backend, conversation, model, prompt, as_json)
        finally:
            runner.run(backend.close())


def _serves(url: str, model: str) -> bool:
    """Whether a server is there and has the model, by its name or an alias; every doubt means no."""
    import httpx

    try:
        response = httpx.get(f"{url.rstrip('/')}/v1/models/{quote(model, safe='')}", headers=key_header(url), timeout=2)
        return response.status_code == 200 and "id" in response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError):
        return False


def _answer_once(
    runner: asyncio.Runner, backend: Backend, conversation: Conversation, model: str, prompt: str, as_json: bool
) -> None:
    started = time.monotonic()
    conversation.messages.append({"role": "user", "content": prompt})
    text, last = runner.run(_print_answer(backend, conversation, quiet=as_json))
    if as_json:
        seconds = round(time.monotonic() - started, 3)
        answer = {"model": model, "content": text, "finish_reason": last.finish}
        print_json(answer | {"completion_tokens": last.num_tokens, "seconds": seconds})


def _converse(runner: asyncio.Runner, backend: Backend, conversation: Conversation) -> None:
    import readline  # gives `input` editing and history

    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one message, not one each
    print(_HELP)
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /bye leaves)")
            continue
        if line == "/bye":
            return
        if line == "/clear":
            conversation.clear()
        elif line.startswith("/"):
            print(_HELP)
        elif line:
            _take_turn(runner, backend, conversation, line)


def _take_turn(runner: asyncio.Runner, backend: Backend, conversation: Conversation, line: str) -> None:
    """A failed or stopped answer leaves the conversation as it was."""
    conversation.messages.append({"role": "user", "content": line})
    try:
        text, _ = runner.run(_print_answer(backend, conversation))
    except KeyboardInterrupt:
        conversation.messages.pop()
        print("\n(stopped)")
    except RequestError as error:
        conversation.messages.pop()
        print(f"\nerror: {error}", file=sys.stderr)
    else:
        conversation.messages.append({"role": "assistant", "content": text})


async def _print_answer(backend: Backend, conversation: Conversation, *, quiet: bool = False) -> tuple[str, Piece]:
    total, pieces = Piece(), []
    async with aclosing(backend.answer(conversation)) as answer:
        with WaitBar() as bar:
            async for piece in answer:
                if piece.standing is not None:
                    bar.show(piece.standing)
                    continue
                bar.clear()
                pieces.append(piece.text)
                total.finish = piece.finish or total.finish
                total.num_tokens += piece.num_tokens
                if not quiet:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
    if not quiet:
        print()
    return "".join(pieces), total


class LocalChat:
    """A worker of our own, and the gateway's core without HTTP."""

    def __init__(self, model: str, store: Path | None) -> None:
        self._model = model
        config = Config()
        self._config = config.model_copy(update={"store": config.store.model_copy(update={"path": store})})
        self._service: Service | None = None

    async def open(self, bar: WaitBar) -> None:
        from dovetail.cli.offer import make_offer
        from dovetail.gateway.workers.client import WorkerClient
        from dovetail.gateway.workers.supervisor import worker_command

        self._link = WorkerClient(self._config.nodes, worker_command("--profiles", str(self._config.store.profiles)))
        self._link.start()
        offer = await asyncio.to_thread(make_offer, self._config, [self._model])
        from dovetail.gateway.metrics import Metrics
        from dovetail.gateway.models import Models
        from dovetail.gateway.service import Limits, Service

        models = Models(offer.catalogue, offer.configs)
        self._service = Service(self._link, models, Metrics(), Limits(max_queue=1))
        self._model = offer.names[0]
        watcher = asyncio.create_task(self._watch(self._service, bar))
        try:
            await self._service.start(offer.preload)
        finally:
            watcher.cancel()
        self._is_calm = models.get(self._model).card.defaults.temperature is not None

    async def _watch(self, service: Service, bar: WaitBar) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            (node,) = service.link.nodes.values()
            loading = node.loading.get(self._model)
            state = {"state": "starting" if node.hello is None else "loading"}
            bar.show(state if loading is None else state | msgspec.structs.asdict(loading))

    async def answer(self, conversation: Conversation) -> AsyncGenerator[Piece, None]:
        assert self._service is not None
        service = self._service
        job = await self._translate(service, conversation)
        async with aclosing(service.run(job)) as deltas:
            async for delta in deltas:
                yield Piece(delta.text, delta.finish, len(delta.tokens))

    async def _translate(self, service: Service, conversation: Conversation) -> GenerationRequest:
        from dovetail.gateway.http.api import ChatRequest, CompletionRequest, parse_body
        from dovetail.gateway.text.translate import translate_chat, translate_completion
        from dovetail.types import Slo

        asked = json.dumps(_calmed(conversation.body(self._model), self._is_calm)).encode()
        model, id = service.models.get(self._model), uuid.uuid4().hex
        context = service.context_limit(model)
        if conversation.is_text:
            return await translate_completion(parse_body(CompletionRequest, asked), model, id, context, Slo())
        default = service.default_max_tokens(model)
        return await translate_chat(parse_body(ChatRequest, asked), model, id, context, Slo(), default_tokens=default)

    async def close(self) -> None:
        if hasattr(self, "_link"):
            await self._link.close()


class RemoteChat:
    """A server that has the model."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url.rstrip("/")
        self._model = model

    async def open(self, bar: WaitBar) -> None:
        import httpx

        self._client = httpx.AsyncClient(timeout=httpx.Timeout(10, read=600), headers=key_header(self._url))
        try:
            info = (await self._client.get(f"{self._url}/v1/models/{quote(self._model, safe='')}")).json()
        except (httpx.HTTPError, ValueError) as error:
            raise RequestError(f"the server went away: {error or type(error).__name__}") from error
        self._is_calm = "temperature" in info.get("default_sampling_params", {})

    async def answer(self, conversation: Conversation) -> AsyncGenerator[Piece, None]:
        import httpx

        asked = _calmed(conversation.body(self._model), self._is_calm)
        body = asked | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            path = "completions" if conversation.is_text else "chat/completions"
            async with self._client.stream("POST", f"{self._url}/v1/{path}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise RequestError(error_message(response))
                async for line in response.aiter_lines():
                    if line.startswith(_MARK):
                        yield Piece(standing=json.loads(line.removeprefix(_MARK)))
                    data = line.removeprefix("data: ")
                    if line.startswith("data: ") and data != "[DONE]":
                        yield _piece(json.loads(data))
        except httpx.HTTPError as error:
            raise RequestError(f"the server went away: {error or type(error).__name__}") from error

    async def close(self) -> None:
        await self._client.aclose()


def _calmed(body: dict[str, Any], is_calm: bool) -> dict[str, Any]:
    """The authors' temperature where they have one, which the server knows."""
    return body if is_calm else {"temperature": CALM_TEMPERATURE} | body


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        raise RequestError(event["error"]["message"])
    choices, usage = event["choices"], event.get("usage")
    first = choices[0] if choices else {}
    text = first.get("text") or first.get("delta", {}).get("content", "")
    finish = first.get("finish_reason")
    return Piece(text, finish, usage["completion_tokens"] if usage else 0)
