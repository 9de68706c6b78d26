"""`front`: one more gateway for a server on this machine. Its only node is the gateway that decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import zmq

from dovetail.cli.serve import (
    ApiKey,
    LocalWeights,
    OpenToNetwork,
    Plan,
    listen_for,
    override_with,
    run_loop,
    serve_plan,
)
from dovetail.cli.state import hide_secret, state_folder
from dovetail.cli.tls import TlsCert, TlsKey, tls_config
from dovetail.config import Config, NodeConfig, load_config

if TYPE_CHECKING:
    from dovetail.cluster.durable import Durable
    from dovetail.gateway.workers.client import WorkerClient
    from dovetail.gateway.workers.fronts import Registration
    from dovetail.messages import Hello

LEADER_TIMEOUT_S = 60.0  # for which a stream waits while there is no leading gateway


def front(
    state: Annotated[str, typer.Argument(help="What the leading gateway was given as --state.")],
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="As for the leading gateway's `serve`.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="The leading gateway's dovetail.yaml.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.  [default: 127.0.0.1]")] = None,
    port: Annotated[int, typer.Option(help="0 = any free one.", min=0, max=65535)] = 8001,
    api_key: ApiKey = None,
    open_to_network: OpenToNetwork = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    store: Annotated[Path | None, typer.Option(help="Where models are kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say that it is ready in JSON, on one line.")] = False,
) -> None:
    """Answer clients beside a server that was started with --state: more streams, and none is lost when that is killed
    and started again.

    Example: dovetail serve --state /var/lib/dovetail, and then: dovetail front /var/lib/dovetail --port 8001
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    server = {
        "host": host,
        "port": port,
        "open_to_network": open_to_network or None,
        "tls": tls_config(tls_cert, tls_key),
    }
    ours = override_with(server, {}, api_key, store, None)

    def override(settings: Config) -> Config:
        settings = ours(settings)
        waits_s = max(settings.server.resume_timeout, LEADER_TIMEOUT_S)
        given = settings.server.model_copy(update={"state": None, "resume_timeout": waits_s})
        kept = settings.store.model_copy(update={"host_pool": 0, "verify": "off"})
        return settings.model_copy(update={"nodes": (), "server": given, "store": kept})

    settings = override(load_config(config) if config is not None else Config())
    plan = Plan(settings, tuple(dict.fromkeys(models or ())), config, override, as_json)
    folder = state_folder(str(hide_secret(state)), settings)
    run_loop(serve_plan(plan, listen_for(settings), Leader(folder)))


class Leader:
    """A `serve.OtherMachines`: the gateway that decides, as the one node of this one."""

    is_front = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute() / "fronts"
        self._link: WorkerClient | None = None
        self._registration: Registration | None = None

    def attach(
        self, link: WorkerClient, options: Sequence[str], durable: Durable | None, weights: LocalWeights
    ) -> None:
        from dovetail.gateway.workers.client import router_socket
        from dovetail.gateway.workers.fronts import Registration

        registration = self._registration = Registration(self._folder)

        def bind(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
            socket = router_socket(context)
            socket.bind(registration.address)
            return socket

        link.listen(bind)
        self._link = link

    def start(self, is_drained: Callable[[str], bool]) -> None:
        from dovetail.gateway.workers.fronts import LEADER

        assert self._link is not None
        assert self._registration is not None
        self._link.add(NodeConfig(name=LEADER), LeaderWatcher())
        self._registration.publish()

    async def close(self) -> None:
        if self._registration is not None:
            self._registration.close()


class LeaderWatcher:
    """A `client.Watcher` of a process that another process starts and ends."""

    def __init__(self) -> None:
        self.starts = 0
        self.unusable: str | None = None
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pid: int | None = None
        self.retry_after_s: float | None = None

    def start(self) -> None:
        return

    def expects(self, hello: Hello) -> bool:
        self.pid = hello.pid
        return True

    def on_hello(self) -> None:
        self.starts += 1
        if not self.greeted.done():
            self.greeted.set_result(None)

    async def stop(self) -> None:
        return
