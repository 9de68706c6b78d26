"""Responses that the server remembers, so that the next one can go on with them: in memory, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dovetail.errors import ResponseNotFound
from dovetail.gateway.api import Message
from dovetail.gateway.responses.items import ResponseRecord
from dovetail.gateway.responses.request import Item

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 1024 * 1024  # of their text


@dataclass(frozen=True)
class StoredResponse:
    record: ResponseRecord
    items: tuple[Item, ...]  # what this response was asked with
    conversation: tuple[Message, ...]  # all that was said before the next one, but for instructions
    owner: str  # name of the API key; nobody else sees it
    size_bytes: int


class ResponseStore:
    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def add(self, response: StoredResponse) -> None:
        self._stored[response.record.id] = response
        self._bytes += response.size_bytes
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._bytes -= oldest.size_bytes
        assert self._bytes >= 0

    def get(self, id: str, owner: str) -> StoredResponse:
        found = self._stored.get(id)
        if found is None or found.owner != owner:
            raise ResponseNotFound(
                f"Response with id {id[:128]!r} not found.", param="response_id", code="response_not_found"
            )
        return found

    def remove(self, id: str, owner: str) -> None:
        self._bytes -= self.get(id, owner).size_bytes
        del self._stored[id]
