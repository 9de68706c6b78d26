"""What a server keeps of files and batches, as it is stored. Times are Unix seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
Ending = Literal["completed", "expired", "cancelled"]
Api = Literal["openai", "anthropic"]

# Other names of endpoints, as files of vLLM's `run-batch` have them.
ENDPOINT_ALIASES = {"/score": "/v1/score", "/rerank": "/v1/rerank", "/v2/rerank": "/v1/rerank"}

# Codes of lines that were never answered, in the file of errors.
EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
ENDED: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
MAX_PROBLEMS = 100  # of one file; looking for more ends there


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str  # name of the API key; empty = there were none
    filename: str  # as its owner calls it; never a path here
    purpose: str
    size_bytes: int
    created_s: int
    expires_s: int | None = None
    is_hidden: bool = False  # of a batch whose requests came without a file


class LineProblem(msgspec.Struct, frozen=True):
    """Why a file cannot be a batch."""

    message: str
    code: str
    line: int | None = None  # counted from 1
    param: str | None = None


class Counts(msgspec.Struct, frozen=True):
    """Lines of one batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0  # answered with an error
    expired: int = 0  # not answered in time
    cancelled: int = 0

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.expired + self.cancelled


class BatchUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    owner: str
    api: Api
    endpoint: str
    input_file: str
    output_file: str  # ids that its files have once they are offered
    error_file: str
    completion_window: str
    created_s: int
    expires_s: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None  # after the end of the batch
    status: Status = "validating"
    ends_as: Ending = "completed"  # what it becomes when its files are closed
    problems: tuple[LineProblem, ...] = ()
    models: tuple[str | None, ...] = ()  # that its lines name
    counts: Counts = Counts()  # when it has ended; until then they are in its files
    usage: BatchUsage = BatchUsage()
    began_s: int | None = None
    finalizing_s: int | None = None
    cancelling_s: int | None = None
    ended_s: int | None = None

    @property
    def is_over(self) -> bool:
        return self.status in ENDED
