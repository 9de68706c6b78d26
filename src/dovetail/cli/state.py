"""`--state`: a folder of this machine, or etcd for several gateways of which one leads."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.config import Config, is_secret_state
from dovetail.machine import hide_argument

if TYPE_CHECKING:
    from dovetail.cluster.durable import Durable
    from dovetail.gateway.admin.admin import Admin
    from dovetail.gateway.batches.offer import Batches

logger = logging.getLogger("dovetail.gateway")

DEPOSED_CODE = 75  # "try again": a service manager restarts it, and it waits

State = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="A folder, or etcd://HOST:PORT/PREFIX for several gateways of which one leads: after a server that was "
        "killed, the next one finds its workers, with their models.",
        show_default=False,
    ),
]


def hide_secret(state: str | None) -> str | None:
    """A password on the command line is made unreadable there."""
    if state is not None and is_secret_state(state):
        hide_argument(state)
        logger.warning("the password in --state was readable for a moment; better is server.state in the file")
    return state


def state_folder(state: str, config: Config) -> Path:
    """Of this machine: where gateways of one state find local workers and fronts."""
    from dovetail.gateway.workers.etcd import is_etcd, parse_address
    from dovetail.gateway.workers.etcd_state import machine_id

    if not is_etcd(state):
        return Path(state)
    name = f"{parse_address(state)} {machine_id()}"  # the store may be several machines'
    return config.store.profiles.parent / f"etcd-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


async def open_state(config: Config, listener: socket.socket, *, as_json: bool) -> Durable | None:
    """With etcd it returns when this gateway leads."""
    from dovetail.cluster.durable import SqliteDurable
    from dovetail.gateway.http.listen import base_url
    from dovetail.gateway.http.tls import Tls
    from dovetail.gateway.workers.etcd import is_etcd, parse_address
    from dovetail.gateway.workers.etcd_state import EtcdDurable
    from dovetail.gateway.workers.standby import wait_to_lead

    state = config.server.state
    if state is None:
        return None
    folder = state_folder(state, config)
    if not is_etcd(state):
        return SqliteDurable(folder)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each call
    tls = config.server.tls
    url = base_url(listener, is_https=tls is not None)
    durable = EtcdDurable(parse_address(state), folder, f"{url} on {socket.gethostname()}, pid {os.getpid()}")
    try:
        await asyncio.to_thread(durable.check)
        await wait_to_lead(
            durable, listener, Tls(tls) if tls is not None else None, lambda: _say_waiting(url, as_json=as_json)
        )
        await asyncio.to_thread(durable.start, leave)
    finally:
        if not durable.is_leading:
            await asyncio.to_thread(durable.close)
    logger.info("leads (%s)", durable.address)
    return durable


def open_batches(config: Config, admin: Admin, durable: Durable | None, *, is_front: bool) -> Batches:
    """A front leaves them to the gateway that decides."""
    from dovetail.gateway.batches.offer import Batches, batch_folder

    folder = None if is_front else batch_folder(config, durable.folder if durable is not None else None)
    batches = Batches.open(folder, admin.service, admin.settings)
    if folder is not None and batches.problem is not None:
        logger.warning("no batches are taken: %s", batches.problem)
    return batches


def _say_waiting(url: str, *, as_json: bool) -> None:
    text = json.dumps({"url": url, "waiting": True}) if as_json else f"Waiting at {url}: another gateway leads."
    print(text, flush=True)


def leave(why: str) -> None:
    """It was deposed. As if it had been killed: its workers and fronts are for the one that leads."""
    logger.critical("deposed: %s. This gateway ends, its workers stay for the one that leads", why)
    logging.shutdown()
    os._exit(DEPOSED_CODE)
