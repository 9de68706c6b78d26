"""Beam search: of each prompt the likeliest whole texts, instead of sampled ones.

A step is one request per beam: the prompt with what the beam has said, answered by one token and its alternatives. They
are placed, scheduled and resumed as all others are, and find all but the last block of their text in the prefix cache;
the worker knows nothing of beams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from dovetail.gateway.generation_task import Delta, Origin, Waits, spoken
from dovetail.gateway.http.api import ChatRequest, CompletionRequest
from dovetail.gateway.service import Service
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob, TokenLogprobs


@dataclass(frozen=True)
class BeamPlan:
    """What one prompt's search looks for."""

    width: int  # texts that are kept at each length, and found in the end
    max_tokens: int
    stop_ids: frozenset[int]
    min_tokens: int = 0  # stop_ids are no candidates before this many
    length_penalty: float = 1.0  # texts are ranked by their log-probability over their length to this power

    @property
    def num_candidates(self) -> int:
        """Of each beam: so many that `width` of them go on, whichever are stops."""
        return self.width + len(self.stop_ids)


@dataclass(frozen=True)
class Beam:
    tokens: tuple[int, ...] = ()
    said: tuple[TokenLogprobs, ...] = ()  # of each token, with the alternatives that it had
    score: float = 0.0  # log-probability of all of them
    finish: FinishReason | None = None

    def grown(self, found: TokenLogprobs, at: int, finish: FinishReason | None) -> Beam:
        """With the candidate at this place."""
        token, logprob = found.top[at].token, found.top[at].logprob
        report = TokenLogprobs(logprob, found.top)
        return Beam((*self.tokens, token), (*self.said, report), self.score + logprob, finish)


class BeamSearch:
    """One prompt's search; what the model makes of each beam is fed from outside.

    All of `live` have the same length; `ended` keeps the `width` best texts. The search is over when nothing is live.
    """

    def __init__(self, plan: BeamPlan) -> None:
        self.plan = plan
        self.live = [Beam()]
        self.ended: list[Beam] = []

    def extend(self, found: Sequence[TokenLogprobs]) -> None:
        """By one token each; `found` are the likeliest that may follow each live beam."""
        grown = [beam for each, said in zip(self.live, found, strict=True) for beam in self._grown(each, said)]
        grown.sort(key=lambda beam: -beam.score)
        width = self.plan.width
        # An end counts if it is among the best of its length, as it would if it could go on.
        self.ended += [beam for beam in grown[:width] if beam.finish is not None]
        self.live = [beam for beam in grown if beam.finish is None][:width]
        if len(self.live[0].tokens) == self.plan.max_tokens:
            self.ended += [dataclasses.replace(beam, finish=FinishReason.LENGTH) for beam in self.live]
            self.live = []
        self.ended = sorted(self.ended, key=lambda beam: -self._rank(beam.score, len(beam.tokens)))[:width]
        if self._is_decided():
            self.live = []

    def _grown(self, beam: Beam, found: TokenLogprobs) -> list[Beam]:
        may_stop = len(beam.tokens) >= self.plan.min_tokens
        is_stop = [candidate.token in self.plan.stop_ids for candidate in found.top]
        return [
            beam.grown(found, at, FinishReason.STOP if stops else None)
            for at, stops in enumerate(is_stop)
            if may_stop or not stops
        ]

    def _is_decided(self) -> bool:
        """No live beam can still become better than what has ended: log-probabilities only fall."""
        if len(self.ended) < self.plan.width or not self.live:
            return False
        worst = self._rank(self.ended[-1].score, len(self.ended[-1].tokens))
        lengths = (len(self.live[0].tokens), self.plan.max_tokens)
        return max(self._rank(self.live[0].score, length) for length in lengths) <= worst

    def _rank(self, score: float, length: int) -> float:
        return score / float(length**self.plan.length_penalty)


async def run_beams(
    service: Service, body: ChatRequest | CompletionRequest, job: GenerationRequest, origin: Origin
) -> AsyncGenerator[Delta, None]:
    """One delta per choice when all are known, the best of each prompt first. Close the generator to abort."""
    searches = [BeamSearch(_plan(body, request)) for request in job.requests]
    first: dict[int, Delta] = {}  # of each prompt: what only its first step knows
    with service.places(job.num_answers, origin):
        step = 0
        while any(search.live for search in searches):
            answers = await _answers(service, _step_request(job, searches, step), origin)
            for order, search in enumerate(searches):
                own, answers = answers[: len(search.live)], answers[len(search.live) :]
                if step == 0:
                    first[order] = own[0]
                if own:
                    search.extend([answer.logprobs[0][1] for answer in own])
            step += 1
    for order, search in enumerate(searches):
        for delta in _texts(job, order, search, first[order]):
            yield delta


def _plan(body: ChatRequest | CompletionRequest, request: Request) -> BeamPlan:
    sampling = request.sampling
    return BeamPlan(
        request.num_choices,
        sampling.max_tokens,
        frozenset(sampling.stop_token_ids),
        sampling.min_tokens,
        1.0 if body.length_penalty is None else body.length_penalty,
    )


def _step_request(job: GenerationRequest, searches: Sequence[BeamSearch], step: int) -> GenerationRequest:
    """A request for the next token of every live beam, in order of prompts."""
    requests = [
        msgspec.structs.replace(
            request,
            id=f"{request.id}-{step}-{number}",
            prompt=(*request.prompt, *beam.tokens),
            sampling=SamplingParams(
                max_tokens=1,
                seed=0,
                temperature=0.0,
                logprobs=search.plan.num_candidates,
                prompt_logprobs=request.sampling.prompt_logprobs if step == 0 else None,
            ),
            num_choices=1,
        )
        for request, search in zip(job.requests, searches, strict=True)
        for number, beam in enumerate(search.live)
    ]
    return dataclasses.replace(job, requests=tuple(requests))


async def _answers(service: Service, job: GenerationRequest, origin: Origin) -> list[Delta]:
    found: dict[int, Delta] = {}
    waits: Waits | None = None
    async with aclosing(service.run(job, origin, has_places=True)) as deltas:
        async for delta in deltas:
            found[delta.index] = delta
            waits = waits or delta.waits
    found[0].waits = waits
    return [found[index] for index in range(len(job.requests))]


def _texts(job: GenerationRequest, order: int, search: BeamSearch, first: Delta) -> list[Delta]:
    request = job.requests[order]
    wanted = request.sampling.logprobs
    texts = []
    for number, beam in enumerate(search.ended):
        finishes = [None] * (len(beam.tokens) - 1) + [beam.finish]
        events = [
            TokenEvent(request.id, number, token, finish, _told(report, wanted))
            for token, report, finish in zip(beam.tokens, beam.said, finishes, strict=True)
        ]
        texts.append(spoken(order * request.num_choices + number, job, request, events))
    texts[0].cached_tokens, texts[0].prompt_logprobs = first.cached_tokens, first.prompt_logprobs
    texts[0].waits = first.waits
    return texts


def _told(report: TokenLogprobs, wanted: int | None) -> TokenLogprobs | None:
    top: tuple[TokenLogprob, ...] = report.top
    return None if wanted is None else TokenLogprobs(report.chosen, top[:wanted])
