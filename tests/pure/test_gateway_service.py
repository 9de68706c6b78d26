"""The gateway's core on a fake worker: text, stops, aborts, cold models, failures, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fake_worker import CRASH, FAIL
from gateway_builders import END, make_card, running_service

from dovetail.errors import ContextTooLong, EngineFailed, InvalidRequest, ModelNotFound, Overloaded, Unprocessable
from dovetail.gateway.api import CompletionRequest
from dovetail.gateway.service import Delta, Service
from dovetail.gateway.status import server_status
from dovetail.gateway.translate import Job, completion_job
from dovetail.types import FinishReason, Slo

counter = iter(range(10**9))


async def make_job(service: Service, prompt: Any, **options: Any) -> Job:
    body = CompletionRequest(**({"model": "fake", "prompt": prompt, "max_tokens": 8} | options))
    model = service.models.get(body.model)
    return await completion_job(body, model, f"job-{next(counter)}", service.context_limit(model), Slo())


async def collect(service: Service, prompt: Any, **options: Any) -> dict[int, list[Delta]]:
    found: dict[int, list[Delta]] = {}
    async with aclosing(service.run(await make_job(service, prompt, **options))) as deltas:
        async for delta in deltas:
            found.setdefault(delta.index, []).append(delta)
    return found


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def on_service(folder: Path, test: Callable[[Service], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with running_service(folder, **options) as service:
            await asyncio.wait_for(test(service), 60)
            assert service.unfinished == 0
            assert not any(node.inboxes for node in service.link.nodes.values())

    asyncio.run(run())


async def eventually(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never happened")


def test_a_prompt_is_answered_by_its_tokens_until_max_tokens(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        (deltas,) = (await collect(service, "héllo ", max_tokens=14)).values()
        assert text_of(deltas) == "héllo héllo "
        assert deltas[-1].finish is FinishReason.LENGTH
        assert sum(delta.num_tokens for delta in deltas) == 14

    on_service(tmp_path, test)


def test_every_choice_of_every_prompt_ends_once(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        found = await collect(service, ["ab", "cd", "ef"], n=2, max_tokens=4)
        assert [text_of(found[index]) for index in range(6)] == ["abab", "abab", "cdcd", "cdcd", "efef", "efef"]
        assert all([d.finish for d in deltas].count(FinishReason.LENGTH) == 1 for deltas in found.values())

    on_service(tmp_path, test)


def test_a_stop_string_ends_the_text_and_frees_the_worker(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        (deltas,) = (await collect(service, "one two three ", stop=["thr", "zzz"], max_tokens=400)).values()
        assert text_of(deltas) == "one two "
        assert (deltas[-1].finish, deltas[-1].stop_reason) == (FinishReason.STOP, "thr")
        node = service.link.nodes["cpu-0"]
        await eventually(lambda: node.stats and node.stats.instances[0].blocks_used == 0)

    on_service(tmp_path, test)


def test_the_token_that_ends_a_text_is_not_part_of_it(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        (deltas,) = (await collect(service, [64, 65, END], skip_special_tokens=False)).values()
        assert (text_of(deltas), deltas[-1].finish, deltas[-1].stop_reason) == ("ab", FinishReason.STOP, None)
        (deltas,) = (await collect(service, [64, 65, 66], stop_token_ids=[66])).values()
        assert (text_of(deltas), deltas[-1].finish, deltas[-1].stop_reason) == ("ab", FinishReason.STOP, 66)
        (deltas,) = (await collect(service, [104, 105, END], ignore_eos=True, skip_special_tokens=False)).values()
        assert "<|end|>" in text_of(deltas)

    on_service(tmp_path, test)


def test_closing_the_stream_tells_the_worker_at_once(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        async with aclosing(service.run(await make_job(service, "ab", max_tokens=400))) as deltas:
            await anext(deltas)
            assert service.unfinished == 1
        assert service.unfinished == 0
        node = service.link.nodes["cpu-0"]
        await eventually(lambda: node.stats and node.stats.instances[0].blocks_used == 0)

    on_service(tmp_path, test)


def test_cancelling_the_reader_aborts(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        task = asyncio.create_task(collect(service, "ab", max_tokens=500))
        await eventually(lambda: service.unfinished)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert service.unfinished == 0

    on_service(tmp_path, test)


def test_a_model_that_cannot_be_loaded_ends_every_request_that_waits(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        results = await asyncio.gather(
            *(collect(service, "a", model="broken") for _ in range(5)), return_exceptions=True
        )
        assert all(isinstance(r, EngineFailed) and "weights are truncated" in r.message for r in results)
        assert "broken" not in service.link.nodes["cpu-0"].instances  # the next request tries again

    on_service(tmp_path, test)


def test_a_dying_worker_ends_its_requests_and_the_next_one_is_served(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        await collect(service, "a")
        running = [asyncio.create_task(collect(service, "ab", max_tokens=500)) for _ in range(3)]
        await eventually(lambda: service.unfinished == 3)
        with pytest.raises(EngineFailed, match="ended with code 9"):
            await collect(service, [CRASH])
        for result in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(result, EngineFailed)
        assert text_of((await collect(service, "ab", max_tokens=4))[0]) == "abab"
        assert service.link.supervisors["cpu-0"].starts == 2
        assert b'dovetail:worker_exits_total{node="cpu-0"} 1.0' in service.metrics.render()

    on_service(tmp_path, test)


def test_a_worker_that_dies_again_and_again_is_given_pauses(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        for _ in range(2):
            with pytest.raises(EngineFailed):
                await collect(service, [CRASH])
        with pytest.raises(Overloaded) as caught:
            await collect(service, "ab")
        assert caught.value.retry_after_s

    on_service(tmp_path, test)


def test_a_killed_worker_is_named_by_its_signal(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        task = asyncio.create_task(collect(service, "ab", max_tokens=500))
        await eventually(lambda: service.link.nodes["cpu-0"].stats or service.link.nodes["cpu-0"].hello)
        pid = server_status(service).nodes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="killed by signal 9"):
            await task

    on_service(tmp_path, test)


def test_one_failing_request_leaves_the_others_alone(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        other = asyncio.create_task(collect(service, "ab", max_tokens=300))
        with pytest.raises(EngineFailed, match="no luck"):
            await collect(service, [FAIL], n=3)
        assert len(text_of((await other)[0])) == 300

    on_service(tmp_path, test)


def test_more_than_max_queue_is_refused(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        running = [asyncio.create_task(collect(service, "ab", max_tokens=200)) for _ in range(2)]
        await eventually(lambda: service.unfinished == 2)
        with pytest.raises(Overloaded, match="unfinished") as caught:
            await collect(service, "ab")
        assert caught.value.retry_after_s
        await asyncio.gather(*running)

    on_service(tmp_path, test, max_queue=2)


def test_an_idle_model_is_unloaded_after_its_keep_alive_and_comes_back(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        node = service.link.nodes["cpu-0"]
        for _ in range(2):
            await collect(service, "a")
            await eventually(lambda: "fake" not in node.instances)

    on_service(tmp_path, test, keep_alive=0)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "unknown"}, ModelNotFound),
        ({"prompt": "a" * 600}, ContextTooLong),
        ({"prompt": "a" * 10_000_000}, ContextTooLong),
        ({"max_tokens": 512}, ContextTooLong),
        ({"prompt": ""}, InvalidRequest),
        ({"prompt": [300]}, InvalidRequest),
        ({"logit_bias": {"300": 1.0}}, InvalidRequest),
        ({"logit_bias": {"x": 1.0}}, InvalidRequest),
        ({"min_tokens": 9}, InvalidRequest),
        ({"guided_regex": "(a"}, Unprocessable),
        ({"guided_grammar": "start: nothing"}, Unprocessable),
        ({"guided_json": {"type": "no such type"}}, Unprocessable),
        ({"guided_json": "{"}, Unprocessable),
        ({"guided_json": {}, "guided_regex": "a"}, InvalidRequest),
        ({"prompt": ["a"] * 200, "n": 2}, InvalidRequest),
    ],
)
def test_what_the_model_cannot_do_is_refused_before_it_is_submitted(
    tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    async def test() -> None:
        async with running_service(tmp_path) as service:
            with pytest.raises(error):
                await make_job(service, **({"prompt": "a"} | options))

    asyncio.run(test())


def test_the_token_budget_follows_the_context(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        job = await make_job(service, "a" * 510, max_tokens=None)
        assert job.requests[0].sampling.max_tokens == 2
        assert (await make_job(service, "a", max_tokens=None)).requests[0].sampling.max_tokens == 16

    on_service(tmp_path, test)


def test_the_models_own_defaults_stand_behind_the_clients_values(tmp_path: Path) -> None:
    from dovetail.types import GenerationDefaults

    card = make_card(tmp_path, defaults=GenerationDefaults(temperature=0.2, top_k=5))

    async def test() -> None:
        async with running_service(tmp_path, card) as service:
            sampling = (await make_job(service, "a", temperature=0.0)).requests[0].sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 5, 1.0)
            first, second = [(await make_job(service, "a")).requests[0].sampling.seed for _ in range(2)]
            assert first != second
            assert (await make_job(service, "a", seed=-1)).requests[0].sampling.seed == 2**63 - 1

    asyncio.run(test())
