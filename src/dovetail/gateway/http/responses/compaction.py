"""A conversation in fewer words: what `/v1/responses/compact` asks the model, and the item that carries its summary.

The item's content is opaque to clients, which send it back as they got it. It holds nothing but the caller's own words.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Sequence
from typing import Any

from dovetail.errors import InvalidRequest, RequestError
from dovetail.gateway.generation_task import Delta
from dovetail.gateway.http.replies import Usage
from dovetail.gateway.http.respond import EVENTS
from dovetail.gateway.http.shaped import AnswerEnd
from dovetail.gateway.text.reading import Parts

ASK = (
    "Summarise the conversation so far, so that the work can go on without it: what was asked for, what was decided "
    "and done, which files, commands and results matter, and what is left to do. Answer with the summary alone."
)
MAX_TOKENS = 1024  # of a summary
_MARK = b"dovetail-summary-1\n"
_LEAD = "Summary of the conversation so far:"


class CompactionShape:
    """The answer: what the user said, and the summary of all."""

    headers = EVENTS

    def __init__(self, id: str, kept: Sequence[dict[str, Any]]) -> None:
        self._id = id
        self._kept = kept
        self._summary: list[str] = []

    def add(self, parts: Parts, delta: Delta, usage: Usage) -> bytes:
        self._summary.append(parts.content)
        return b""

    def end(self, ended: AnswerEnd) -> bytes:
        return b""

    def problem(self, error: RequestError) -> bytes:
        return b""

    def whole(self, ended: AnswerEnd) -> bytes:
        summary = "".join(self._summary).strip()
        item = {"id": f"cmp_{self._id}", "type": "compaction", "encrypted_content": packed(summary)}
        used = ended.usage
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.prompt_tokens_details.cached_tokens},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used.total_tokens,
        }
        answer = {"id": f"resp_{self._id}", "object": "response.compaction", "created_at": int(time.time())}
        return json.dumps(answer | {"output": [*self._kept, item], "usage": usage}).encode()


def packed(summary: str) -> str:
    return base64.b64encode(_MARK + summary.encode()).decode()


def summary_of(content: str | None, where: str) -> str:
    """The words of an item that this server, or another one of its kind, has made."""
    try:
        text = base64.b64decode(content or "", validate=True)
        if not text.startswith(_MARK):
            raise ValueError
        return f"{_LEAD}\n{text.removeprefix(_MARK).decode()}"
    except (ValueError, binascii.Error):
        raise InvalidRequest("a compaction has the encrypted_content that it was given here", param=where) from None
