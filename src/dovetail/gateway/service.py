"""The gateway without HTTP: runs a job on the node that has its model, and gives its text as it comes.

Every path out of `Service.run` either saw the end of each choice or told the worker to abort it, in the same tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.errors import EngineFailed, Overloaded, RequestError, Unprocessable
from dovetail.gateway.link import Arrival, Inbox, Instance, Link, NodeLink, abort
from dovetail.gateway.metrics import Metrics
from dovetail.gateway.models import Models, ServedModel
from dovetail.gateway.slo import SloWatch
from dovetail.gateway.stopper import Stopper
from dovetail.gateway.translate import Job
from dovetail.types import FinishReason, Request, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class Delta:
    """What is new in one choice. `index` counts choices over all prompts of the job."""

    index: int
    text: str = ""
    num_tokens: int = 0
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)  # token and what was said of it
    cached_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it


class Service:
    """Admission, submission, and the life of each job."""

    def __init__(self, link: Link, models: Models, metrics: Metrics, *, max_queue: int) -> None:
        self.link = link
        self.models = models
        self.metrics = metrics
        self.is_draining = False
        self.is_ready = False  # the workers are up and the models to be preloaded are there
        self._max_queue = max_queue
        self._unfinished = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._unloads: dict[str, asyncio.TimerHandle] = {}
        link.observers.append(metrics.observe_message)
        link.exit_observers.append(metrics.forget_node)

    @property
    def unfinished(self) -> int:
        return self._unfinished

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def check_admission(self, count: int = 1) -> None:
        """Before any work is spent on a request."""
        if self.is_draining:
            raise Overloaded("the server is shutting down", code="draining", retry_after_s=5)
        if self._unfinished + count > self._max_queue:
            raise Overloaded(
                f"{self._unfinished} requests are unfinished, more than {self._max_queue} are not accepted",
                code="queue_full",
                retry_after_s=1,
            )

    def context_limit(self, model: ServedModel) -> int:
        """Tokens that prompt and answer may have: the model's context, or the KV pool where that is known smaller."""
        context = model.card.spec.context_length
        for node in self.link.nodes.values():
            instance = node.instances.get(model.name)
            if instance is not None and instance.loaded is not None and instance.loaded.kv_capacity_tokens:
                return min(context, instance.loaded.kv_capacity_tokens)
        return context

    async def start(self, preload: Iterable[str] = ()) -> None:
        """Returns when the workers are up and these models loaded; raises what the first that fails raises."""
        await asyncio.gather(self.preload(preload), *(s.greeted for s in self.link.supervisors.values()))
        self.is_ready = True

    async def preload(self, names: Iterable[str]) -> None:
        models = [self.models.get(name) for name in names]
        loads = [self._instance(model)[1].ready for model in models]
        await asyncio.gather(*(model.prepare() for model in models), *(asyncio.shield(load) for load in loads))

    async def run(self, job: Job) -> AsyncGenerator[Delta, None]:
        """Text as it comes. Close the generator (`contextlib.aclosing`) to abort."""
        self.check_admission(len(job.requests))
        node, instance = self._instance(job.model)
        run = _Run(job, node, instance, self.metrics)
        self._begin(len(job.requests))
        try:
            run.submit()
            while run.open:
                for delta in run.take(await run.inbox.get()):
                    yield delta
            run.complete()
        except RequestError:
            run.has_failed = True
            raise
        finally:
            run.abort_rest()
            self._end(len(job.requests), job.model, node)

    def _instance(self, model: ServedModel) -> tuple[NodeLink, Instance]:
        timer = self._unloads.pop(model.name, None)
        if timer is not None:
            timer.cancel()
        node = self.link.node_of(model.name)
        old = node.instances.get(model.name)
        if old is not None and old.card != model.card and not old.requests:  # pulled again since it was loaded
            node.unload(model.name)
        return node, node.load(model.card, model.config.dtype)

    def _begin(self, count: int) -> None:
        self._unfinished += count
        self._idle.clear()

    def _end(self, count: int, model: ServedModel, node: NodeLink) -> None:
        self._unfinished -= count
        if self._unfinished == 0:
            self._idle.set()
        self._schedule_unload(model, node)

    def _schedule_unload(self, model: ServedModel, node: NodeLink) -> None:
        keep_alive_s = model.config.keep_alive
        instance = node.instances.get(model.name)
        if instance is not None and not instance.requests and keep_alive_s >= 0 and model.name not in self._unloads:
            loop = asyncio.get_running_loop()
            self._unloads[model.name] = loop.call_later(keep_alive_s, self._unload, model, node)

    def _unload(self, model: ServedModel, node: NodeLink) -> None:
        self._unloads.pop(model.name, None)
        instance = node.instances.get(model.name)
        if instance is None or instance.requests:
            return
        if instance.loaded is None:  # its requests went away before it came; it is idle from then on
            instance.ready.add_done_callback(lambda _: self._schedule_unload(model, node))
        else:
            node.unload(model.name)


class _Run:
    """One job while it runs: its open choices and its clock."""

    def __init__(self, job: Job, node: NodeLink, instance: Instance, metrics: Metrics) -> None:
        self.job = job
        self.inbox = Inbox()
        self.has_failed = False
        self._node = node
        self._instance = instance
        self._metrics = metrics
        # Looked up once, because they are used at every token.
        self._generated = metrics.generation_tokens.labels(job.model.name)
        self._inter_token = metrics.inter_token.labels(job.model.name)
        self._loop = asyncio.get_running_loop()
        self._arrival = self._loop.time()
        self._choices: dict[tuple[str, int], _Choice] = {}
        for order, request in enumerate(job.requests):
            for number in range(request.num_choices):
                index = order * request.num_choices + number
                self._choices[request.id, number] = _Choice(index, job, request)
        self.open = set(self._choices)
        self._slo = [SloWatch(request, self._arrival) for request in job.requests]

    def submit(self) -> None:
        for request in self.job.requests:
            self._node.submit(request, self.inbox)
        self._metrics.prompt_tokens.labels(self.job.model.name).inc(self.job.num_prompt_tokens)

    def take(self, arrivals: Sequence[Arrival]) -> list[Delta]:
        """Deltas of all events, one per choice: what piled up while the client was slow goes out together."""
        touched: dict[tuple[str, int], _Choice] = {}
        for event, at in arrivals:
            key = (event.request_id, event.choice)
            if key not in self.open:
                continue  # ended here by a stop string while this was on its way
            if event.finish in (FinishReason.ERROR, FinishReason.ABORTED):
                raise _error_of(event)
            choice = touched[key] = self._choices[key]
            if event.token is not None:
                self._observe_token(choice, at)
            choice.feed(event)
            if choice.finish is not None:
                self._close(key, by_worker=event.finish is not None)
        deltas = [delta for choice in touched.values() if (delta := choice.take()) is not None]
        self._generated.inc(sum(delta.num_tokens for delta in deltas))
        return deltas

    def complete(self) -> None:
        """Every choice has ended well."""
        name, metrics = self.job.model.name, self._metrics
        metrics.e2e.labels(name).observe(self._loop.time() - self._arrival)
        for request, watch in zip(self.job.requests, self._slo, strict=True):
            metrics.request_prompt.labels(name).observe(len(request.prompt))
            outcome = watch.outcome
            if outcome is not None:
                metrics.slo.labels(name, outcome).inc()
        if self._instance.was_waited_for:  # one cold start, however many requests waited for it
            self._instance.was_waited_for = False
            metrics.cold_starts.labels(name, "disk").inc()

    def abort_rest(self) -> None:
        for request in self.job.requests:
            abort(self._node, request.id)
        if self.open:
            reason = FinishReason.ERROR if self.has_failed else FinishReason.ABORTED
            self._metrics.success.labels(self.job.model.name, reason.value).inc(len(self.open))

    def _observe_token(self, choice: _Choice, now: float) -> None:
        if choice.last_token_at is None:
            self._metrics.ttft.labels(self.job.model.name).observe(now - self._arrival)
        else:
            self._inter_token.observe(now - choice.last_token_at)
        choice.last_token_at = now
        self._slo[choice.order].token(choice.num_tokens, now, self._cold_start_s())

    def _cold_start_s(self) -> float:
        """S1: a request that waited for its model to load has that much more time."""
        return max((self._instance.ready_at or 0.0) - self._arrival, 0.0)

    def _close(self, key: tuple[str, int], *, by_worker: bool) -> None:
        self.open.discard(key)
        choice = self._choices[key]
        assert choice.finish is not None
        name = self.job.model.name
        self._metrics.success.labels(name, choice.finish.value).inc()
        self._metrics.request_generation.labels(name).observe(choice.num_tokens)
        if not by_worker:
            abort(self._node, *key)
        if not any(request_id == key[0] for request_id, _ in self.open):
            self._node.finish(key[0])


class _Choice:
    """The text of one choice: tokens in, what may be shown out."""

    def __init__(self, index: int, job: Job, request: Request) -> None:
        self.index = index
        self.order = index // request.num_choices
        self.num_tokens = 0
        self.last_token_at: float | None = None
        self.finish: FinishReason | None = None
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._eos_ids = job.model.card.eos_token_ids
        self._min_tokens = request.sampling.min_tokens
        self._include_stop = job.include_stop
        self._stopper = Stopper(job.stops, include_stop=job.include_stop)
        self._detokenizer = job.model.vocabulary.detokenizer(
            request.prompt, skip_special_tokens=job.skip_special_tokens
        )
        self._delta = Delta(index)

    def feed(self, event: TokenEvent) -> None:
        delta = self._delta
        delta.cached_tokens += event.cached_tokens
        text = ""
        if event.token is not None:
            self.num_tokens += 1
            delta.num_tokens += 1
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
        if self.num_tokens <= self._min_tokens and finish is None:
            self._delta.text += text  # a stop string counts only after min_tokens, as stop tokens do
            return
        self._delta.text += self._stopper.feed(text)
        if self._stopper.matched is not None:
            self.finish = self._delta.finish = FinishReason.STOP
            self._delta.stop_reason = self._stopper.matched
        elif finish is not None:
            self._delta.text += self._stopper.flush()
            self.finish = self._delta.finish = finish


def _error_of(event: TokenEvent) -> RequestError:
    message = event.error or "the request was ended by the worker"
    if event.retry_after_s is not None:
        return Overloaded(message, code="overloaded", retry_after_s=event.retry_after_s)
    return Unprocessable(message) if event.unprocessable else EngineFailed(message)
