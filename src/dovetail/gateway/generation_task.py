"""One job while it runs: its requests in the cluster, the tokens and text of its choices, its clock.

Where its requests are served, and what becomes of them when a worker dies, the cluster's controller decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dovetail.errors import EngineFailed, Overloaded, RequestError, Unprocessable
from dovetail.gateway.cluster import Cluster
from dovetail.gateway.hosted import HostedModel
from dovetail.gateway.metrics import Metrics
from dovetail.gateway.slo import SloOutcome, SloWatch
from dovetail.gateway.text.stopper import Stopper
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.gateway.tracing import RequestTrace
from dovetail.gateway.workers.client import Arrival, Inbox
from dovetail.types import FinishReason, Request, ServiceClass, TokenEvent, TokenLogprobs


class Waits(msgspec.Struct, frozen=True):
    """What a job waited for before its first token, in seconds."""

    queue: float  # from its arrival until a node took it
    load: float  # for weights
    first_token: float  # from its arrival: both of the above, its turn and its prompt


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `index` counts choices over all prompts of the job."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # token and what was said of it
    cached_tokens: int = 0
    proposed: int = 0  # tokens of drafts
    accepted: int = 0  # of them
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt's tokens after the first
    embedding: bytes | None = None  # float32; then there is no text
    finish: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it
    waits: Waits | None = None  # on the first of the job

    @property
    def num_reports(self) -> int:
        return count_reports(self.logprobs, self.prompt_logprobs)


def count_reports(said: Sequence[tuple[int, TokenLogprobs]], read: Sequence[TokenLogprobs] | None) -> int:
    """Log-probabilities of tokens and their alternatives."""
    return sum(1 + len(each.top) for _, each in said) + sum(1 + len(each.top) for each in read or ())


@dataclass(frozen=True, slots=True)
class Origin:
    """When and from whom a job came in."""

    arrived_s: float  # at the socket, on the monotonic clock: templates and tokenising count
    key: str = ""  # name of the API key; empty = nobody else has one
    max_unfinished: int | None = None  # answers of this key at a time; None = its share of the queue
    trace: RequestTrace | None = None
    is_batch: bool = False  # a line of a batch: best effort, which no limit of clients is for
    is_best_effort: bool = False  # that, or its key's requests all are
    may_go_first: bool = True  # if it asks for that

    def serves_as(self, asked: ServiceClass) -> ServiceClass:
        if self.is_best_effort:
            return ServiceClass.BEST_EFFORT
        if asked is ServiceClass.PRIORITY and not self.may_go_first:
            return ServiceClass.LATENCY_SENSITIVE
        return asked


class GenerationTask:
    """A job from its submission to its end."""

    def __init__(self, job: GenerationRequest, metrics: Metrics, origin: Origin) -> None:
        self.job = job
        self._cluster: Cluster | None = None
        self._inbox = Inbox(metrics.resumptions.labels(job.model.name).inc)
        self._has_spoken = False
        self._waits: Waits | None = None  # until it is told
        self._hosted: HostedModel | None = None
        self._metrics = metrics
        # Looked up once, because they are used at every token.
        self._generated = metrics.generation_tokens.labels(job.model.name)
        self._service_class = job.service_class.name.lower()
        self._is_timed = not job.is_best_effort  # nobody waits for that
        self._generated_of_class = metrics.class_tokens.labels(job.model.name, self._service_class, "generation")
        self._inter_token = metrics.inter_token.labels(job.model.name)
        self._arrival = origin.arrived_s
        self._trace = origin.trace
        self._choices: dict[tuple[str, int], _Choice] = {}
        for order, request in enumerate(job.requests):
            for number in range(request.num_choices):
                index = order * request.num_choices + number
                self._choices[request.id, number] = _Choice(index, job, request)
        self.num_open = len(self._choices)
        self._slo = [SloWatch(request, self._arrival) for request in job.requests]

    def submit(self, cluster: Cluster, hosted: HostedModel) -> None:
        name, num_prompt = self.job.model.name, self.job.num_prompt_tokens
        self._metrics.prompt_tokens.labels(name).inc(num_prompt)
        self._metrics.class_tokens.labels(name, self._service_class, "prompt").inc(num_prompt)
        self._cluster, self._hosted = cluster, hosted
        for request in self.job.requests:
            cluster.submit(request, self._inbox, self._arrival)

    async def next(self) -> list[Delta]:
        """What is new. Raises what ends the job, after everything that came before."""
        return self.take(await self._inbox.get())

    def _is_open(self, request: Request) -> bool:
        return any(one.is_open for (request_id, _), one in self._choices.items() if request_id == request.id)

    def take(self, arrivals: Sequence[Arrival]) -> list[Delta]:
        """Deltas of all events, one per choice: what piled up while the client was slow goes out together."""
        touched: dict[tuple[str, int], _Choice] = {}
        for event, at in arrivals:
            key = (event.request_id, event.choice)
            choice = self._choices[key]
            if not choice.is_open:
                continue  # ended here by a stop string while this was on its way
            if event.finish in (FinishReason.ERROR, FinishReason.ABORTED):
                raise _error_of(event)
            touched[key] = choice
            if event.token is not None or event.embedding is not None:
                self._observe_token(choice, at, event.grace_s)
            choice.feed(event)
            if choice.finish is not None:
                self._close(key, by_worker=event.finish is not None)
        deltas = [delta for choice in touched.values() if (delta := choice.take()) is not None]
        num_tokens = sum(len(delta.tokens) for delta in deltas)
        self._generated.inc(num_tokens)
        self._generated_of_class.inc(num_tokens)
        if deltas and self._waits is not None:
            deltas[0].waits, self._waits = self._waits, None
        return deltas

    def complete(self) -> None:
        """Every choice has ended well."""
        name, metrics = self.job.model.name, self._metrics
        if self._is_timed:
            metrics.e2e.labels(name).observe(time.monotonic() - self._arrival)
        for request in self.job.requests:
            metrics.request_prompt.labels(name).observe(len(request.prompt))
        self._record_outcomes(None)
        assert self._hosted is not None
        if self._hosted.was_waited_for:  # one cold start, however many requests waited for it
            self._hosted.was_waited_for = False
            loaded = self._hosted.loaded
            metrics.cold_starts.labels(name, loaded.tier if loaded is not None else "disk").inc()

    def fail(self, error: RequestError) -> None:
        """What is open ends with this error. Only what the server is to blame for counts against its targets."""
        self._metrics.success.labels(self.job.model.name, FinishReason.ERROR.value).inc(self.num_open)
        if error.status >= 500:
            self._record_outcomes("refused" if isinstance(error, Overloaded) else "failed")
        self._leave()

    def abort_rest(self) -> None:
        """Nobody waits for what is still open."""
        if self.num_open:
            self._metrics.success.labels(self.job.model.name, FinishReason.ABORTED.value).inc(self.num_open)
        self._leave()

    def _leave(self) -> None:
        if self._cluster is not None:
            for request in self.job.requests:
                self._cluster.abort(request.id)
        for choice in self._choices.values():
            choice.is_open = False
        self.num_open = 0

    def _record_outcomes(self, failure: SloOutcome | None) -> None:
        for request, watch in zip(self.job.requests, self._slo, strict=True):
            outcome = failure if failure and self._is_open(request) else watch.outcome
            self._metrics.observe_end(self.job.model.name, request.service_class, outcome)

    def _observe_token(self, choice: _Choice, now: float, grace_s: float) -> None:
        watch = self._slo[choice.order]
        if choice.last_token_at is None:
            if not self._has_spoken:
                self._has_spoken = True
                placed_s = self._inbox.placed_s or now
                self._waits = Waits(placed_s - self._arrival, grace_s, now - self._arrival)
                if self._is_timed:
                    self._metrics.queue_time.labels(self.job.model.name).observe(self._waits.queue)
                if self._trace is not None:
                    self._trace.spoke(self._arrival, self._waits)
            choice.first_token_at = now
            watch.excuse(grace_s)  # once: a restart in the middle of a text is no excuse
            if self._is_timed:
                self._metrics.observe_ttft(self.job.model.name, now - self._arrival)
        elif self._is_timed:
            self._inter_token.observe(now - choice.last_token_at)
        choice.last_token_at = now
        watch.token(len(choice.tokens), now)

    def _close(self, key: tuple[str, int], *, by_worker: bool) -> None:
        choice = self._choices[key]
        choice.is_open = False
        self.num_open -= 1
        assert choice.finish is not None
        name = self.job.model.name
        self._metrics.success.labels(name, choice.finish.value).inc()
        self._metrics.request_generation.labels(name).observe(len(choice.tokens))
        if choice.tpot_s is not None and self._is_timed:
            self._metrics.of_model(name).add_tpot(choice.tpot_s)
        assert self._cluster is not None
        if not by_worker:
            self._cluster.abort(*key)


class _Choice:
    """The text of one choice: tokens in, what may be shown out."""

    def __init__(self, index: int, job: GenerationRequest, request: Request) -> None:
        self.index = index
        self.order = index // request.num_choices
        self.tokens: list[int] = []
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finish: FinishReason | None = None
        self.is_open = True
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._eos_ids = job.model.card.eos_token_ids
        self._min_tokens = request.sampling.min_tokens
        self._include_stop = job.include_stop
        self._stopper = Stopper(job.stops, include_stop=job.include_stop)
        self._detokenizer = job.model.vocabulary.detokenizer(
            request.prompt, skip_special_tokens=job.skip_special_tokens, shown=job.shown_tokens
        )
        self._delta = Delta(index)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.first_token_at is None or self.last_token_at is None or len(self.tokens) < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (len(self.tokens) - 1)

    def feed(self, event: TokenEvent) -> None:
        delta = self._delta
        delta.cached_tokens += event.cached_tokens
        delta.proposed += event.proposed
        delta.accepted += event.accepted
        delta.embedding = event.embedding
        if event.prompt_logprobs is not None:
            delta.prompt_logprobs = event.prompt_logprobs
        text = ""
        if event.token is not None:
            self.tokens.append(event.token)
            delta.tokens.append(event.token)
            if event.logprobs is not None:
                delta.logprobs.append((event.token, event.logprobs))
            ends_it = event.finish is FinishReason.STOP and event.token in self._stop_ids
            if ends_it and event.token not in self._eos_ids:  # an end of its own needs no reason
                delta.stop_reason = event.token
            if not ends_it or self._include_stop:  # the token that ends a text is not part of it
                text = self._detokenizer.feed(event.token)
        if event.finish is not None:
            text += self._detokenizer.flush()
        self._show(text, event.finish)

    def take(self) -> Delta | None:
        """What is new, or None while all of it is held back."""
        delta = self._delta
        if not delta.text and self.finish is None:
            return None
        self._delta = Delta(self.index)
        return delta

    def _show(self, text: str, finish: FinishReason | None) -> None:
        if len(self.tokens) <= self._min_tokens and finish is None:
            self._delta.text += text  # a stop string counts only after min_tokens, as stop tokens do
            return
        self._delta.text += self._stopper.feed(text)
        if self._stopper.matched is not None:
            self.finish = self._delta.finish = FinishReason.STOP
            self._delta.stop_reason = self._stopper.matched
        elif finish is not None:
            self._delta.text += self._stopper.flush()
            self.finish = self._delta.finish = finish


def spoken(index: int, job: GenerationRequest, request: Request, events: Sequence[TokenEvent]) -> Delta:
    """All of a choice that has ended, in one."""
    choice = _Choice(index, job, request)
    for event in events:
        choice.feed(event)
    delta = choice.take()
    assert delta is not None
    return delta


def _error_of(event: TokenEvent) -> RequestError:
    message = event.error or "the request was ended by the worker"
    if event.retry_after_s is not None:
        return Overloaded(message, code="overloaded", retry_after_s=event.retry_after_s)
    return Unprocessable(message) if event.unprocessable else EngineFailed(message)
