"""Items from the parts of an answer, with the events that tell of each as it grows. Whole answers are built the same
way, so that a streamed response is the whole one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from dovetail.gateway.http.chat_reply import new_call_id
from dovetail.gateway.http.replies import TokenEntry
from dovetail.gateway.http.responses.items import (
    CustomToolCall,
    ErrorText,
    FunctionCall,
    McpCall,
    McpError,
    McpListTools,
    OutputItem,
    OutputMessage,
    OutputText,
    Reasoning,
    ReasoningText,
    Status,
)
from dovetail.gateway.http.responses.tools import NO_TOOLS, ToolSet, custom_input
from dovetail.gateway.text.reading import CallDelta, Parts

Event = dict[str, Any]  # type, and the fields that the API has for it


class OutputBuilder:
    def __init__(self, tools: ToolSet = NO_TOOLS) -> None:
        """`tools`: which names of functions stand for something else."""
        self._tools = tools
        self.items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._call = -1  # index of the open call
        self._to_do: list[McpCall] = []  # calls that are whole and wait to be made

    def feed(self, parts: Parts, logprobs: list[TokenEntry]) -> Iterator[Event]:
        if parts.reasoning:
            yield from self._add_reasoning(parts.reasoning)
        if parts.content:
            yield from self._add_text(parts.content, logprobs)
        for call in parts.calls:
            yield from self._add_call(call)

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """What is open has ended."""
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, McpCall) and status == "completed":
            self._to_do.append(item)
            yield {"type": "response.mcp_call_arguments.done", **self._where(item), "arguments": item.arguments}
            return
        assert not isinstance(item, McpListTools)
        item.status = status
        where = self._where(item)
        if isinstance(item, FunctionCall):
            yield {
                "type": "response.function_call_arguments.done",
                **where,
                "name": item.name,
                "arguments": item.arguments,
            }
        elif isinstance(item, CustomToolCall):
            item.input = custom_input(item.input)
            yield {"type": "response.custom_tool_call_input.delta", **where, "delta": item.input}
            yield {"type": "response.custom_tool_call_input.done", **where, "input": item.input}
        elif isinstance(item, OutputMessage):
            part = item.content[0]
            where["content_index"] = 0
            yield {
                "type": "response.output_text.done",
                **where,
                "text": part.text,
                "logprobs": part.logprobs,
            }
            yield {"type": "response.content_part.done", **where, "part": part}
        elif isinstance(item, Reasoning):
            yield {"type": "response.reasoning_text.done", **where, "content_index": 0, "text": item.content[0].text}
        yield self._done(item)

    def list_tools(self, item: McpListTools) -> Iterator[Event]:
        yield from self._begin(item)
        for state in ("in_progress", "completed"):
            yield {"type": f"response.mcp_list_tools.{state}", **self._where(item)}
        self._open = None
        yield self._done(item)

    def take_calls(self) -> list[McpCall]:
        """Those that are to be made before the answer goes on, which is then another round of the model's."""
        calls, self._to_do, self._call = self._to_do, [], -1
        return calls

    @property
    def waits_for_client(self) -> bool:
        """The model has asked for something that the client has to do."""
        return any(isinstance(item, FunctionCall | CustomToolCall) for item in self.items)

    def made(self, call: McpCall, text: str, *, is_error: bool) -> Iterator[Event]:
        """What came of a call."""
        call.status = "failed" if is_error else "completed"
        if is_error:
            call.error = McpError(content=[ErrorText(text=text)])
        else:
            call.output = text
        yield {"type": f"response.mcp_call.{call.status}", **self._where(call)}
        yield self._done(call)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, Reasoning):
            yield from self._begin(Reasoning(id=_id("rs"), content=[ReasoningText()]))
        item = self._open
        assert isinstance(item, Reasoning)
        item.content[0].text += text
        yield {"type": "response.reasoning_text.delta", **self._where(item), "content_index": 0, "delta": text}

    def _add_text(self, text: str, logprobs: list[TokenEntry]) -> Iterator[Event]:
        if not isinstance(self._open, OutputMessage):
            yield from self._begin(OutputMessage(id=_id("msg")))
            message = self._open
            assert isinstance(message, OutputMessage)
            message.content.append(OutputText())
            place = {**self._where(message), "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": OutputText().model_dump()}
        item = self._open
        assert isinstance(item, OutputMessage)
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        told = {"delta": text, "logprobs": logprobs}
        yield {"type": "response.output_text.delta", **self._where(item), "content_index": 0, **told}

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if call.index != self._call:
            self._call = call.index
            yield from self._begin(self._new_call(call.name or ""))
        item = self._open
        if isinstance(item, CustomToolCall):  # a text within JSON: told of when it is whole
            item.input += call.arguments
            return
        assert isinstance(item, FunctionCall | McpCall)
        item.arguments += call.arguments
        if call.arguments:
            kind = "mcp_call" if isinstance(item, McpCall) else "function_call"
            yield {"type": f"response.{kind}_arguments.delta", **self._where(item), "delta": call.arguments}

    def _new_call(self, name: str) -> FunctionCall | CustomToolCall | McpCall:
        known, call_id = self._tools.known.get(name), f"call_{new_call_id()}"
        if known is None:
            return FunctionCall(id=_id("fc"), call_id=call_id, name=name)
        own, namespace = known.tool.name or name, known.namespace
        if known.is_mcp:
            return McpCall(id=_id("mcp"), server_label=namespace or "", name=own)
        if known.is_custom:
            return CustomToolCall(id=_id("ctc"), call_id=call_id, name=own, namespace=namespace)
        return FunctionCall(id=_id("fc"), call_id=call_id, name=own, namespace=namespace)

    def _begin(self, item: OutputItem) -> Iterator[Event]:
        yield from self.close()
        self._open = item
        self.items.append(item)
        shown = item.model_dump() | ({"content": []} if isinstance(item, Reasoning) else {})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}
        if isinstance(item, McpCall):
            yield {"type": "response.mcp_call.in_progress", **self._where(item)}

    def _where(self, item: OutputItem) -> Event:
        return {"item_id": item.id, "output_index": self._index(item)}

    def _done(self, item: OutputItem) -> Event:
        return {"type": "response.output_item.done", "output_index": self._index(item), "item": item}

    def _index(self, item: OutputItem) -> int:
        return next(at for at, one in enumerate(self.items) if one is item)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
