"""Renders chat templates in a confined process: `python -m` of this module. What a template may do is `chat`'s."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from dovetail.confined import serve
from dovetail.errors import InvalidRequest
from dovetail.gateway.text.chat import ChatTemplate, TemplateText

TEXT, ERROR = b"t", b"e"


def render_chat(request: bytes) -> bytes:
    try:
        order: dict[str, Any] = json.loads(request)
        text = _template(*order.pop("template")).render(**order)
    except InvalidRequest as error:
        return _problem(error.message, error.param, error.code)
    except RecursionError:
        return _problem("messages are nested too deeply for the chat template")
    except MemoryError:
        return _problem("the chat template needs too much memory on these messages")
    return TEXT + text.encode(errors="replace")  # half a character is none


def _problem(message: str, param: str | None = "messages", code: str | None = "chat_template_error") -> bytes:
    return ERROR + json.dumps([message, param, code]).encode()


@lru_cache(maxsize=64)
def _template(name: str, text: str, bos_token: str, eos_token: str) -> ChatTemplate:
    return ChatTemplate(TemplateText(name, text, bos_token, eos_token))


if __name__ == "__main__":
    serve(render_chat)
