"""What a start costs in a running server, and what is left of a load when it is over.

Cold from host memory means that the server's pool holds the model and no worker uses it; cold from disk that the pool
has given it up and the page cache holds nothing of its file either.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import httpx
import msgspec

from dovetail.local_token import token_for
from dovetail.sim.trace import Arrival
from dovetail.store.loading.page_cache import cached_fraction
from dovetail_bench import page_cache
from dovetail_bench.fleet import FleetModel, prompts_for
from dovetail_bench.load import Answer, Load, first_token_s, request_body
from dovetail_bench.process_tree import TreeSampler, Use, watch
from dovetail_bench.servers import Running, ServerFailed

PROMPT_TOKENS = 128
ANSWER_TOKENS = 2
UNLOAD_TIMEOUT_S = 30.0
SETTLE_S = 3.0
HOST_KEEP_ALIVE_S = 1.0  # so that the pool gives models up soon where starts are measured
WATCH_S = 5.0

State = Literal["warm", "host", "disk"]
STATES: tuple[State, ...] = ("warm", "host", "disk")
Step = Callable[[str, int, int], None]


class StartTime(msgspec.Struct, frozen=True):
    """First tokens of a 128-token prompt, of one state."""

    state: State
    runs: int
    seconds_median: float
    seconds_min: float
    seconds_max: float
    over_warm_s: float  # of the medians
    cached_share: float  # of the file in the page cache when the request was sent, mean
    tiers: dict[str, int]  # where the server said that the model was


class IdleReport(msgspec.Struct, frozen=True):
    """Before any request, under load, and a while after it."""

    empty: Use
    loaded_peak_pss_bytes: int
    loaded_cpu_share: float  # of one core
    after: Use
    after_s: float  # since the end of the last request
    memory_over_empty: float  # PSS after to PSS before, minus 1
    requests: int


def measure_starts(
    server: Running,
    models: Sequence[FleetModel],
    rounds: int,
    seed: int = 0,
    step: Step = lambda what, done, total: None,
) -> list[StartTime]:
    """In turns over the models, so that no state meets a quieter machine than another."""
    return asyncio.run(_Starts(server, models, seed, step).run(rounds))


class _Starts:
    def __init__(self, server: Running, models: Sequence[FleetModel], seed: int, step: Step) -> None:
        self._url = server.url
        self._models = models
        self._prompts = prompts_for(models, seed)
        self._step = step
        self._seconds: dict[State, list[float]] = {state: [] for state in STATES}
        self._cached: dict[State, list[float]] = {state: [] for state in STATES}
        self._tiers: dict[State, dict[str, int]] = {state: {} for state in STATES}

    async def run(self, rounds: int) -> list[StartTime]:
        token = {"authorization": f"Bearer {token_for(self._url)}"}  # a server without keys is changed with it
        async with httpx.AsyncClient(base_url=self._url, timeout=120.0, trust_env=False, headers=token) as client:
            await self._ask(client, self._models[0])  # whatever a first request of all pays for
            for turn in range(rounds):
                model = self._models[turn % len(self._models)]
                for count, state in enumerate(STATES):
                    await self._measure(client, model, state)
                    self._step(f"{model.name} {state}", turn * len(STATES) + count + 1, rounds * len(STATES))
        warm = statistics.median(self._seconds["warm"])
        return [self._summary(state, warm) for state in STATES]

    async def _measure(self, client: httpx.AsyncClient, model: FleetModel, state: State) -> None:
        if state == "warm":
            await self._ask(client, model)
        else:
            await self._unload(client, model)
        if state == "disk":
            await asyncio.sleep(HOST_KEEP_ALIVE_S + 2.0)  # until the pool has given it up
            page_cache.drop(model.blobs)
        tier = (await client.get(f"/api/models/{model.name}")).raise_for_status().json()["tier"]
        self._tiers[state][tier] = self._tiers[state].get(tier, 0) + 1
        self._cached[state].append(statistics.mean(cached_fraction(path) for path in model.blobs))
        self._seconds[state].append(await self._ask(client, model))

    async def _ask(self, client: httpx.AsyncClient, model: FleetModel) -> float:
        tokens = min(PROMPT_TOKENS, model.card.spec.context_length // 2)
        body = request_body(model.name, self._prompts[model.name].make(tokens), ANSWER_TOKENS)
        return await first_token_s(client, body)

    async def _unload(self, client: httpx.AsyncClient, model: FleetModel) -> None:
        (await client.post(f"/api/models/{model.name}/unload")).raise_for_status()
        deadline = time.monotonic() + UNLOAD_TIMEOUT_S
        while time.monotonic() < deadline:
            described = (await client.get(f"/api/models/{model.name}")).json()
            if described["state"] in ("absent", "host"):
                return
            await asyncio.sleep(0.02)
        raise ServerFailed(f"{model.name} was not unloaded within {UNLOAD_TIMEOUT_S:g} s")

    def _summary(self, state: State, warm_s: float) -> StartTime:
        seconds = self._seconds[state]
        median = statistics.median(seconds)
        return StartTime(
            state=state,
            runs=len(seconds),
            seconds_median=median,
            seconds_min=min(seconds),
            seconds_max=max(seconds),
            over_warm_s=median - warm_s,
            cached_share=statistics.mean(self._cached[state]),
            tiers=self._tiers[state],
        )


def measure_idle(
    server: Running,
    models: Sequence[FleetModel],
    arrivals: Sequence[Arrival],
    wait_s: float = 60.0,
    seed: int = 0,
    step: Step = lambda what, done, total: None,
) -> IdleReport:
    watch_s = min(WATCH_S, wait_s)
    time.sleep(min(SETTLE_S, wait_s))
    empty = watch(server.pid, watch_s)
    done: list[Answer] = []

    def on_end(answer: Answer) -> None:
        done.append(answer)
        step("under load", len(done), len(arrivals))

    load = Load(server.url, [model.name for model in models], prompts_for(models, seed), on_end)
    with TreeSampler(server.pid) as sampler:
        asyncio.run(load.run(arrivals))
    ended = time.monotonic()
    step(f"idle for {wait_s:g} s", len(done), len(arrivals))
    time.sleep(wait_s - watch_s)
    after = watch(server.pid, watch_s)
    last = sampler.samples[-1]
    return IdleReport(
        empty=empty,
        loaded_peak_pss_bytes=max(sample.pss_bytes for sample in sampler.samples),
        loaded_cpu_share=last.cpu_s / max(last.at_s, 1e-9),
        after=after,
        after_s=time.monotonic() - ended,
        memory_over_empty=after.pss_bytes / max(empty.pss_bytes, 1) - 1,
        requests=len(done),
    )
