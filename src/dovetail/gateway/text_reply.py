"""Plain completions from a job's deltas, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.gateway.answers import Answer, ReplyOptions, TextOffsets, TokenNames, TokenReport, finish_of
from dovetail.gateway.replies import TextChoice, TextCompletion, TextLogprobs, Usage
from dovetail.gateway.run import Delta
from dovetail.gateway.translate import Job


class TextReply:
    """Speaks plain completions for one job. `echoes` are the prompts as text, where the client wants them back."""

    def __init__(self, job: Job, created: int, options: ReplyOptions, *, echoes: Sequence[str] = ()) -> None:
        self._job = job
        self._created = created
        self._options = options
        self._echoes = echoes
        self._names = TokenNames(job.model.vocabulary, as_ids=options.tokens_as_ids)
        self._offsets: dict[int, TextOffsets] = {}  # by choice
        self._opened: set[int] = set()

    def chunk(self, delta: Delta, usage: Usage | None = None) -> str | None:
        text = delta.text
        is_first = delta.index not in self._opened
        if is_first:
            self._opened.add(delta.index)
            text = self._echo(delta.index) + text
        choice = TextChoice(
            index=delta.index,
            text=text,
            logprobs=self._logprobs(delta.index, delta.logprobs),
            finish_reason=finish_of(delta.finish),
        )
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        self._add_ids(choice, delta.tokens, with_prompt=is_first)
        return self._dump([choice], usage if self._options.with_usage_always else None)

    def usage_chunk(self, usage: Usage) -> str:
        return self._dump([], usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> str:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        return self._body(choices, usage).model_dump_json(exclude_unset=True)

    def _whole_choice(self, index: int, answer: Answer) -> TextChoice:
        choice = TextChoice(
            index=index,
            text=self._echo(index) + "".join(answer.text),
            logprobs=self._logprobs(index, answer.logprobs),
            finish_reason=finish_of(answer.finish) or "stop",
            stop_reason=answer.stop_reason,
        )
        self._add_ids(choice, answer.tokens, with_prompt=True)
        return choice

    def _add_ids(self, choice: TextChoice, tokens: list[int], *, with_prompt: bool) -> None:
        if self._options.with_token_ids:
            choice.token_ids = tokens
            if with_prompt:
                choice.prompt_token_ids = list(self._job.requests[self._order(choice.index)].prompt)

    def _order(self, index: int) -> int:
        """Which prompt a choice belongs to."""
        return index // self._job.requests[0].num_choices

    def _echo(self, index: int) -> str:
        return self._echoes[self._order(index)] if self._echoes else ""

    def _dump(self, choices: list[TextChoice], usage: Usage | None) -> str:
        body = self._body(choices, usage)
        if not self._options.with_usage:
            body.model_fields_set.discard("usage")
        return body.model_dump_json(exclude_unset=True)

    def _body(self, choices: list[TextChoice], usage: Usage | None) -> TextCompletion:
        return TextCompletion(
            id=f"cmpl-{self._job.id}",
            object="text_completion",
            created=self._created,
            model=self._job.model.name,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, index: int, entries: Sequence[TokenReport]) -> TextLogprobs | None:
        if not self._options.with_logprobs:
            return None
        if index not in self._offsets:
            self._offsets[index] = TextOffsets(
                self._job.model.vocabulary,
                start=len(self._echo(index)),
                skip_special_tokens=self._job.skip_special_tokens,
            )
        return self._names.text(entries, self._offsets[index])
