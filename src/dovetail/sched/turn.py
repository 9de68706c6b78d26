"""The unit of work: one iteration of one model. A Turn says what to compute, an Outcome what came of it."""

from __future__ import annotations

import msgspec

from dovetail.types import SamplingParams, TokenLogprobs


class TurnRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of an iteration: compute tokens[start:start+count] on top of what the cache holds.

    known tokens   |--------- computed ---------|---- count ----|......... later ........|
                   0                          start        start+count            len(tokens)

    A draft guesses what follows the known tokens. It is computed in the same iteration; of what it guessed rightly the
    keys and values stay, what it guessed wrongly is written over by the next iteration.
    """

    sequence: int  # id, unique within the instance
    tokens: list[int]  # every known token, prompt first; shared with the scheduler, never written to here
    start: int
    count: int
    blocks: list[int]  # block table; covers at least start + count tokens and the draft
    num_prompt: int  # prompt length; what follows in tokens was generated
    sampling: SamplingParams
    samples: bool  # start + count == len(tokens): this row yields the next token
    adapter: str = ""  # key of the adapter that it is computed with; empty = the model as it is
    draft: tuple[int, ...] = ()  # proposed next tokens, to be verified; only of a row of one token that samples

    @property
    def end(self) -> int:
        return self.start + self.count


class Turn(msgspec.Struct, frozen=True, gc=False):
    rows: tuple[TurnRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum([row.count + len(row.draft) for row in self.rows])


class RowOutcome(msgspec.Struct, frozen=True, gc=False):
    """What a sampling row got. Rows that do not sample have none."""

    sequence: int
    token: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False  # the grammar is complete: nothing may follow
    error: str | None = None  # this row alone failed; the token is meaningless
    unprocessable: bool = False  # the failure is the request's own fault
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # with the first token of a request that wants them
    embedding: bytes | None = None  # what a request with `pooling` gets instead of a token
    # One for each leading token of the row's draft that is what was chosen: what comes after it.
    further: tuple[RowOutcome, ...] = ()


class Outcome(msgspec.Struct, frozen=True, gc=False):
    rows: tuple[RowOutcome, ...]
