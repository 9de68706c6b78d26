"""`/v1/conversations`: items that several responses go on with, kept in the server's memory; the oldest go first."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from dovetail.errors import InvalidRequest, ResponseNotFound
from dovetail.gateway.http.api import FAIL_FAST
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.http.endpoint import documented, read_body, request_body
from dovetail.gateway.http.responses.request import Item, responses_messages

MAX_CONVERSATIONS = 1024
MAX_ITEMS = 4096  # of one conversation
MAX_BYTES = 64 * 1024 * 1024  # of all of them together


class NewItems(StrictBody):
    items: Annotated[list[Item], FAIL_FAST] = Field(default_factory=list, max_length=20)


class NewConversation(NewItems):
    metadata: dict[str, str] | None = None


class NewMetadata(StrictBody):
    metadata: dict[str, str]


@dataclass
class Conversation:
    id: str
    owner: str  # name of the API key; nobody else sees it
    created: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)
    size_bytes: int = 0

    def record(self) -> dict[str, Any]:
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}

    @property
    def parsed(self) -> list[Item]:
        return [Item.model_validate(item) for item in self.items]


class Conversations:
    def __init__(self, max_conversations: int = MAX_CONVERSATIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_conversations, self._max_bytes = max_conversations, max_bytes
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        self._bytes = 0

    def create(self, owner: str, items: Sequence[Item], metadata: dict[str, str]) -> Conversation:
        conversation = Conversation(f"conv_{uuid.uuid4().hex}", owner, int(time.time()), metadata)
        self._kept[conversation.id] = conversation
        self.extend(conversation, items)
        return conversation

    def get(self, id: str, owner: str) -> Conversation:
        found = self._kept.get(id)
        if found is None or found.owner != owner:
            raise ResponseNotFound(
                f"Conversation with id {id[:128]!r} not found.", param="conversation", code="conversation_not_found"
            )
        return found

    def extend(self, conversation: Conversation, items: Sequence[Item]) -> list[dict[str, Any]]:
        """As they are kept, each with an id. What nobody could answer is refused."""
        responses_messages(items)
        added = [{"id": f"msg_{uuid.uuid4().hex}", "type": "message"} | _plain(item) for item in items]
        if len(conversation.items) + len(added) > MAX_ITEMS:
            raise InvalidRequest(f"a conversation has at most {MAX_ITEMS} items", param="items")
        conversation.items += added
        self._resize(conversation, sum(len(str(item)) for item in added))
        self._kept.move_to_end(conversation.id)
        while len(self._kept) > self._max_conversations or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self.remove(next(iter(self._kept.values())))
        return added

    def go_on(self, conversation: Conversation, asked: Sequence[Item], said: Sequence[Item]) -> None:
        """After an answer, unless it was deleted meanwhile. What is too much goes from the beginning."""
        if conversation.id not in self._kept:
            return
        new = [*asked, *said][-MAX_ITEMS:]
        dropped = conversation.items[: max(len(conversation.items) + len(new) - MAX_ITEMS, 0)]
        del conversation.items[: len(dropped)]
        self._resize(conversation, -sum(len(str(item)) for item in dropped))
        self.extend(conversation, new)

    def drop_item(self, conversation: Conversation, item_id: str) -> None:
        kept = [item for item in conversation.items if item["id"] != item_id]
        if len(kept) == len(conversation.items):
            raise ResponseNotFound(f"Item with id {item_id[:128]!r} not found.", param="item_id")
        conversation.items = kept
        self._resize(conversation, sum(len(str(item)) for item in kept) - conversation.size_bytes)

    def remove(self, conversation: Conversation) -> None:
        self._bytes -= conversation.size_bytes
        del self._kept[conversation.id]
        assert self._bytes >= 0

    def _resize(self, conversation: Conversation, by: int) -> None:
        conversation.size_bytes += by
        self._bytes += by


def _plain(item: Item) -> dict[str, Any]:
    return item.model_dump(exclude_none=True)


def make_conversations_router(conversations: Conversations) -> APIRouter:
    endpoints = ConversationEndpoints(conversations)
    router = APIRouter()
    one = "/v1/conversations/{conversation_id}"
    for path, method, handler, body in (
        ("/v1/conversations", "POST", endpoints.create, NewConversation),
        (one, "GET", endpoints.show, None),
        (one, "POST", endpoints.change, NewMetadata),
        (one, "DELETE", endpoints.delete, None),
        (f"{one}/items", "GET", endpoints.list_items, None),
        (f"{one}/items", "POST", endpoints.add_items, NewItems),
        (f"{one}/items/{{item_id}}", "DELETE", endpoints.delete_item, None),
    ):
        extra = {"requestBody": request_body(body)} if body is not None else None
        answers = documented((400, 401, 404, 413, 415, 429))
        router.add_api_route(path, handler, methods=[method], openapi_extra=extra, responses=answers)
    return router


class ConversationEndpoints:
    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    async def create(self, request: Request) -> Response:
        """Begin a conversation."""
        body = await read_body(NewConversation, request)
        return JSONResponse(self._conversations.create(_owner(request), body.items, body.metadata or {}).record())

    async def show(self, conversation_id: str, request: Request) -> Response:
        """A conversation, without its items."""
        return JSONResponse(self._find(conversation_id, request).record())

    async def change(self, conversation_id: str, request: Request) -> Response:
        """Set the metadata of a conversation."""
        body = await read_body(NewMetadata, request)
        conversation = self._find(conversation_id, request)
        conversation.metadata = body.metadata
        return JSONResponse(conversation.record())

    async def delete(self, conversation_id: str, request: Request) -> Response:
        """Forget a conversation."""
        self._conversations.remove(self._find(conversation_id, request))
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, conversation_id: str, request: Request) -> Response:
        """What was said, the newest first unless ?order=asc."""
        items = self._find(conversation_id, request).items
        return _listed(items if request.query_params.get("order") == "asc" else items[::-1])

    async def add_items(self, conversation_id: str, request: Request) -> Response:
        """Add items to a conversation."""
        body = await read_body(NewItems, request)
        return _listed(self._conversations.extend(self._find(conversation_id, request), body.items))

    async def delete_item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        """Take one item out of a conversation."""
        conversation = self._find(conversation_id, request)
        self._conversations.drop_item(conversation, item_id)
        return JSONResponse(conversation.record())

    def _find(self, id: str, request: Request) -> Conversation:
        return self._conversations.get(id, _owner(request))


def _listed(items: Sequence[dict[str, Any]]) -> Response:
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return JSONResponse({"object": "list", "data": list(items), "first_id": first, "last_id": last, "has_more": False})


def _owner(request: Request) -> str:
    key: str = request.scope.get("state", {}).get("key", "")
    return key
