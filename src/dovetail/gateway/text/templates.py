"""Chat templates of all models, rendered by processes that may take so much time and memory and no more.

A template is a program that came with a model. Two processes share the work, so that what is slow keeps only its kind
waiting: what is long, and what took too long lately, has a process of its own. Clients take turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dovetail.confined import Bounds, Confined, Exceeded, Lane
from dovetail.errors import InvalidRequest, Overloaded
from dovetail.gateway.clients import current_client
from dovetail.gateway.text.chat import TemplateText
from dovetail.gateway.text.chat_child import ERROR

# A conversation takes less than a millisecond, a template that came with a model may take two seconds.
BOUNDS = Bounds(cpu_s=2.0, wall_s=20.0, memory_bytes=512 << 20, niceness=5)
_SLOW_FOR_S = 60.0  # after it took too long
_LONG_CHARS = 64 << 10
_MANY_MESSAGES = 256
_SLOW_NICENESS = 10  # who waits for it waits anyway; streams go on meanwhile


class Templates:
    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._quick = Lane(Confined("dovetail.gateway.text.chat_child", bounds))
        gives_way = dataclasses.replace(bounds, niceness=_SLOW_NICENESS)
        self._slow = Lane(Confined("dovetail.gateway.text.chat_child", gives_way))
        self._slow_until: dict[str, float] = {}  # by template

    def warm(self) -> None:
        """Start what the first conversation would wait for."""
        self._quick.warm()

    async def render(self, template: TemplateText, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """`options` as of `ChatTemplate.render`. Every failure is an InvalidRequest that names the template."""
        order = _encoded({"template": template, "messages": messages, **options})
        lane = self._lane(template.text, order, len(messages))
        client = current_client.get()
        if lane.is_full(client):
            raise Overloaded("too many conversations wait for their template", code="queue_full", retry_after_s=2)
        try:
            answer = await lane.call(order, client)
        except Exceeded as error:
            self._slow_until[template.text] = asyncio.get_running_loop().time() + _SLOW_FOR_S
            if error.is_wall:
                what = f"the messages could not be rendered now: {error.what}"
                raise Overloaded(what, code="template_timeout", retry_after_s=5) from error
            raise InvalidRequest(
                f"the chat template of '{template.name}' does not come to an end on these messages: {error.what}",
                param="messages",
                code="chat_template_error",
            ) from error
        if answer[:1] == ERROR:
            message, param, code = json.loads(answer[1:])
            raise InvalidRequest(message, param=param, code=code)
        return answer[1:].decode()

    def _lane(self, template: str, order: bytes, num_messages: int) -> Lane:
        until = self._slow_until.get(template)
        if until is not None and until < asyncio.get_running_loop().time():
            del self._slow_until[template]
            until = None
        is_long = len(order) > _LONG_CHARS + len(template) or num_messages > _MANY_MESSAGES
        return self._slow if is_long or until is not None else self._quick


def _encoded(order: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(order)
    except RecursionError:
        raise InvalidRequest("messages are nested too deeply for the chat template", param="messages") from None
    except (OverflowError, UnicodeEncodeError, TypeError):  # numbers and halves of characters that only Python knows
        return json.dumps(order).encode()


templates = Templates()  # one for all models: the processes are shared
