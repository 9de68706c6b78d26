"""What clients' requests have said so far, token for token, and the stream that each goes to.

The controller has a record of each choice (`request.RequestState`), which refers to its tokens here; what it decides
never depends on which tokens they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from dovetail.errors import RequestError
from dovetail.types import Request, TokenEvent

ENDED = -1  # group of a request that is not open any more


class Stream(Protocol):
    """Where one request's events go."""

    def began(self, placed_s: float) -> None:
        """The first event follows, of a choice that has had a place since then."""

    def put(self, event: TokenEvent, now: float) -> None: ...

    def fail(self, error: RequestError) -> None:
        """The request has ended with this error."""

    def resumed(self) -> None:
        """Its node was lost, and it goes on elsewhere."""

    def closed(self) -> None:
        """No further event comes."""


class OpenChoice:
    """One open choice of a request."""

    __slots__ = ("id", "is_open", "number", "owner", "tokens")

    def __init__(self, owner: OpenRequest, id: int, number: int) -> None:
        self.owner = owner
        self.id = id  # by which controller and nodes know it
        self.number = number
        self.tokens = list(owner.request.generated_by(number) or ())
        self.is_open = True

    def body(self, *, is_isolated: bool = False) -> Request:
        """The request with this choice alone, as far as it has come; what a node is given."""
        request = self.owner.request
        if self.tokens or request.num_choices > 1:
            said = tuple(tuple(self.tokens) if at == self.number else None for at in range(request.num_choices))
            request = msgspec.structs.replace(request, generated=said)
        return msgspec.structs.replace(request, isolated=True) if is_isolated else request


class OpenRequest:
    """One request of a client, while a choice of it is open."""

    __slots__ = ("choices", "group", "has_begun", "request", "stream")

    def __init__(self, request: Request, stream: Stream, group: int) -> None:
        self.request = request
        self.stream = stream
        self.group = group  # number of its first choice
        self.has_begun = False  # an event has come
        self.choices = tuple(OpenChoice(self, id, number) for id, number in enumerate(request.open_choices, group))

    def choice(self, number: int) -> OpenChoice | None:
        """None if it has ended."""
        return next((one for one in self.choices if one.number == number and one.is_open), None)

    @property
    def open(self) -> list[OpenChoice]:
        return [one for one in self.choices if one.is_open]


class OpenRequests:
    """By the names that they have from their clients' side."""

    def __init__(self) -> None:
        self._by_name: dict[str, OpenRequest] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> OpenRequest | None:
        return self._by_name.get(name)

    def begin(self, request: Request, stream: Stream, group: int) -> OpenRequest:
        assert request.id not in self._by_name, f"two requests are called {request.id}"
        opened = self._by_name[request.id] = OpenRequest(request, stream, group)
        return opened

    def of_model(self, model: str) -> list[OpenRequest]:
        return [one for one in self._by_name.values() if one.request.model == model]

    def all(self) -> list[OpenRequest]:
        return list(self._by_name.values())

    def groups(self, names: Iterable[str]) -> frozenset[int]:
        """Numbers of their first choices; of those that have ended ENDED."""
        return frozenset(self._by_name[name].group if name in self._by_name else ENDED for name in names)

    def end(self, choice: OpenChoice) -> None:
        """Nothing more comes of the choice; with the last one the request is over."""
        choice.is_open = False
        owner = choice.owner
        if not owner.open:
            del self._by_name[owner.request.id]
            owner.stream.closed()
