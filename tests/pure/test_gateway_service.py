"""The gateway's core on a fake worker: text, stops, aborts, cold models, failures, restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_worker import CRASH, FAIL
from gateway_builders import END, eventually, make_card, running_service
from starlette.requests import Request

from dovetail.errors import ContextTooLong, EngineFailed, InvalidRequest, ModelNotFound, Overloaded, Unprocessable
from dovetail.gateway.admin.status import server_status
from dovetail.gateway.generation_task import Delta, Origin
from dovetail.gateway.http import build_request
from dovetail.gateway.http.api import CompletionRequest
from dovetail.gateway.models import FixedCatalogue, Models
from dovetail.gateway.service import Limits, Service
from dovetail.gateway.text.translate import GenerationRequest, translate_completion
from dovetail.messages import Load
from dovetail.types import FinishReason, ModelCard, Slo

counter = iter(range(10**9))


async def make_job(service: Service, prompt: Any, **options: Any) -> GenerationRequest:
    body = CompletionRequest(**({"model": "fake", "prompt": prompt, "max_tokens": 8} | options))
    model = service.models.get(body.model)
    return await translate_completion(body, model, f"job-{next(counter)}", service.context_limit(model), Slo())


async def collect(service: Service, prompt: Any, **options: Any) -> dict[int, list[Delta]]:
    found: dict[int, list[Delta]] = {}
    async with aclosing(service.run(await make_job(service, prompt, **options))) as deltas:
        async for delta in deltas:
            found.setdefault(delta.index, []).append(delta)
    return found


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def on_service(
    folder: Path, test: Callable[[Service], Awaitable[None]], cards: Sequence[ModelCard] = (), **options: Any
) -> None:
    async def run() -> None:
        async with running_service(folder, *cards, **options) as service:
            await asyncio.wait_for(test(service), 60)
            assert service.unfinished == 0
            assert not len(service.cluster.remote.requests)
            assert all(work.is_complete for work in service.cluster.controller.works.values())

    asyncio.run(run())


def test_a_prompt_is_answered_by_its_tokens_until_max_tokens(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        (deltas,) = (await collect(service, "héllo ", max_tokens=14)).values()
        assert text_of(deltas) == "héllo héllo "
        assert deltas[-1].finish is FinishReason.LENGTH
        assert sum(len(delta.tokens) for delta in deltas) == 14

    on_service(tmp_path, test)


def test_a_worker_that_is_there_before_the_service_is_known_to_it(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        assert text_of((await collect(service, "hi", max_tokens=2))[0])

    on_service(tmp_path, test, is_worker_first=True)


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


def test_answers_go_on_when_their_worker_dies(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        await collect(service, "a")
        running = [asyncio.create_task(collect(service, "abc", max_tokens=400, n=2)) for _ in range(5)]
        await eventually(lambda: service.metrics.generation_tokens.labels("fake")._value.get() > 500)
        kill_worker(service)
        for found in await asyncio.gather(*running):
            for deltas in found.values():
                assert text_of(deltas) == ("abc" * 134)[:400]
                assert sum(len(delta.tokens) for delta in deltas) == 400
                assert [delta.finish for delta in deltas].count(FinishReason.LENGTH) == 1
        assert service.link.supervisors["cpu-0"].starts == 2
        shown = service.metrics.render().body
        assert b'dovetail:worker_exits_total{node="cpu-0"} 1.0' in shown
        assert b'dovetail:request_resumptions_total{model_name="fake"} 5.0' in shown

    on_service(tmp_path, test)


def test_an_answer_goes_on_twice_and_then_ends_with_an_error(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        await collect(service, "a")
        # Tokens, as [CRASH] is: a text takes its time to become tokens, and might come after the first death.
        stopped = asyncio.create_task(collect(service, [64, 65, 66], stop=["zzz"], max_tokens=400))
        crashing = asyncio.create_task(collect(service, [CRASH]))
        with pytest.raises(EngineFailed, match="ended with code 9 again, after 2 attempts"):
            await crashing
        with pytest.raises(EngineFailed, match="after 2 attempts"):  # it was there each time
            await stopped
        assert service.link.supervisors["cpu-0"].starts == 3

    on_service(tmp_path, test, limits=Limits(resume_timeout_s=30))


def test_without_resumptions_a_death_is_an_error_at_once(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        with pytest.raises(EngineFailed, match=r"ended with code 9$"):
            await collect(service, [CRASH])
        assert text_of((await collect(service, "ab", max_tokens=4))[0]) == "abab"

    on_service(tmp_path, test, limits=Limits(max_resumptions=0))


def test_a_stream_does_not_wait_for_its_worker_longer_than_the_limit(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        async with aclosing(service.run(await make_job(service, "ab", max_tokens=400))) as deltas:
            await anext(deltas)
            kill_worker(service)
            with pytest.raises(Overloaded, match="killed by signal 9 and was not back within 0 s") as caught:
                async for _ in deltas:
                    pass
        assert caught.value.retry_after_s
        assert text_of((await collect(service, "ab", max_tokens=4))[0]) == "abab"

    on_service(tmp_path, test, limits=Limits(resume_timeout_s=0))


def test_a_worker_that_dies_while_it_loads_costs_the_waiting_requests_nothing(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        await service.link.supervisors["cpu-0"].greeted
        waiting = [asyncio.create_task(collect(service, "ab", model="slow", max_tokens=4)) for _ in range(3)]
        await eventually(lambda: service.unfinished == 3)
        kill_worker(service)
        for found in await asyncio.gather(*waiting):
            assert text_of(found[0]) == "abab"

    on_service(tmp_path, test, cards=[make_card(tmp_path), make_card(tmp_path, "slow")])


def test_nobody_waits_for_a_worker_that_never_comes_back(tmp_path: Path) -> None:
    """Neither those whose worker died under them before their first token, nor those who come after."""

    async def test(service: Service) -> None:
        supervisor = service.link.supervisors["cpu-0"]
        await supervisor.greeted
        waiting = [asyncio.create_task(collect(service, "ab", model="slow", max_tokens=4)) for _ in range(3)]
        await eventually(lambda: service.unfinished == 3)
        supervisor._argv = ["false"]
        kill_worker(service)
        late = asyncio.create_task(collect(service, "ab", model="slow", max_tokens=4))
        for outcome in await asyncio.gather(*waiting, late, return_exceptions=True):
            assert isinstance(outcome, Overloaded), outcome
            assert outcome.retry_after_s

    cards = [make_card(tmp_path), make_card(tmp_path, "slow")]
    on_service(tmp_path, test, cards=cards, limits=Limits(no_worker_timeout_s=0.5))


def test_a_worker_that_dies_again_and_again_is_given_pauses(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        for _ in range(2):
            with pytest.raises(EngineFailed):
                await collect(service, [CRASH])
        with pytest.raises(Overloaded) as caught:
            await collect(service, "ab")
        assert caught.value.retry_after_s

    on_service(tmp_path, test, limits=Limits(max_resumptions=0))


def kill_worker(service: Service) -> None:
    pid = server_status(service).nodes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_an_error_over_one_message_costs_no_other(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        def failing(node: str, message: object) -> None:
            raise LookupError(node)

        service.link.observers.append(failing)
        for _ in range(5):
            found = await asyncio.wait_for(collect(service, ["ab", "cd", "ef"], n=4, max_tokens=100), 20)
            assert {text_of(deltas) for deltas in found.values()} == {"ab" * 50, "cd" * 50, "ef" * 50}
        assert errors

    on_service(tmp_path, test)


def test_a_failed_load_that_crossed_an_unload_says_nothing_of_the_next_one(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        await service.link.supervisors["cpu-0"].greeted
        cluster, good = service.cluster, service.models.get("fake").card
        first = cluster.offer(Load(msgspec.structs.replace(good, name="broken")))
        await first.known.wait()
        cluster.warm("broken")
        cluster.unload("broken")  # its LoadFailed is on the way by the time the next Load is sent
        again = cluster.offer(Load(msgspec.structs.replace(good, name="broken", source="good")))
        await again.known.wait()
        cluster.warm("broken")
        await again.ready
        assert cluster.models["broken"] is again
        assert cluster.nodes_of("broken") == ["cpu-0"]

    on_service(tmp_path, test)


def test_a_model_that_was_pulled_again_is_served_when_the_old_answers_are_finished(tmp_path: Path) -> None:
    cards = [make_card(tmp_path)]

    async def test(service: Service) -> None:
        old = asyncio.create_task(collect(service, "ab", max_tokens=300))
        await eventually(lambda: service.unfinished)
        new = make_card(tmp_path, created=1)
        service.models = Models(FixedCatalogue([new]), {})
        fresh = [asyncio.create_task(collect(service, "cd", max_tokens=4)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in [old, *fresh])
        assert text_of((await old)[0]) == "ab" * 150
        assert [text_of(found[0]) for found in await asyncio.gather(*fresh)] == ["cdcd"] * 3
        assert service.cluster.models["fake"].card == new

    on_service(tmp_path, test, cards=cards)


def test_a_job_that_can_never_be_queued_is_the_callers_to_change(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        with pytest.raises(InvalidRequest, match="3 answers are more than this server queues"):
            await collect(service, ["a", "b", "c"])

    on_service(tmp_path, test, limits=Limits(max_queue=2))


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

    on_service(tmp_path, test, limits=Limits(max_queue=2))


def test_a_refusal_comes_after_a_pause_so_that_asking_again_and_again_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(service: Service) -> None:
        model = service.models.get("fake")
        request = Request({"type": "http", "headers": []})
        body = CompletionRequest(model="fake", prompt="ab", n=2)
        with service.places(1, Origin(0.0)):
            with pytest.raises(Overloaded):
                await build_request.build_completion(service, request, body, model)
            monkeypatch.setattr(build_request, "REFUSED_S", 3600)
            waiting = asyncio.create_task(build_request.build_completion(service, request, body, model))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()
        assert (await build_request.build_completion(service, request, body, model)).num_answers == 2

    on_service(tmp_path, test, limits=Limits(max_queue=2))


def test_one_request_for_many_answers_weighs_as_much_as_many_requests(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        running = asyncio.create_task(collect(service, "ab", max_tokens=200, n=2))
        await eventually(lambda: service.unfinished == 2)
        with pytest.raises(Overloaded, match="2 requests are unfinished"):
            await collect(service, "ab")
        await running
        assert service.unfinished == 0
        with pytest.raises(InvalidRequest, match="3 answers"):
            await collect(service, "ab", n=3)

    on_service(tmp_path, test, limits=Limits(max_queue=2))


def test_one_key_of_several_gets_half_of_the_queue(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        async def collect_for(key: str) -> None:
            origin = Origin(time.monotonic(), key)
            job = await make_job(service, "ab", max_tokens=200)
            async with aclosing(service.run(job, origin)) as deltas:
                async for _ in deltas:
                    pass

        running = [asyncio.create_task(collect_for("greedy")) for _ in range(2)]
        await eventually(lambda: service.unfinished == 2)
        with pytest.raises(Overloaded, match="of the key 'greedy'"):
            await collect_for("greedy")
        await collect_for("modest")
        await asyncio.gather(*running)
        await collect_for("greedy")

    on_service(tmp_path, test, limits=Limits(max_queue=4))


def test_an_idle_model_is_unloaded_after_its_keep_alive_and_comes_back(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        for _ in range(2):
            await collect(service, "a")
            await eventually(lambda: not service.cluster.is_in_use("fake"))

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


def test_a_newcomer_finds_room_beside_keys_that_take_what_they_can(tmp_path: Path) -> None:
    async def test(service: Service) -> None:
        async def fill(key: str) -> int:
            held = 0
            while True:
                try:
                    service.check_admission(1, key)
                except Overloaded:
                    return held
                service._begin(1, key)
                held += 1

        shares = [await fill(key) for key in ("first", "second", "third")]
        assert shares == [32, 16, 8]
        assert [await fill(key) for key in ("first", "second", "third", "fourth")] == [0, 0, 0, 4]
        for key, held in zip(("first", "second", "third", "fourth"), (*shares, 4), strict=True):
            service._end(held, key)

    on_service(tmp_path, test, limits=Limits(max_queue=64))
