"""Lines of batches in progress as requests of this server: begun when there is room, asked again when it was not their
fault. Owns the clock and the tasks; what is decided is decided in `schedule` and `pacing`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp

from dovetail.daytime import parse_hours
from dovetail.errors import RequestError
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.batches.calls import LineAnswer, ask
from dovetail.gateway.batches.check import InputLine
from dovetail.gateway.batches.pacing import Pace
from dovetail.gateway.batches.progress import eta_s
from dovetail.gateway.batches.records import Batch
from dovetail.gateway.batches.results import LineResponse, LineResult, result_id, usage_in
from dovetail.gateway.batches.running import EndedLine, RunningBatch
from dovetail.gateway.batches.schedule import LineSchedule
from dovetail.gateway.service import Service

logger = logging.getLogger("dovetail.gateway")

_LOOK_S = 0.25  # between two looks at what else the server does
_MAX_ATTEMPTS = 3  # of a line with which workers fail
_RETRY_S = 1.0
_BROKEN_RETRY_S = 5.0
_LOAD_BYTES_PER_S = 400e6  # a guess, for weighing a load against lines that wait
_GPU_BATCH, _CPU_BATCH = 256, 64
_AGAIN = frozenset({408, 429, 503})  # not the line's fault


class LineDispatcher:
    """Of all batches in progress."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.running: dict[str, RunningBatch] = {}
        self._service = service
        self._settings = settings
        self._schedule = LineSchedule()
        self._pace = Pace(self._most_lines())
        self._wake = asyncio.Event()

    def add(self, running: RunningBatch, models: tuple[str, ...]) -> None:
        self._schedule.add(running.batch.id, running.batch.owner, models, running.lines)
        self._wake.set()

    def remove(self, running: RunningBatch) -> None:
        self._schedule.remove(running.batch.id)

    def progress_of(self, running: RunningBatch) -> dict[str, float | int | str | None]:
        speed = running.progress.speed(time.monotonic())
        return {
            "tokens": running.usage.total,
            "lines_running": running.lines.num_taken,
            "tokens_per_second": round(speed.tokens_per_s, 2),
            "eta_seconds": eta_s(len(running.lines) - running.num_ended, speed),
            "held_by": self._held_by(running) or running.refusal or self._pace.held_by(),
        }

    async def give_lines(self, app: ASGIApp) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self.running else None):
                    await self._wake.wait()
            self._wake.clear()
            if not self._service.is_ready or self._service.is_draining:
                await asyncio.sleep(_LOOK_S)
                continue
            now = time.monotonic()
            self._pace.most = self._most_lines()
            self._pace.observe(self._service.pressure(), now)
            held = {batch_id for batch_id, running in self.running.items() if self._held_by(running)}
            for line in self._schedule.take(now, self._load_tokens, self._pace.has_room, held):
                self._start_line(app, self.running[line.batch], line.number)

    def _load_tokens(self, model: str) -> float:
        """What could be computed elsewhere while it is loaded."""
        try:
            served = self._service.models.get(model)
        except RequestError:
            return 0.0
        if self._service.cluster.nodes_of(served.host):
            return 0.0
        now = time.monotonic()
        speed = sum(one.progress.speed(now).tokens_per_s for one in self.running.values())
        return max(speed, 1.0) * served.card.size_bytes / _LOAD_BYTES_PER_S

    def _most_lines(self) -> int:
        config = self._settings.config
        sizes = (one.max_batch or (_CPU_BATCH if one.device == "cpu" else _GPU_BATCH) for one in config.nodes)
        return config.batch.max_in_flight or max(sum(sizes), 1)

    def _start_line(self, app: ASGIApp, running: RunningBatch, number: int) -> None:
        task = running.tasks[number] = asyncio.create_task(self._answer_line(app, running, number))
        task.add_done_callback(lambda done: self._line_stopped(running, number, done))

    def _line_stopped(self, running: RunningBatch, number: int, task: asyncio.Task[None]) -> None:
        del running.tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s: line %d: %s", running.batch.id, number, error, exc_info=error)
            self._again(running, number, str(error), _BROKEN_RETRY_S)

    async def _answer_line(self, app: ASGIApp, running: RunningBatch, number: int) -> None:
        batch = running.batch
        line = await running.read_line(number)
        key = batch.owner if len(self._settings.keys) > 1 else ""  # one key alone shares with nobody
        answer = await ask(app, batch.endpoint, _body_of(batch, line), key)
        if answer.status in _AGAIN:
            self._again(running, number, _message(answer), max(answer.retry_after_s or 0.0, _RETRY_S))
        elif answer.status >= 500 and running.attempts[number] + 1 < _MAX_ATTEMPTS:
            running.attempts[number] += 1
            self._again(running, number, _message(answer), _RETRY_S)
        else:
            running.attempts.pop(number, None)
            response = LineResponse(answer.status, answer.request_id, msgspec.Raw(answer.body))
            result = LineResult(result_id(batch.id, number), line.custom_id, response, None)
            running.add(EndedLine(number, result, usage_in(answer.body)))

    def _again(self, running: RunningBatch, number: int, why: str, delay_s: float) -> None:
        running.refusal = why
        self._service.metrics.batch_retries.inc()
        if not running.is_stopping.is_set():
            self._schedule.give_back(running.batch.id, number, time.monotonic() + delay_s)

    def line_done(self, running: RunningBatch, ended: EndedLine) -> None:
        """It is on disk."""
        running.refusal = None
        self._schedule.done(running.batch.id, ended.number, ended.usage.total)
        metrics = self._service.metrics
        metrics.batch_lines.labels("completed" if ended.result.is_answer else "failed").inc()
        metrics.batch_tokens.labels("prompt").inc(ended.usage.prompt_tokens)
        metrics.batch_tokens.labels("generation").inc(ended.usage.completion_tokens)
        self._wake.set()

    def _held_by(self, running: RunningBatch) -> str | None:
        """Why no line of it may begin."""
        config = self._settings.config
        if running.problem is not None:
            return running.problem
        if not self._settings.keys.knows(running.batch.owner):
            return f"the key '{running.batch.owner}' is no longer in the configuration"
        if config.batch.hours is not None:
            hours, clock = parse_hours(config.batch.hours), time.localtime()
            if not hours.contains(60 * clock.tm_hour + clock.tm_min):
                return f"batches run from {hours} (batch.hours)"
        return None

    def observe(self) -> None:
        metrics = self._service.metrics
        metrics.batch_running.set(sum(one.lines.num_taken for one in self.running.values()))
        metrics.batch_left.set(sum(len(one.lines) - one.num_ended for one in self.running.values()))
        metrics.batch_limit.set(self._pace.limit)


def _body_of(batch: Batch, line: InputLine) -> bytes:
    """Responses of batches are in files: they do not push others out of the server's memory."""
    body = bytes(line.body)
    if batch.endpoint != "/v1/responses":
        return body
    return msgspec.json.encode({"store": False, **msgspec.json.decode(body)})


def _message(answer: LineAnswer) -> str:
    try:
        return str(msgspec.json.decode(answer.body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"status {answer.status}"
