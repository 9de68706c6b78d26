"""Chat completions from a job's deltas, whole or in chunks: both read the text the same way."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.gateway.generation_task import Delta
from dovetail.gateway.http.answers import (
    CollectedChoice,
    Frame,
    ReplyOptions,
    TokenNames,
    TokenReport,
    UsageCount,
    finish_of,
)
from dovetail.gateway.http.replies import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Finish,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from dovetail.gateway.text.reading import MakeReader, Parts, PlainReader, Reader
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import FinishReason


def new_call_id() -> str:
    """Nine letters and digits: what the strictest template (Mistral's) takes for one."""
    return secrets.token_hex(5)[:9]


@dataclass
class _Choice:
    """What is known of one choice of a streamed reply."""

    reader: Reader
    is_open: bool = False  # its role was told
    has_calls: bool = False
    held: list[TokenReport] = field(default_factory=list)  # of text that the reader holds back
    held_tokens: list[int] = field(default_factory=list)
    frame: Frame | None = None  # of chunks with nothing but content


class ChatReply:
    """Speaks chat completions for one job. `echo` is what the answer goes on with, where the client wants it back."""

    def __init__(
        self,
        job: GenerationRequest,
        created: int,
        options: ReplyOptions,
        *,
        make_reader: MakeReader = PlainReader,
        echo: str = "",
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._job = job
        self._created = created
        self._options = options
        self._make_reader = make_reader
        self._echo = echo
        self._new_id = new_id
        self._names = TokenNames(job.model.vocabulary, as_ids=options.tokens_as_ids)
        self._choices: dict[int, _Choice] = {}

    def shown(self, delta: Delta) -> Delta:
        return delta

    def chunk(self, delta: Delta, usage: UsageCount) -> ChatChunk | bytes | None:
        """As JSON already, where that is at hand. None while nothing of it can be shown yet."""
        choice = self._choices.get(delta.index)
        if choice is None:
            choice = self._choices[delta.index] = _Choice(self._make_reader())
        choice.held += delta.logprobs
        choice.held_tokens += delta.tokens
        parts = choice.reader.feed(delta.text)
        if delta.finish is not None:
            parts.add(choice.reader.flush())
        if delta.finish is None and choice.is_open:
            if not parts:
                return None
            if self._options.is_plain and not (parts.reasoning or parts.calls):
                choice.held_tokens.clear()
                choice.frame = choice.frame or self._frame(delta.index)
                return choice.frame.around(parts.content)
        choice.has_calls |= bool(parts.calls)
        told = ChatChunkChoice(
            index=delta.index,
            delta=self._delta(choice, parts),
            logprobs=self._logprobs(choice.held),
            finish_reason=_finish(delta.finish, called=choice.has_calls),
        )
        if delta.stop_reason is not None:
            told.stop_reason = delta.stop_reason
        if self._options.with_token_ids:
            told.token_ids = choice.held_tokens
        choice.held, choice.held_tokens = [], []
        return self._chunk([told], usage.total() if self._options.with_usage_always else None)

    def _frame(self, index: int) -> Frame:
        content = ChatDelta(content=Frame.ANY_TEXT)
        return Frame(
            self._chunk([ChatChunkChoice(index=index, delta=content, logprobs=None, finish_reason=None)], None)
        )

    def _delta(self, choice: _Choice, parts: Parts) -> ChatDelta:
        delta = ChatDelta()
        content = parts.content
        if not choice.is_open:
            choice.is_open = True
            delta.role = "assistant"
            content = self._echo + content
        if content or not (parts.reasoning or parts.calls):
            delta.content = content
        if parts.reasoning:
            delta.reasoning_content = delta.reasoning = parts.reasoning
        if parts.calls:
            delta.tool_calls = [self._call_delta(call.index, call.name, call.arguments) for call in parts.calls]
        return delta

    def _call_delta(self, index: int, name: str | None, arguments: str) -> ToolCallDelta:
        if name is None:
            return ToolCallDelta(index=index, function=CalledFunction(arguments=arguments))
        function = CalledFunction(name=name, arguments=arguments)
        return ToolCallDelta(index=index, id=self._new_id(), type="function", function=function)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return self._chunk([], usage)

    def whole(self, answers: Sequence[CollectedChoice], usage: Usage) -> ChatCompletion:
        completion = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._job.model.name,
            choices=[self._whole_choice(index, answer) for index, answer in enumerate(answers)],
            usage=usage,
            prompt_logprobs=None,  # these are said where there are none, too: clients of vLLM look at them
            prompt_token_ids=None,
        )
        if self._options.service_tier is not None:
            completion.service_tier = self._options.service_tier
        if self._job.warnings:
            completion.warnings = list(self._job.warnings)
        if self._options.with_token_ids:
            completion.prompt_token_ids = list(self._job.requests[0].prompt)
        if self._options.with_prompt_logprobs:
            completion.prompt_logprobs = self._names.prompt(
                self._job.requests[0].prompt, answers[0].prompt_logprobs or ()
            )
        return completion

    def _whole_choice(self, index: int, answer: CollectedChoice) -> ChatChoice:
        reader = self._make_reader()
        parts = reader.feed("".join(answer.text))
        parts.add(reader.flush())
        content = self._echo + parts.content
        message = AssistantMessage(role="assistant", content=content if content or not parts.calls else None)
        if parts.reasoning:
            message.reasoning_content = message.reasoning = parts.reasoning
        if parts.calls:
            message.tool_calls = self._whole_calls(parts)
        choice = ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(answer.logprobs),
            finish_reason=_finish(answer.finish, called=bool(parts.calls)) or "stop",
            stop_reason=answer.stop_reason,
        )
        if self._options.with_token_ids:
            choice.token_ids = answer.tokens
        return choice

    def _whole_calls(self, parts: Parts) -> list[ToolCall]:
        names = {call.index: call.name for call in parts.calls if call.name is not None}
        return [
            ToolCall(
                id=self._new_id(),
                type="function",
                function=CalledFunction(
                    name=name, arguments="".join(call.arguments for call in parts.calls if call.index == index)
                ),
            )
            for index, name in names.items()
        ]

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._job.id}"

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._job.model.name,
            choices=choices,
        )
        if self._options.with_token_ids and choices and choices[0].delta.role is not None:
            chunk.prompt_token_ids = list(self._job.requests[0].prompt)
        if self._options.with_usage:
            chunk.usage = usage
        if self._options.service_tier is not None:
            chunk.service_tier = self._options.service_tier
        if self._job.warnings and choices and choices[0].delta.role is not None:
            chunk.warnings = list(self._job.warnings)
        return chunk

    def _logprobs(self, entries: Iterable[TokenReport]) -> ChatLogprobs | None:
        return self._names.chat(entries) if self._options.with_logprobs else None


def _finish(reason: FinishReason | None, *, called: bool) -> Finish | None:
    """An answer that ended with its calls says so; one that was cut short says that first."""
    finish = finish_of(reason)
    return "tool_calls" if finish == "stop" and called else finish
