"""A job's answer as Anthropic's clients read it: one message, or the events that build it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from dovetail.errors import RequestError
from dovetail.gateway.generation_task import Delta
from dovetail.gateway.http.anthropic.request import CALL_PREFIX
from dovetail.gateway.http.chat_reply import new_call_id
from dovetail.gateway.http.problems import anthropic_problem
from dovetail.gateway.http.replies import Usage
from dovetail.gateway.http.respond import EVENTS
from dovetail.gateway.http.shaped import AnswerEnd
from dovetail.gateway.text.reading import CallDelta, Parts
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import FinishReason

Event = dict[str, Any]


class Blocks:
    """Content blocks from the parts of an answer, with the events that tell of each as it grows."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._blocks: list[Event] = []
        self._arguments = ""  # of the call that is open, as JSON
        self._call = -1  # index of the open call
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return self._call >= 0

    @property
    def blocks(self) -> list[Event]:
        """After `close`."""
        assert not self._is_open
        return self._blocks

    def feed(self, parts: Parts) -> Iterator[Event]:
        if parts.reasoning:
            yield from self._grow("thinking", parts.reasoning, {"thinking": "", "signature": ""})
        if parts.content:
            yield from self._grow("text", parts.content, {"text": ""})
        for call in parts.calls:
            yield from self._add_call(call)

    def close(self) -> Iterator[Event]:
        """What is open has ended."""
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        elif block["type"] == "thinking":  # nobody checks it; clients send back only thoughts that have one
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _grow(self, kind: str, text: str, empty: Event) -> Iterator[Event]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind, **empty})
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index != self._call:
            self._call = call.index
            id = CALL_PREFIX + self._new_id()
            yield from self._begin({"type": "tool_use", "id": id, "name": call.name or "", "input": {}})
            self._arguments = ""
        self._arguments += call.arguments
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _begin(self, block: Event) -> Iterator[Event]:
        yield from self.close()
        self._is_open = True
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


class MessageShape:
    """Of one answer."""

    headers = EVENTS

    def __init__(self, job: GenerationRequest, *, max_tokens: int, new_id: Callable[[], str] = new_call_id) -> None:
        self._job = job
        self._max_tokens = max_tokens
        self._blocks = Blocks(new_id)
        self._has_begun = False

    def add(self, parts: Parts, delta: Delta, usage: Usage) -> bytes:
        opening = b"" if self._has_begun else self._opening(usage)
        self._has_begun = True
        return opening + b"".join(map(_event, self._blocks.feed(parts)))

    def end(self, ended: AnswerEnd) -> bytes:
        opening = b"" if self._has_begun else self._opening(ended.usage)
        reason, sequence = self._stop(ended)
        last = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence}}
        closing = [*self._blocks.close(), last | {"usage": _usage(ended.usage)}, {"type": "message_stop"}]
        return opening + b"".join(map(_event, closing))

    def problem(self, error: RequestError) -> bytes:
        return b"event: error\ndata: " + anthropic_problem(error) + b"\n\n"

    def whole(self, ended: AnswerEnd) -> bytes:
        list(self._blocks.close())
        reason, sequence = self._stop(ended)
        body = self._message(ended.usage) | {"content": self._blocks.blocks}
        return _json(body | {"stop_reason": reason, "stop_sequence": sequence})

    def _opening(self, usage: Usage) -> bytes:
        return _event({"type": "message_start", "message": self._message(usage)}) + _event({"type": "ping"})

    def _message(self, usage: Usage) -> Event:
        message: Event = {
            "id": f"msg_{self._job.id}",
            "type": "message",
            "role": "assistant",
            "model": self._job.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }
        return message | ({"warnings": list(self._job.warnings)} if self._job.warnings else {})

    def _stop(self, ended: AnswerEnd) -> tuple[str, str | None]:
        if ended.finish is FinishReason.LENGTH:
            is_cut = self._job.requests[0].sampling.max_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_cut else "max_tokens"), None
        if self._blocks.has_calls:
            return "tool_use", None
        if isinstance(ended.stop_reason, str) and ended.stop_reason in self._job.stops:
            return "stop_sequence", ended.stop_reason
        return "end_turn", None


def _object(arguments: str) -> Event:
    """Of a call; what was cut short is given as it is."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {"INVALID_JSON": arguments}
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _usage(usage: Usage) -> Event:
    """Anthropic counts tokens that were read from a cache apart."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _event(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + _json(event) + b"\n\n"


def _json(value: Event) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")
