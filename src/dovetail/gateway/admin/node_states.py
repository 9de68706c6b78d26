"""What `/api/nodes` says of each node: whether it is up, what it serves, whether it is being emptied."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from dovetail.cluster.request import placed_on
from dovetail.errors import NodeNotFound
from dovetail.gateway.cluster import Cluster
from dovetail.gateway.http.replies import NodeCondition
from dovetail.gateway.workers.client import WorkerState


class NodeState(BaseModel):
    name: str
    device: str
    state: NodeCondition
    problem: str | None = Field(default=None, description="of a failed one: why it is not started again")
    pid: int | None
    unfinished: int = Field(description="requests that it is answering")
    moving_away: int = Field(description="of them, those that another node recomputes in order to go on with them")
    memory_bytes: int = Field(description="for weights and KV pools")
    free_bytes: int
    models: list[str] = Field(description="that have an instance there")


class NodeStates(BaseModel):
    object: Literal["list"] = "list"
    data: list[NodeState]
    migrations: int = Field(description="requests that went on elsewhere, unbroken, since the server started")
    migrations_abandoned: int = Field(description="that came to nothing: the request had ended, or nobody took it")


def node_states(cluster: Cluster) -> NodeStates:
    migrations = cluster.controller.migrations
    data = [_node_state(cluster, node) for node in cluster.link.nodes.values()]
    return NodeStates(data=data, migrations=migrations.completed, migrations_abandoned=migrations.abandoned)


def node_state(cluster: Cluster, name: str) -> NodeState:
    return _node_state(cluster, find_node(cluster, name))


def find_node(cluster: Cluster, name: str) -> WorkerState:
    node = cluster.link.nodes.get(name)
    if node is None:
        known = ", ".join(cluster.link.nodes)
        raise NodeNotFound(f"there is no node '{name}'; there are: {known}", code="node_not_found", param="name")
    return node


def condition(cluster: Cluster, node: WorkerState) -> NodeCondition:
    drain, state = cluster.controller.drains.get(node.name), cluster.link.state_of(node)
    if drain is None or state != "up":
        return state
    return "drained" if drain.is_done else "draining"


def _node_state(cluster: Cluster, node: WorkerState) -> NodeState:
    controller, handle = cluster.controller, cluster.remote.nodes[node.name]
    return NodeState(
        name=node.name,
        device=node.hello.device if node.hello else node.config.device,
        state=condition(cluster, node),
        problem=cluster.link.supervisors[node.name].unusable,
        pid=cluster.link.pid_of(node),
        unfinished=len(placed_on(controller.works.values(), handle)),
        moving_away=len(controller.migrations.of_source(handle)),
        memory_bytes=handle.memory_bytes,
        free_bytes=handle.view.free_bytes if handle.view is not None else handle.memory_bytes,
        models=list(node.instances),
    )
