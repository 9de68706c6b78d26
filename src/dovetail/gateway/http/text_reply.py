"""Plain completions from a job's deltas, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.gateway.generation_task import Delta
from dovetail.gateway.http.answers import (
    CollectedChoice,
    Frame,
    ReplyOptions,
    TextOffsets,
    TokenNames,
    TokenReport,
    UsageCount,
    finish_of,
    joined,
)
from dovetail.gateway.http.echoes import Echo
from dovetail.gateway.http.replies import TextChoice, TextCompletion, TextLogprobs, Usage
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import TokenLogprobs


@dataclass(frozen=True)
class TextForm:
    """What a plain completion shows of prompts and choices."""

    echoes: Sequence[Echo] = ()  # the prompts as text, where the client wants them back
    prompt_only: bool = False  # nothing but them
    num_kept: int | None = None  # of each prompt's choices, the likeliest by token; None = all
    is_ranked: bool = False  # choices come as the likeliest first


class TextReply:
    """Speaks plain completions for one job."""

    def __init__(
        self, job: GenerationRequest, created: int, options: ReplyOptions, form: TextForm | None = None
    ) -> None:
        self._job = job
        self._created = created
        self._options = options
        self._form = form or TextForm()
        self._names = TokenNames(job.model.vocabulary, as_ids=options.tokens_as_ids)
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._opened: set[int] = set()
        self._frames: dict[int, Frame] = {}  # by choice

    def shown(self, delta: Delta) -> Delta:
        if self._form.prompt_only:
            delta.text, delta.tokens, delta.logprobs = "", [], []
        return delta

    def chunk(self, delta: Delta, usage: UsageCount) -> TextCompletion | bytes:
        """As JSON already, where that is at hand."""
        text = delta.text
        is_first = delta.index not in self._opened
        if self._options.is_plain and delta.finish is None and not is_first:
            return self._frame(delta.index).around(text)
        if is_first:
            self._opened.add(delta.index)
            text = self._echo(delta.index) + text
        choice = TextChoice(
            index=delta.index,
            text=text,
            logprobs=self._logprobs(delta.index, delta.logprobs, delta.prompt_logprobs if is_first else None),
            finish_reason=finish_of(delta.finish),
        )
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        self._add_ids(choice, delta.tokens, with_prompt=is_first)
        chunk = self._chunk([choice], usage.total() if self._options.with_usage_always else None)
        return self._warned(chunk) if is_first else chunk

    def _frame(self, index: int) -> Frame:
        if index not in self._frames:
            choice = TextChoice(index=index, text=Frame.ANY_TEXT, logprobs=None, finish_reason=None)
            self._frames[index] = Frame(self._chunk([choice], None))
        return self._frames[index]

    def usage_chunk(self, usage: Usage) -> TextCompletion:
        return self._chunk([], usage)

    def whole(self, answers: Sequence[CollectedChoice], usage: Usage) -> TextCompletion:
        choices = [
            self._whole_choice(index, at, answers) for index, at in enumerate(self._kept(answers))
        ]  # fmt: skip
        return self._warned(self._body(choices, usage))

    def _warned(self, body: TextCompletion) -> TextCompletion:
        if self._job.warnings:
            body.warnings = list(self._job.warnings)
        return body

    def _kept(self, answers: Sequence[CollectedChoice]) -> list[int]:
        """Which choices are shown, in order."""
        count = self._job.requests[0].num_choices
        keep = self._form.num_kept
        if keep is None or keep == count:
            return list(range(len(answers)))
        kept: list[int] = []
        for first in range(0, len(answers), count):
            own = range(first, first + count)
            ranked = own if self._form.is_ranked else sorted(own, key=lambda at: -_mean_logprob(answers[at]))
            kept += ranked[:keep]
        return kept

    def _whole_choice(self, index: int, at: int, answers: Sequence[CollectedChoice]) -> TextChoice:
        answer, order = answers[at], self._order(at)
        read = answers[order * self._job.requests[0].num_choices].prompt_logprobs
        choice = TextChoice(
            index=index,
            text=self._echo(at) + "".join(answer.text),
            logprobs=self._logprobs(at, answer.logprobs, read),
            finish_reason=finish_of(answer.finish) or "stop",
            stop_reason=answer.stop_reason,
            prompt_logprobs=None,  # these are said where there are none, too: clients of vLLM look at them
            prompt_token_ids=None,
        )
        self._add_ids(choice, answer.tokens, with_prompt=True, order=order)
        if self._options.with_prompt_logprobs:
            choice.prompt_logprobs = self._names.prompt(self._job.requests[order].prompt, read or ())
        return choice

    def _add_ids(self, choice: TextChoice, tokens: list[int], *, with_prompt: bool, order: int | None = None) -> None:
        if self._options.with_token_ids:
            choice.token_ids = tokens
            if with_prompt:
                order = self._order(choice.index) if order is None else order
                choice.prompt_token_ids = list(self._job.requests[order].prompt)

    def _order(self, index: int) -> int:
        """Which prompt a choice belongs to."""
        return index // self._job.requests[0].num_choices

    def _echo(self, index: int) -> str:
        return self._form.echoes[self._order(index)].text if self._form.echoes else ""

    def _chunk(self, choices: list[TextChoice], usage: Usage | None) -> TextCompletion:
        body = self._body(choices, usage)
        if not self._options.with_usage:
            body.model_fields_set.discard("usage")
        return body

    def _body(self, choices: list[TextChoice], usage: Usage | None) -> TextCompletion:
        body = TextCompletion(
            id=f"cmpl-{self._job.id}",
            object="text_completion",
            created=self._created,
            model=self._job.model.name,
            choices=choices,
            usage=usage,
        )
        if self._options.service_tier is not None:
            body.service_tier = self._options.service_tier
        return body

    def _logprobs(
        self, index: int, entries: Sequence[TokenReport], read: Sequence[TokenLogprobs] | None
    ) -> TextLogprobs | None:
        """Of an echoed prompt too; `read` is what is known of it."""
        if not self._options.with_logprobs:
            return None
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self._job.model.vocabulary, skip_special_tokens=self._job.skip_special_tokens
            )
        offsets, order = self._offsets[index], self._order(index)
        tokens = [token for token, _ in entries]
        if not self._form.echoes or read is None:
            return self._names.text(entries, offsets.of_answer(tokens))
        prompt = self._job.requests[order].prompt
        echo = self._names.echo(prompt, read, offsets.of_prompt(prompt, self._form.echoes[order].num_unseen))
        return joined(echo, self._names.text(entries, offsets.of_answer(tokens)))


def _mean_logprob(answer: CollectedChoice) -> float:
    """By token, as OpenAI ranks them."""
    values = [logprobs.chosen for _, logprobs in answer.logprobs]
    return sum(values) / len(values) if values else float("-inf")
