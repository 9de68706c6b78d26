"""A model that the nodes were told of, as the gateway sees it: who offers it, where it is ready, who waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dovetail.errors import RequestError
from dovetail.messages import Load, Loaded
from dovetail.types import ModelCard

OTHERS_S = 0.25  # after a first node has offered a new model, so long the others may take for their answers


def _future() -> asyncio.Future[Loaded]:
    ready: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
    ready.add_done_callback(_retrieve)
    return ready


def _retrieve(future: asyncio.Future[Loaded]) -> None:
    """A load that nobody waits for may fail without asyncio complaining that nobody looked."""
    if not future.cancelled():
        future.exception()


@dataclass(eq=False)
class HostedModel:
    load: Load  # as the nodes were told last
    ready: asyncio.Future[Loaded] = field(default_factory=_future)  # fails with the error that waiting requests get
    num_requests: int = 0  # unfinished
    has_served: bool = False
    was_waited_for: bool = False  # a request came before it was loaded anywhere: a cold start
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while no request is unfinished
    # Every node that was told of it has answered once, or one has and the others are late.
    known: asyncio.Event = field(default_factory=asyncio.Event)
    _awaited: set[str] = field(default_factory=set)  # nodes that have not answered yet
    _has_offer: bool = False  # of one node at least
    _num_waiting: int = 0  # jobs that wait until it is known

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def card(self) -> ModelCard:
        return self.load.card

    @property
    def loaded(self) -> Loaded | None:
        """As it is ready somewhere."""
        done = self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None
        return self.ready.result() if done else None

    def told(self, node: str) -> None:
        if not self.known.is_set():
            self._awaited.add(node)

    def offered(self, node: str) -> None:
        self._awaited.discard(node)
        if not self._awaited:
            self.known.set()
        elif not self._has_offer:  # a node in a long iteration does not delay requests everywhere
            self._has_offer = True
            asyncio.get_running_loop().call_later(OTHERS_S, self.known.set)

    def not_there(self, node: str) -> None:
        """The node is gone. Who waits goes on waiting if nobody else is left to answer: it comes back."""
        if len(self._awaited) > 1:
            self._awaited.discard(node)

    def became_ready(self, loaded: Loaded) -> None:
        if not self.ready.done():
            self.ready.set_result(loaded)

    def no_longer_ready(self) -> None:
        if self.ready.done():
            self.ready = _future()

    def fail(self, error: RequestError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        self.known.set()

    @property
    def is_wanted(self) -> bool:
        return self.num_requests > 0 or self._num_waiting > 0

    async def wait_until_known(self) -> None:
        """Raises what it failed with."""
        self._num_waiting += 1
        self.idle.clear()
        try:
            await self.known.wait()
        finally:
            self._num_waiting -= 1
            self._look_idle()
        if self.ready.done() and self.ready.exception() is not None:
            self.ready.result()

    def _look_idle(self) -> None:
        if not self.is_wanted:
            self.idle.set()

    def begin(self) -> None:
        self.was_waited_for |= self.loaded is None
        self.num_requests += 1
        self.has_served = True
        self.idle.clear()

    def end(self) -> None:
        self.num_requests -= 1
        self._look_idle()
