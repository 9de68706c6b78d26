"""Fetches missing models from other machines before they are loaded, one at a time, most urgent first, and serves this
machine's models to the others. Only workers that joined from another machine do either.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dovetail import messages
from dovetail.errors import DovetailError
from dovetail.machine import default_root
from dovetail.node.events import StartLoad
from dovetail.store.format.manifest import TOKENIZER, is_stored, read_manifest
from dovetail.store.paths import StorePaths
from dovetail.store.sources.neighbour import Neighbour
from dovetail.store.sources.neighbour_fetch import FetchCancelled, ModelFetch, Wanted
from dovetail.store.sources.weight_server import WeightServer, address_towards
from dovetail.types import ModelCard
from dovetail.worker.driver import NodeDriver
from dovetail.worker.due_queue import DueQueue

log = logging.getLogger("dovetail.worker")

_NAME_CHARS = 100  # of a folder, before the digits that tell it from others


class Fetched(NamedTuple):
    """What has come of a fetch."""

    seconds: float = 0.0
    error: str = ""
    is_cancelled: bool = False
    tier: Literal["neighbour", "remote"] = "neighbour"  # where it came from


class _Current(NamedTuple):
    command: StartLoad
    card: ModelCard
    fetch: ModelFetch


class Fetcher:
    """`fetch` queues a command; `on_end` is called once for each, from the fetcher's thread."""

    def __init__(
        self, root: Path, token: bytes, limit_bytes: int | None, on_end: Callable[[StartLoad, Fetched], None]
    ) -> None:
        self.neighbours: tuple[str, ...] = ()  # addresses, as the gateway told last
        self._paths = StorePaths(root)
        self._token = token
        self._limit_bytes = limit_bytes
        self._on_end = on_end
        self._orders: DueQueue[tuple[StartLoad, tuple[ModelCard, ...]]] = DueQueue()
        self._current: _Current | None = None
        self._asked_for: set[int] = set()  # instances that requests have waited for
        self._thread = threading.Thread(target=self._run, daemon=True, name="fetcher")
        self._thread.start()

    def local(self, card: ModelCard) -> ModelCard:
        """Where this machine has the model or will have it. A name belongs to whoever pulled it here: what is fetched
        has its digest in the name, and stands beside."""
        if not card.digest or _has(Path(card.path), card.digest):
            return card
        name = re.sub("[^A-Za-z0-9_-]+", "-", Path(card.path).name)[:_NAME_CHARS]
        folder = self._paths.folder(f"{name.lstrip('-_') or 'model'}-{card.digest[:12]}")
        return msgspec.structs.replace(card, path=str(folder), tokenizer_file=str(folder / TOKENIZER))

    def lacks(self, *cards: ModelCard) -> bool:
        return any(card.digest and not is_stored(Path(card.path)) for card in cards)

    def fetch(self, command: StartLoad, *cards: ModelCard) -> None:
        """The model, and what drafts for it: nobody needs a draft."""
        self._orders.put(command.due_s, (command, cards))

    @property
    def progress(self) -> messages.Loading | None:
        current = self._current
        if current is None:
            return None
        return messages.Loading(current.command.model, current.fetch.done_bytes, current.card.size_bytes)

    def drop_unwanted(self, num_waiting: Callable[[StartLoad], int | None]) -> None:
        """Cancels the current fetch if no request needs it any more.

        `num_waiting` counts the requests of the instance that the model is fetched for; None: the instance is closed.
        A fetch without requests goes on if it was ordered by name; it is cancelled if its requests have all ended.
        """
        current = self._current
        if current is None:
            return
        count = num_waiting(current.command)
        if count:
            self._asked_for.add(current.command.instance)
        elif count is None or current.command.instance in self._asked_for:
            current.fetch.cancel()

    def stop(self) -> None:
        self._orders.stop()
        if (current := self._current) is not None:
            current.fetch.cancel()

    def _run(self) -> None:
        for command, cards in self._orders:
            started = time.monotonic()
            end = self._fetch_all(command, *cards)
            self._current = None
            self._asked_for.discard(command.instance)
            self._on_end(command, end._replace(seconds=time.monotonic() - started))

    def _fetch_all(self, command: StartLoad, card: ModelCard, *drafts: ModelCard) -> Fetched:
        end = self._fetch(command, card)
        for draft in drafts if not (end.error or end.is_cancelled) else ():
            drafted = self._fetch(command, draft)
            end = end._replace(is_cancelled=drafted.is_cancelled)
        return end

    def _fetch(self, command: StartLoad, card: ModelCard) -> Fetched:
        if not self.lacks(card):
            return Fetched()
        fetch = ModelFetch(self._paths, Wanted(Path(card.path).name, card.digest, self._limit_bytes), self._sources)
        self._current = _Current(command, card, fetch)
        try:
            fetch.run()
        except FetchCancelled as cancelled:
            log.info("%s", cancelled)
            return Fetched(is_cancelled=True)
        except DovetailError as error:
            log.error("%s", error)
            return Fetched(error=str(error))
        except Exception as error:  # whatever a neighbour can do wrong, the worker lives on
            log.error("%s: fetching failed\n%s", card.name, traceback.format_exc())
            return Fetched(error=f"{card.name}: {type(error).__name__}: {error}")
        return Fetched()

    def _sources(self) -> list[Neighbour]:
        return [Neighbour(address, self._token) for address in self.neighbours]


class NeighbourSharing:
    """What a machine that joined has for its neighbours, and from them; of a worker on the gateway's own machine,
    nothing."""

    def __init__(self, gateway: str, keys: str, on_end: Callable[[StartLoad, Fetched], None]) -> None:
        """`keys`: of a worker that joined, else empty."""
        self.fetcher: Fetcher | None = None
        self._server: WeightServer | None = None
        if keys:
            token, root = messages.weights_token(keys), default_root()
            limit = os.environ.get(messages.STORE_LIMIT_VARIABLE)
            self.fetcher = Fetcher(root, token, int(limit) if limit else None, on_end)
            host = gateway.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            self._server = WeightServer(StorePaths(root), token, address_towards(host))

    @property
    def address(self) -> str:
        return self._server.address if self._server is not None else ""

    def heard(self, addresses: tuple[str, ...]) -> None:
        if self.fetcher is not None:
            self.fetcher.neighbours = addresses

    def localised(self, message: messages.Load) -> messages.Load:
        """With the model, and what drafts for it, where this machine has them, or will."""
        if self.fetcher is None:
            return message
        speculation = message.speculation
        if speculation.draft is not None:
            speculation = msgspec.structs.replace(speculation, draft=self.fetcher.local(speculation.draft))
        return msgspec.structs.replace(message, card=self.fetcher.local(message.card), speculation=speculation)

    def lacks(self, card: ModelCard) -> bool:
        """Its tokenizer, too."""
        return self.fetcher is not None and self.fetcher.lacks(card)

    def tend(self, driver: NodeDriver) -> None:
        def num_waiting(command: StartLoad) -> int | None:
            is_open = command.instance in driver.instances_of(command.model)
            return len(driver.home.node.instances[command.instance].works()) if is_open else None

        if self.fetcher is not None:
            self.fetcher.drop_unwanted(num_waiting)

    def close(self) -> None:
        if self.fetcher is not None and self._server is not None:
            self.fetcher.stop()
            self._server.close()


def _has(folder: Path, digest: str) -> bool:
    try:
        return is_stored(folder) and read_manifest(folder).checksum == digest
    except DovetailError:
        return False
