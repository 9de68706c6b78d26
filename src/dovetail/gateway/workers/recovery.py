"""What a server has decided, written down as it comes about, and given back to the one that is started after it (L8).

Models on a node are assigned when the node says that it starts them and confirmed when they are ready. Workers that
outlived their gateway say themselves what they have; what was confirmed elsewhere is started again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from dovetail.cluster.durable import Durable
from dovetail.config import ModelConfig
from dovetail.errors import WorkerLost
from dovetail.gateway.cluster import Cluster
from dovetail.gateway.workers.client import WorkerClient
from dovetail.messages import Hello, Loaded, LoadFailed, Reclaimed, Said, ToGateway, Unloaded
from dovetail.node.protocol import NodeView

JOIN_S = 2.0  # from the first machine that joins a new server to the others that were there before
PLACEMENT, DRAIN, MODEL = "placement", "drain", "model"
ASSIGNED, CONFIRMED = "assigned", "confirmed"


class Recovery:
    def __init__(self, durable: Durable, cluster: Cluster) -> None:
        self._durable = durable
        self._cluster = cluster
        self._states = {name: str(value) for name, value in durable.all(PLACEMENT).items()}
        # Models that were ready when the last server ended.
        self.ready_before = tuple(
            dict.fromkeys(name.rpartition("@")[0] for name, state in self._states.items() if state == CONFIRMED)
        )
        cluster.link.observers.append(self._on_message)
        cluster.link.exit_observers.append(self._on_exit)
        cluster.link.join_observers.append(self._empty_again)
        cluster.link.leave_observers.append(lambda node: durable.drop(DRAIN, node))
        cluster.on_drain = self._on_drain
        for node in cluster.link.nodes:
            self._empty_again(node)

    # Nodes that are emptied

    def _on_drain(self, node: str, how: str) -> None:
        if how:
            self._durable.put(DRAIN, node, how)
        else:
            self._durable.drop(DRAIN, node)

    def _empty_again(self, node: str) -> None:
        how = self._durable.get(DRAIN, node)
        if how == "leave":
            self._cluster.leave(node)
        elif how is not None:
            self._cluster.drain(node)

    # Models on nodes

    def _on_message(self, node: str, message: ToGateway) -> None:
        if isinstance(message, Loaded):
            self._set(message.model, node, CONFIRMED)
        elif isinstance(message, Reclaimed | Unloaded | LoadFailed):
            self._drop(f"{message.model}@{node}")
        elif isinstance(message, Said):
            for notice in message.notices:
                if isinstance(notice, NodeView):
                    self._look(node, notice)

    def _look(self, node: str, view: NodeView) -> None:
        for instance in view.instances:
            if f"{instance.model}@{node}" not in self._states:
                self._set(instance.model, node, ASSIGNED)

    def _on_exit(self, node: str, lost: WorkerLost) -> None:
        if not lost.is_cut:
            for name in [name for name in self._states if name.rpartition("@")[2] == node]:
                self._drop(name)

    def _set(self, model: str, node: str, state: str) -> None:
        name = f"{model}@{node}"
        if self._states.get(name) != state:
            self._states[name] = state
            self._durable.put(PLACEMENT, name, state)

    def _drop(self, name: str) -> None:
        if self._states.pop(name, None) is not None:
            self._durable.drop(PLACEMENT, name)


async def until_joined(link: WorkerClient) -> None:
    """Machines that outlived the last server join one after the other, each with its models."""
    if any(node.hello is not None for node in link.nodes.values()):
        return
    joined = asyncio.Event()

    def look(node: str, message: ToGateway) -> None:
        if isinstance(message, Hello):
            joined.set()

    link.observers.append(look)
    try:
        await joined.wait()
    finally:
        link.observers.remove(look)
    await asyncio.sleep(JOIN_S)


class Changes:
    """Models that came, changed and went while the server ran; None = it went."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable

    def note(self, name: str, config: ModelConfig | None) -> None:
        self._durable.put(MODEL, name, None if config is None else config.model_dump(mode="json", by_alias=True))

    def flush(self) -> None:
        self._durable.flush()

    def forget(self, names: Iterable[str]) -> None:
        """The file says what becomes of these."""
        for name in names:
            self._durable.drop(MODEL, name)

    def all(self) -> dict[str, ModelConfig | None]:
        facts = self._durable.all(MODEL)
        return {name: None if fact is None else ModelConfig.model_validate(fact) for name, fact in facts.items()}
