"""`up` and `join`: one server over several machines, which Ray holds together."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.completion import local_models
from dovetail.cli.node_sizes import check_nodes
from dovetail.cli.serve import (
    ApiKey,
    LocalWeights,
    OpenToNetwork,
    Plan,
    listen_for,
    override_with,
    parsed,
    run_loop,
    serve_plan,
)
from dovetail.cli.state import State, hide_secret
from dovetail.cli.tls import TlsCert, TlsKey, tls_config
from dovetail.config import Config, NodeConfig, load_config, parse_size
from dovetail.errors import ConfigError, DovetailError
from dovetail.machine import HOME_VARIABLE
from dovetail.messages import STORE_LIMIT_VARIABLE

if TYPE_CHECKING:
    from dovetail.cluster.durable import Durable
    from dovetail.cluster.ray_backend import RayNodes
    from dovetail.gateway.workers.client import WorkerClient
    from dovetail.gateway.workers.remote_workers import RemoteWorkers
    from dovetail.store.sources.weight_server import WeightServer

logger = logging.getLogger("dovetail.gateway")

RAY_PORT = 6379
RAY_KEEPS = (range(10001, 20000), (8265, 52365))  # for its workers and clients; its dashboard and that one's agent
HEAD_TIMEOUT_S = 30.0  # that a machine waits for the head's port: both may have been started at the same time
START_TIMEOUT_S = 60.0
MAX_ATTEMPTS = 3  # of a machine to join: two that start at once on one machine may take each other's ports
_POLL_S = 0.2


def up(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="As for `serve`; other machines fetch them.", autocompletion=local_models
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="A dovetail.yaml.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on for clients.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 = any free one.  [default: 8000]", min=0, max=65535)] = None,
    cluster_host: Annotated[
        str, typer.Option(help="This machine's address in the network of the cluster.")
    ] = "127.0.0.1",
    cluster_port: Annotated[int, typer.Option(help="Where machines join (Ray).", min=1, max=65535)] = RAY_PORT,
    ray_address: Annotated[
        str | None, typer.Option(help="A Ray cluster that is there already; none is started then.", show_default=False)
    ] = None,
    head_only: Annotated[bool, typer.Option("--head-only", help="No worker on this machine.")] = False,
    threads: Annotated[int | None, typer.Option(help="Of the worker here.  [default: every core]", min=0)] = None,
    memory: Annotated[str | None, typer.Option(help="Of the worker here, as 8GiB.")] = None,
    api_key: ApiKey = None,
    open_to_network: OpenToNetwork = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    store: Annotated[Path | None, typer.Option(help="Where models are kept.")] = None,
    state: State = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say that it is ready in JSON, on one line.")] = False,
) -> None:
    """Serve models over several machines. Others come in with `dovetail join`, and go with `dovetail leave`.

    Example: dovetail up --cluster-host 10.0.0.5, and on another machine: dovetail join 10.0.0.5:6379
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _check_cluster_port(cluster_port)
    server: dict[str, Any] = {"host": host, "port": port, "open_to_network": open_to_network or None}
    server |= {"state": hide_secret(state), "tls": tls_config(tls_cert, tls_key)}
    node = {"threads": threads, "memory": None if memory is None else parsed(parse_size, memory, "--memory")}
    ours = override_with(server, node, api_key, store, None)

    def override(settings: Config) -> Config:
        settings = _with_state(ours(settings), cluster_port)
        return settings.model_copy(update={"nodes": ()}) if head_only else settings

    settings = override(load_config(config) if config is not None else Config())
    plan = Plan(settings, tuple(dict.fromkeys(models or ())), config, override, as_json)
    listener = listen_for(settings)
    with RayCluster(cluster_host, cluster_port, ray_address) as cluster:
        run_loop(serve_plan(plan, listener, cluster))


def _check_cluster_port(port: int) -> None:
    if any(port in kept for kept in RAY_KEEPS):
        raise ConfigError(
            f"--cluster-port {port}: Ray keeps ports 10001 to 19999, 8265 and 52365 for itself; choose another, "
            f"as {RAY_PORT}"
        )


def _with_state(config: Config, port: int) -> Config:
    """A head keeps its state without --state, too: the machines that joined outlive it."""
    if config.server.state is not None:
        return config
    folder = config.store.profiles.parent / f"up-{port}"
    return config.model_copy(update={"server": config.server.model_copy(update={"state": str(folder)})})


class RayCluster:
    """A `serve.OtherMachines`: Ray's head if it is ours, and whoever joins it. What it starts on entering ends with
    `close`, or at the latest on leaving: after a signal too, whenever it comes."""

    is_front = False

    def __init__(self, host: str, port: int, address: str | None) -> None:
        self._host = host
        self._port = port
        self._address = address  # of a cluster that is not ours; None = we start one
        self._head: subprocess.Popen[bytes] | None = None
        self._membership: RemoteWorkers | None = None
        self._weights: WeightServer | None = None

    def __enter__(self) -> RayCluster:
        from dovetail.cluster.ray_backend import is_reachable

        ours = f"{self._host}:{self._port}"
        if self._address is None and is_reachable(ours):
            self._address = ours
            logger.warning("a Ray cluster is at %s already: its machines are taken over, and it stays", ours)
        with ExitStack() as undo, tempfile.TemporaryFile() as output:  # what Ray says, for when it fails
            undo.callback(self._stop_head)
            if self._address is None:
                self._start_head(output)
            self._nodes = _connect(self._address or ours, self._host, self._head, output)
            _exit_when_told()  # Ray has put its own way in place
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_head()

    def _start_head(self, output: IO[bytes]) -> None:
        """A signal in the middle of it waits until the head is known."""
        from dovetail.cluster.ray_backend import import_ray, start_head

        import_ray()
        on_interrupt = signal.getsignal(signal.SIGINT)
        noted = _note_signals()
        self._head = start_head(self._host, self._port, output)
        signal.signal(signal.SIGINT, on_interrupt)
        _exit_when_told()
        if noted:
            sys.exit(0)

    def _stop_head(self) -> None:
        from dovetail.cluster.ray_backend import stop_ray

        if self._head is not None:
            stop_ray(self._head)
            self._head = None

    def attach(
        self, link: WorkerClient, options: Sequence[str], durable: Durable | None, weights: LocalWeights
    ) -> None:
        from dovetail.gateway.workers.remote_workers import RemoteWorkers, WeightSources, WireKeys, listen_as_before
        from dovetail.messages import weights_token
        from dovetail.store.sources.weight_server import WeightServer

        assert durable is not None
        keys = WireKeys.kept(durable)
        port = listen_as_before(link, keys, self._host, durable)
        link.close_observers.append(keys.close)
        self._weights = WeightServer(weights.paths, weights_token(keys.for_workers), self._host, pool=weights.pool)
        WeightSources(link, self._weights.address)
        self._membership = RemoteWorkers(self._nodes, link, keys, f"tcp://{self._host}:{port}", options)

    def start(self, is_drained: Callable[[str], bool]) -> None:
        assert self._membership is not None
        self._membership.is_drained = is_drained
        self._membership.start()

    async def close(self) -> None:
        if self._membership is not None:
            await self._membership.close()
        if self._weights is not None:
            await asyncio.to_thread(self._weights.close)
        await asyncio.to_thread(self._nodes.close)
        await asyncio.to_thread(self._stop_head)


def _exit_when_told() -> None:
    """An exit unwinds, where the signal by itself would end this process and nothing that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


def _note_signals() -> list[int]:
    """Those that ask for an end, from now on; they do nothing else."""
    noted: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda given, _: noted.append(given))
    return noted


def _connect(address: str, own_address: str, head: subprocess.Popen[bytes] | None, output: IO[bytes]) -> RayNodes:
    """As soon as Ray answers."""
    from dovetail.cluster.ray_backend import RayNodes, is_reachable

    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_reachable(address):
        if head is not None and head.poll() is not None:
            raise DovetailError(f"Ray ended with {head.returncode} at {address}: {_last_words(output)}")
        if time.monotonic() > deadline or head is None:
            raise DovetailError(f"no Ray cluster at {address}")
        time.sleep(_POLL_S)
    return RayNodes(address, own_address)


def join(
    address: Annotated[str, typer.Argument(help="Where the head said that machines join, as 10.0.0.5:6379.")],
    name: Annotated[str | None, typer.Option(help="Of the node.  [default: this machine's]")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="0 = every core.", min=0)] = 0,
    memory: Annotated[str | None, typer.Option(help="Weights and KV, as 8GiB.  [default: most of it]")] = None,
    host: Annotated[str | None, typer.Option(help="This machine's address in the network of the cluster.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Where models are kept here.  [default: $DOVETAIL_HOME, ~/.cache/dovetail]")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Of models that are kept here, as 200GB: those used longest ago make room.")
    ] = None,
) -> None:
    """Serve with this machine, until it leaves (`dovetail leave NODE` at the head) or this command is ended.

    Example: dovetail join 10.0.0.5:6379 --name left --threads 16
    """
    from dovetail.cluster.ray_backend import start_member, stop_ray

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    values: dict[str, Any] = {"name": name or platform.node(), "device": device, "threads": threads}
    if memory is not None:
        values["memory"] = parsed(parse_size, memory, "--memory")
    limit = None if max_size is None else parsed(parse_size, max_size, "--max-size")
    try:
        node = NodeConfig.model_validate(values)
    except ValueError as error:
        raise ConfigError(f"join: {error}") from error
    check_nodes([node])
    ended = _note_signals()
    if not _await_head(address, ended):
        return
    typer.echo(f"{node.name} joins {address}; it serves when `dovetail nodes` says that it is up (pid {os.getpid()})")
    description = node.model_dump(mode="json", exclude_unset=True)
    environment = _store_environment(store, limit)
    for attempt in range(MAX_ATTEMPTS):
        with tempfile.TemporaryFile() as output:
            process = start_member(address, description, host, output, environment)
            while not ended and process.poll() is None:
                time.sleep(_POLL_S)
            stop_ray(process)
            if ended:
                typer.echo(f"{node.name} has left {address}")
                return
            why = f"Ray ended with {process.returncode}, for {address}: {_last_words(output)}"
        logger.warning("attempt %d of %d: %s", attempt + 1, MAX_ATTEMPTS, why)
    raise DovetailError(why)


def _await_head(address: str, ended: Sequence[int]) -> bool:
    """False if a signal came first."""
    from dovetail.cluster.ray_backend import is_reachable

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{address!r}: expected the head's address and port, as 10.0.0.5:{RAY_PORT}")
    deadline = time.monotonic() + HEAD_TIMEOUT_S
    is_told = False
    while not ended and not is_reachable(address):
        if time.monotonic() > deadline:
            raise DovetailError(
                f"no head at {address}: nothing has listened there for {HEAD_TIMEOUT_S:g} s. Start `dovetail up "
                f"--cluster-host {host} --cluster-port {port}` on that machine, or check the address and the firewall"
            )
        if not is_told:
            logger.warning("nothing listens at %s yet; waiting up to %g s for the head", address, HEAD_TIMEOUT_S)
            is_told = True
        time.sleep(_POLL_S)
    return not ended


def _store_environment(store: Path | None, limit_bytes: int | None) -> dict[str, str]:
    """What a worker here is to know of this machine's disk."""
    given = {} if store is None else {HOME_VARIABLE: str(store.expanduser().resolve())}
    return given if limit_bytes is None else {**given, STORE_LIMIT_VARIABLE: str(limit_bytes)}


def _last_words(output: IO[bytes]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it said nothing"
