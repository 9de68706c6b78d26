"""A worker between two gateways: what it gives up, what it keeps, and what the next one has to be told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from dovetail.messages import Loaded
from dovetail.node.protocol import Idle, Withdraw
from dovetail.worker.driver import NodeDriver
from dovetail.worker.wire import Wire

log = logging.getLogger("dovetail.worker")

RETRY_S = 0.25  # how often it is looked whether a gateway is there again


def withdraw_all(driver: NodeDriver) -> None:
    """Whoever asked is gone, and whoever goes on with it asks anew."""
    for id in list(driver.states):
        driver.obey(Withdraw(id))
    driver.take_report()
    driver.carry_out()


def say_again(driver: NodeDriver) -> None:
    """Somebody is there who knows nothing of this node."""
    driver.home.mailbox.append(Idle(driver.home.is_idle))
    driver.home.version += 1  # so that its view is told


def wait_for_gateway(wire: Wire, beat: Callable[[], None], patience_s: float, is_orphan: Callable[[], bool]) -> bool:
    """False: none came in time."""
    until = time.monotonic() + patience_s
    log.warning("the gateway is gone; one is waited for, %.0f s at most", patience_s)
    while not wire.connect(RETRY_S):
        beat()
        if time.monotonic() >= until or is_orphan():
            return False
    return True


class ReadyModels:
    """What was said of models that are ready, and of which of them the gateway that is there now has not heard."""

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}
        self._unsaid: set[str] = set()

    def add(self, loaded: Loaded) -> Loaded:
        self._loaded[loaded.model] = loaded
        return loaded

    def remove(self, model: str) -> None:
        self._loaded.pop(model, None)

    def cut(self, models: Iterable[str]) -> None:
        """The gateway that knew of these is gone."""
        self._unsaid = set(models)

    def again(self, model: str, driver: NodeDriver) -> Loaded | None:
        """The gateway speaks of a model: what it has to hear of it, if that is news to it."""
        if model not in self._unsaid:
            return None
        self._unsaid.discard(model)
        say_again(driver)
        is_ready = bool(driver.instances_of(model)) and model in self._loaded
        return msgspec.structs.replace(self._loaded[model], again=True) if is_ready else None
