"""The gateway without HTTP: runs a job on the cluster, and gives its text as it comes.

Every path out of `Service.run` either saw the end of each choice or had it aborted, in the same tick. Where a job is
served, and what becomes of it when its worker dies, the cluster's controller decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from dovetail.cluster.retry import RetryRule
from dovetail.config import DEFAULT_MAX_TOKENS, ServerConfig
from dovetail.errors import InvalidRequest, Overloaded, QuotaExceeded, RequestError, Unusable
from dovetail.gateway.batches.pacing import Pressure
from dovetail.gateway.cluster import Cluster
from dovetail.gateway.draft_models import DraftModels
from dovetail.gateway.generation_task import Delta, GenerationTask, Origin
from dovetail.gateway.hosted import HostedModel
from dovetail.gateway.http.waits import Standing
from dovetail.gateway.metrics import Metrics
from dovetail.gateway.models import Models, ServedModel
from dovetail.gateway.text.grammar_trials import grammar_trials
from dovetail.gateway.text.templates import templates
from dovetail.gateway.text.tokenizer_process import fork_server
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.gateway.workers.client import WorkerClient
from dovetail.messages import Load
from dovetail.types import ModelCard, Slo, Speculation

logger = logging.getLogger("dovetail.gateway")


@dataclass(frozen=True)
class Limits:
    """What may change while the server runs."""

    max_queue: int = 512  # unfinished choices of requests
    max_resumptions: int = 2  # of one request, after workers that died
    default_max_tokens: int = DEFAULT_MAX_TOKENS  # of a chat that names no limit
    resume_timeout_s: float = 4.0  # for a worker to come back to a client who is in the middle of a text
    no_worker_timeout_s: float = 30.0  # without any worker nobody waits longer

    @classmethod
    def of(cls, config: ServerConfig) -> Limits:
        return cls(config.max_queue, config.max_resumptions, config.default_max_tokens, config.resume_timeout)

    @property
    def retry(self) -> RetryRule:
        return RetryRule(self.max_resumptions, self.resume_timeout_s, self.no_worker_timeout_s)


class Service:
    """Admission, submission, and the life of each job."""

    def __init__(self, link: WorkerClient, models: Models, metrics: Metrics, limits: Limits) -> None:
        self.link = link
        self.models = models
        self.drafts = DraftModels(models)
        self.cluster = Cluster(link, self._load_by_name, limits.retry)
        self.metrics = metrics
        self._limits = limits
        self.is_draining = False
        self.trouble: Callable[[], str | None] = lambda: None  # why nothing new may be decided here now
        self.is_ready = False  # the workers are up and the models to be preloaded are there
        self._unfinished = 0  # choices: one request for a hundred answers weighs as much as a hundred requests
        self._by_key: Counter[str] = Counter()  # the same by API key
        self._batch_requests: dict[str, str] = {}  # of lines that run: their models
        self._idle = asyncio.Event()
        self._idle.set()
        link.observers.append(metrics.observe_message)
        link.exit_observers.append(lambda node, lost: metrics.forget_node(node, has_ended=not lost.is_cut))

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        self.cluster.controller.retries.rule = limits.retry

    @property
    def unfinished(self) -> int:
        return self._unfinished

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    def check_leading(self) -> None:
        if (why := self.trouble()) is not None:
            raise Overloaded(why, code="not_leading", retry_after_s=2)

    def why_unservable(self) -> str | None:
        """None where a node serves, or may soon."""
        states = {node.name: self.link.state_of(node) for node in self.link.nodes.values()}
        usable = [name for name, state in states.items() if state != "failed"]
        if states and not usable:
            return "no node can serve: all have failed"
        if usable and self.cluster.controller.drains.keys() >= set(usable):
            return "no node can serve: all are drained; resume one (`dovetail leave NODE --undo`), or let another join"
        return None

    def check_admission(self, count: int = 1, key: str = "", max_unfinished: int | None = None) -> None:
        """Before any work is spent on a request of so many answers."""
        self.check_batch_admission()
        limit = self.limits.max_queue
        if count > limit:  # however long the client waits
            raise InvalidRequest(f"{count} answers are more than this server queues ({limit})", param="prompt")
        if self._unfinished + count > limit:
            raise Overloaded(
                f"{self._unfinished} requests are unfinished, more than {limit} are not accepted",
                code="queue_full",
                retry_after_s=1,
            )
        held = self._by_key.get(key, 0)
        if max_unfinished is not None:
            if held + count > max_unfinished:
                raise QuotaExceeded(
                    f"the key '{key}' may have {max_unfinished} unfinished requests and has {held}",
                    code="concurrency_limit_exceeded",
                    retry_after_s=1,
                )
        # A key may have as many as are left for others: one alone half, two a third each, and a newcomer finds room.
        elif key and held and held + count > limit - self._unfinished:
            raise Overloaded(
                f"{held} requests of the key '{key}' are unfinished, and {limit - self._unfinished} places are left "
                "for all keys",
                code="queue_full",
                retry_after_s=1,
            )

    def check_batch_admission(self) -> None:
        """Whether anything is served here. How many lines of batches run is for those who send them to say."""
        if self.is_draining:
            raise Overloaded("the server is shutting down", code="draining", retry_after_s=5)
        self.check_leading()
        if (why := self.why_unservable()) is not None:
            raise Overloaded(why, code="no_node", retry_after_s=5)

    def pressure(self) -> Pressure:
        """What there is to do, of clients and of batches."""
        waiting = self.cluster.remote.positions()
        lines = Counter(model for id, model in self._batch_requests.items() if id in waiting)
        late = self.metrics.num_late()
        return Pressure(self._unfinished, len(waiting) - lines.total(), late, lines)

    def context_limit(self, model: ServedModel) -> int:
        """Tokens that prompt and answer may have: the model's context, or the KV pool where that is known smaller."""
        context = model.card.spec.context_length
        loaded = (node.loaded.get(model.host) for node in self.link.nodes.values())
        pools = [one.kv_capacity_tokens for one in loaded if one is not None and one.kv_capacity_tokens]
        return min(context, max(pools)) if pools else context

    def default_max_tokens(self, model: ServedModel) -> int:
        return model.config.default_max_tokens or self.limits.default_max_tokens

    def reconfigure(self, name: str) -> None:
        """A model's settings have changed: one that is idle is given its new time to live."""
        if name in self.cluster.models:
            model, card = self.models.get(name), self.cluster.models[name].card
            load = self._load_of(model, card)
            if load != self.cluster.models[name].load:
                self.cluster.reconfigure(load)

    async def start(self, preload: Iterable[str] = ()) -> None:
        """Returns when the workers are up and these models loaded; raises what the first that fails raises."""
        await asyncio.to_thread(fork_server.warm)
        await asyncio.gather(self._greeted(), self.preload(preload), grammar_trials.warm())
        self.is_ready = True
        templates.warm()

    async def _greeted(self) -> None:
        """Raises what ends the server: nodes that cannot be used here are left out where others can."""
        ended = [supervisor.greeted for supervisor in self.link.supervisors.values()]
        await asyncio.gather(*ended, return_exceptions=True)
        problems = [error for one in ended if (error := one.exception()) is not None]
        if problems and (len(problems) == len(ended) or not all(isinstance(one, Unusable) for one in problems)):
            raise problems[0]
        for problem in problems:
            logger.error("%s; it is not started again, the others serve", problem)

    async def preload(self, names: Iterable[str]) -> None:
        models = [self.models.get(name) for name in names]
        await asyncio.gather(*(self._preload(model) for model in models))

    async def _preload(self, model: ServedModel) -> None:
        hosted = await self.hosted(model)
        self.cluster.warm(model.host)
        await asyncio.gather(model.prepare(), asyncio.shield(hosted.ready))

    async def run(
        self, job: GenerationRequest, origin: Origin | None = None, *, has_places: bool = False
    ) -> AsyncGenerator[Delta, None]:
        """Text as it comes. Close the generator (`contextlib.aclosing`) to abort."""
        origin = origin or Origin(time.monotonic())
        with nullcontext() if has_places else self.places(job.num_answers, origin), self._as_batch(job, origin):
            task = GenerationTask(job, self.metrics, origin)
            try:
                task.submit(self.cluster, await self.hosted(job.model))
                while task.num_open:
                    for delta in await task.next():
                        yield delta
                task.complete()
            except RequestError as error:
                task.fail(error)
                raise
            finally:
                task.abort_rest()

    @contextmanager
    def places(self, count: int, origin: Origin) -> Iterator[None]:
        """Held for so many answers, however many requests it takes to make them."""
        if origin.is_batch:
            self.check_batch_admission()
            yield
            return
        self.check_admission(count, origin.key, origin.max_unfinished)
        self._begin(count, origin.key)
        try:
            yield
        finally:
            self._end(count, origin.key)

    @contextmanager
    def _as_batch(self, job: GenerationRequest, origin: Origin) -> Iterator[None]:
        """While requests of a line run."""
        ids = [request.id for request in job.requests] if origin.is_batch else []
        self._batch_requests.update(dict.fromkeys(ids, job.model.name))
        try:
            yield
        finally:
            for id in ids:
                del self._batch_requests[id]

    def standing(self, job: GenerationRequest) -> Standing | None:
        """What a job that has not spoken waits for. None while a refusal may still come, which has a status line of
        its own: of targets that were asked for that is until there is a place."""
        request = job.requests[0]
        if request.id not in self.cluster.remote.requests:
            return Standing("starting")
        node = self.cluster.node_of(request.id)
        if node is None:
            return None if request.slo != Slo() else Standing("queued", self.cluster.positions.of(request.id))
        if request.model in node.loaded:
            return Standing("computing")
        loading = node.loading.get(request.model)
        total = job.model.card.size_bytes
        return Standing("loading", done_bytes=loading.done_bytes if loading is not None else 0, total_bytes=total)

    async def hosted(self, model: ServedModel) -> HostedModel:
        """The model as it is now, when the nodes have said whether they offer it. One that was pulled again is served
        when the answers of the old one are finished: a prompt in the new one's tokens means nothing to the old."""
        while True:
            while (old := self._outdated(model)) is not None:
                await old.idle.wait()
                if self._outdated(model) is old and not old.is_wanted:
                    self.cluster.unload(model.host)
            await self.drafts.prepare(model)
            hosted = self.cluster.offer(self._load_of(model, model.card))
            self.link.check_usable()
            await hosted.wait_until_known()
            if self.cluster.models.get(model.host) is hosted:  # else it was unloaded meanwhile
                return hosted

    def _load_by_name(self, name: str) -> Load | None:
        """Of a model that a worker has from before; None: it is not on offer."""
        try:
            model = self.models.get(name)
        except RequestError:
            return None
        return self._load_of(model, model.card)

    def _load_of(self, model: ServedModel, card: ModelCard) -> Load:
        config = model.config
        speculation = Speculation(config.speculative.mode, config.speculative.tokens, self.drafts.of(model))
        share = None if config.resident_share == "auto" else config.resident_share
        return Load(
            card,
            config.dtype,
            keep_alive_s=config.keep_alive,
            kv=config.kv,
            speculation=speculation,
            resident_share=share,
        )

    def _outdated(self, model: ServedModel) -> HostedModel | None:
        hosted = self.cluster.models.get(model.host)
        return hosted if hosted is not None and hosted.card != model.card else None

    def _begin(self, count: int, key: str) -> None:
        self._unfinished += count
        self._by_key[key] += count
        self._idle.clear()

    def _end(self, count: int, key: str) -> None:
        self._unfinished -= count
        self._by_key[key] -= count
        if not self._by_key[key]:
            del self._by_key[key]
        if self._unfinished == 0:
            self._idle.set()
