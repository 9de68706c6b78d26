"""Responses that the server remembers, so that the next one can go on with them: in memory, as JSON, so that the bytes
that are counted are the bytes that are held. The key that holds most loses its oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import TypeAdapter

from dovetail.errors import ResponseNotFound
from dovetail.gateway.http.api import Message
from dovetail.gateway.http.responses.items import InputItems
from dovetail.gateway.http.responses.request import Item

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 1024 * 1024
_OVERHEAD_BYTES = 1024  # of an entry beside its JSON, for the interpreter

_MESSAGES = TypeAdapter(list[Message])


@dataclass(frozen=True)
class StoredResponse:
    id: str
    owner: str  # name of the API key; no other key sees it
    background: bool
    record: bytes  # as it was answered
    items: bytes  # the list of what it was asked with, as it is answered
    conversation: bytes  # all messages before the next response's, but for instructions

    @property
    def size_bytes(self) -> int:
        return len(self.record) + len(self.items) + len(self.conversation) + _OVERHEAD_BYTES


def encode_items(items: Sequence[Item]) -> bytes:
    data = [
        {"id": f"item_{at}", "type": "message"} | item.model_dump(exclude_none=True) for at, item in enumerate(items)
    ]
    return InputItems(data=data, first_id="item_0", last_id=f"item_{len(data) - 1}").model_dump_json().encode()


def encode_messages(messages: Sequence[Message]) -> bytes:
    return _MESSAGES.dump_json(list(messages), exclude_unset=True)


def append_messages(conversation: bytes, messages: Sequence[Message]) -> bytes:
    """Without reading what is there, which is a list of at least one."""
    return conversation[:-1] + b"," + encode_messages(messages)[1:] if messages else conversation


def decode_messages(conversation: bytes) -> tuple[Message, ...]:
    return tuple(_MESSAGES.validate_json(conversation))


@dataclass
class _Share:
    """Of one key, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    size_bytes: int = 0

    def remove(self, id: str) -> StoredResponse:
        response = self.responses.pop(id)
        self.size_bytes -= response.size_bytes
        assert self.size_bytes >= 0
        return response


class ResponseStore:
    """A key alone may fill all of it; where several do, each keeps at least its equal part."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._shares: dict[str, _Share] = {}
        self._count = 0

    @property
    def size_bytes(self) -> int:
        return sum(share.size_bytes for share in self._shares.values())

    def add(self, response: StoredResponse) -> None:
        """Another one of the same id gives way."""
        self._discard(response.owner, response.id)
        share = self._shares.setdefault(response.owner, _Share())
        share.responses[response.id] = response
        share.size_bytes += response.size_bytes
        self._count += 1
        while self._count > self._max_responses:
            self._evict(max(self._shares, key=lambda owner: len(self._shares[owner].responses)))
        while self.size_bytes > self._max_bytes:
            self._evict(max(self._shares, key=lambda owner: self._shares[owner].size_bytes))

    def get(self, id: str, owner: str) -> StoredResponse:
        share = self._shares.get(owner)
        if share is None or id not in share.responses:
            raise ResponseNotFound(
                f"Response with id {id[:128]!r} not found.", param="response_id", code="response_not_found"
            )
        return share.responses[id]

    def remove(self, id: str, owner: str) -> None:
        self._discard(owner, self.get(id, owner).id)

    def _evict(self, owner: str) -> None:
        self._discard(owner, next(iter(self._shares[owner].responses)))

    def _discard(self, owner: str, id: str) -> None:
        share = self._shares.get(owner)
        if share is not None and id in share.responses:
            share.remove(id)
            self._count -= 1
            if not share.responses:
                del self._shares[owner]
