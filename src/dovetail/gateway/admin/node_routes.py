"""The nodes under `/api/nodes`: which there are, and emptying one without breaking an answer."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.gateway.admin.node_states import NodeState, NodeStates, find_node, node_state, node_states
from dovetail.gateway.http.endpoint import json_response, responses
from dovetail.gateway.service import Service

_ERRORS = (401, 403, 404)


def make_node_router(service: Service) -> APIRouter:
    endpoints = NodeEndpoints(service)
    router = APIRouter(prefix="/api/nodes")
    one = responses(NodeState, _ERRORS)
    router.add_api_route("", endpoints.list_nodes, methods=["GET"], responses=responses(NodeStates, (401,)))
    router.add_api_route("/{name}", endpoints.show, methods=["GET"], responses=responses(NodeState, (401, 404)))
    router.add_api_route("/{name}/drain", endpoints.drain, methods=["POST"], responses=one)
    router.add_api_route("/{name}/leave", endpoints.leave, methods=["POST"], responses=one)
    router.add_api_route("/{name}/resume", endpoints.resume, methods=["POST"], responses=one)
    return router


class NodeEndpoints:
    def __init__(self, service: Service) -> None:
        self._cluster = service.cluster
        self._check_leading = service.check_leading

    async def list_nodes(self) -> Response:
        """Every node: whether it is up, what it serves."""
        return json_response(node_states(self._cluster))

    async def show(self, name: str) -> Response:
        """One node."""
        return json_response(node_state(self._cluster, name))

    async def drain(self, name: str) -> Response:
        """Nothing new goes there, and what it answers goes on elsewhere, unbroken. Its state says when it is empty."""
        self._check_leading()
        self._cluster.drain(find_node(self._cluster, name).name)
        return json_response(node_state(self._cluster, name))

    async def leave(self, name: str) -> Response:
        """The same, and a machine that has joined leaves when it is empty."""
        self._check_leading()
        self._cluster.leave(find_node(self._cluster, name).name)
        return json_response(node_state(self._cluster, name))

    async def resume(self, name: str) -> Response:
        """Take a node that was drained into service again."""
        self._check_leading()
        self._cluster.undrain(find_node(self._cluster, name).name)
        return json_response(node_state(self._cluster, name))
