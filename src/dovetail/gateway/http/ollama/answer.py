"""A job's answer as Ollama's clients read it: one JSON object, or one per line while it comes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Literal

from dovetail.errors import RequestError
from dovetail.gateway.generation_task import Delta
from dovetail.gateway.http.answers import TokenNames
from dovetail.gateway.http.problems import ollama_problem
from dovetail.gateway.http.replies import Usage
from dovetail.gateway.http.shaped import AnswerEnd
from dovetail.gateway.text.reading import Parts
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import FinishReason

Kind = Literal["chat", "generate"]


def ended(kind: Kind, model: str, reason: str, figures: dict[str, int] | None = None) -> dict[str, Any]:
    return {**_head(model), **_said(kind, Parts()), "done": True, "done_reason": reason, **(figures or {})}


class OllamaShape:
    """Of one answer: an object, or a line per piece. A call is told of when it is whole."""

    headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/x-ndjson")]  # noqa: RUF012

    def __init__(self, job: GenerationRequest, kind: Kind, *, with_logprobs: bool = False) -> None:
        self._job = job
        self._kind = kind
        self._names = TokenNames(job.model.vocabulary, as_ids=False) if with_logprobs else None
        self._reports: list[dict[str, Any]] = []
        self._whole = Parts()

    def add(self, parts: Parts, delta: Delta, usage: Usage) -> bytes:
        self._whole.add(parts)
        reports = self._logprobs(delta)
        self._reports += reports
        if not (parts.content or parts.reasoning or reports):
            return b""
        said = _said(self._kind, Parts(parts.content, parts.reasoning)) | ({"logprobs": reports} if reports else {})
        return self._line(said)

    def end(self, ended: AnswerEnd) -> bytes:
        calls = Parts(calls=self._whole.calls)
        return (self._line(_said(self._kind, calls)) if calls else b"") + _line(self._last(ended))

    def problem(self, error: RequestError) -> bytes:
        return ollama_problem(error) + b"\n"

    def whole(self, ended: AnswerEnd) -> bytes:
        logprobs = {"logprobs": self._reports} if self._reports else {}
        return _line(self._last(ended) | _said(self._kind, self._whole) | logprobs)

    def _line(self, said: dict[str, Any]) -> bytes:
        return _line({**_head(self._job.model.name), **said, "done": False})

    def _logprobs(self, delta: Delta) -> list[dict[str, Any]]:
        if self._names is None:
            return []
        return [entry.model_dump() for entry in self._names.chat(delta.logprobs).content]

    def _last(self, ended_: AnswerEnd) -> dict[str, Any]:
        """With durations in nanoseconds."""
        waits, used = ended_.waits, ended_.usage
        first_s, load_s = (waits.first_token, waits.load) if waits else (0.0, 0.0)
        figures = {
            "total_duration": _nanoseconds(ended_.total_s),
            "load_duration": _nanoseconds(load_s),
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - load_s),
            "eval_count": used.completion_tokens,
            "eval_duration": _nanoseconds(ended_.total_s - first_s),
        }
        reason = "length" if ended_.finish is FinishReason.LENGTH else "stop"
        last = ended(self._kind, self._job.model.name, reason, figures)
        return last | ({"warnings": list(self._job.warnings)} if self._job.warnings else {})


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _said(kind: Kind, parts: Parts) -> dict[str, Any]:
    thoughts = {"thinking": parts.reasoning} if parts.reasoning else {}
    if kind == "generate":
        return {"response": parts.content, **thoughts}
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in _calls(parts)]
    return {
        "message": {"role": "assistant", "content": parts.content, **thoughts}
        | ({"tool_calls": calls} if calls else {})
    }


def _calls(parts: Parts) -> list[tuple[str, dict[str, Any]]]:
    """One that was cut short is not told of: its clients read objects."""
    names = {call.index: call.name for call in parts.calls if call.name is not None}
    found = []
    for index, name in names.items():
        text = "".join(call.arguments for call in parts.calls if call.index == index)
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            found.append((name, arguments))
    return found


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)
