"""A real worker process over its real socket."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from drive import Engine, make_executor, make_request

from dovetail import messages
from dovetail.node.protocol import Evicted, Propose, Refused
from dovetail.policy.headroom import Refusal
from dovetail.policy.work import Work
from dovetail.store import describe
from dovetail.types import Request, TokenEvent
from dovetail_bench.worker_process import WorkerProcess

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    options = ("--threads", "1", "--block-size", "4", "--kv-bytes", str(1 << 24), "--idle-release-s", "0.2")
    with WorkerProcess(*options) as process:
        process.wait_for(messages.Hello)
        yield process


@pytest.fixture(scope="module")
def folders(worker: WorkerProcess, tiny_folder: Callable[[str], Path]) -> dict[str, Path]:
    """Three models, loaded into the one worker."""
    loaded = {}
    for name in ("llama", "qwen3", "opt"):
        worker.load(describe(tiny_folder(name), name), dtype="f32")
        answer = worker.wait_for(messages.Loaded)
        assert (answer.model, answer.dtype, answer.mapped) == (name, "f32", True)
        loaded[name] = tiny_folder(name)
    return loaded


def request_to(model: str, id: str, prompt: list[int], **sampling: object) -> Request:
    request = make_request(prompt, id=id, **sampling)
    return Request(id, model, request.prompt, request.sampling, request.num_choices)


def collect(worker: WorkerProcess, ids: set[str]) -> dict[str, list[TokenEvent]]:
    """Events by request until each of `ids` has ended."""
    events: dict[str, list[TokenEvent]] = {id: [] for id in ids}
    open_ids = set(ids)
    while open_ids:
        for event in worker.wait_for(messages.Tokens, timeout_s=TIMEOUT_S).events:
            if event.request_id in events:
                events[event.request_id].append(event)
            if event.finish is not None:
                open_ids.discard(event.request_id)
    return events


def idle_stats(worker: WorkerProcess, model: str) -> messages.InstanceStats:
    def is_idle(stats: messages.Stats) -> bool:
        return all(i.running == i.waiting == 0 for i in stats.instances)

    stats = worker.wait_for(messages.Stats, is_idle, timeout_s=TIMEOUT_S)
    return next(instance for instance in stats.instances if instance.model == model)


def test_models_of_one_worker_share_it_and_give_what_each_gives_alone(
    worker: WorkerProcess, folders: dict[str, Path]
) -> None:
    prompts = {name: list(range(i, i + 20)) for i, name in enumerate(folders)}
    for name, prompt in prompts.items():
        worker.submit(request_to(name, name, prompt, max_tokens=24))
    events = collect(worker, set(folders))
    for name, folder in folders.items():
        executor = make_executor(folder)
        (alone,) = Engine(executor).run(make_request(prompts[name], max_tokens=24)).values()
        assert [event.token for event in events[name]] == alone
        executor.close()


def test_an_abort_frees_the_blocks_and_nothing_more_is_heard(worker: WorkerProcess, folders: dict[str, Path]) -> None:
    worker.submit(request_to("llama", "long", [1, 2, 3], max_tokens=200))
    worker.wait_for(messages.Tokens)
    worker.abort("long")
    worker.submit(request_to("llama", "next", [5, 6], max_tokens=2))
    seen: list[str] = []
    while seen.count("next") < 2:
        seen += [event.request_id for event in worker.wait_for(messages.Tokens).events]
    assert "long" not in seen[seen.index("next") :]
    assert idle_stats(worker, "llama").blocks_used == 0


def test_the_end_of_a_burst_is_reported_also_when_it_is_an_abort(
    worker: WorkerProcess, folders: dict[str, Path]
) -> None:
    worker.submit(request_to("opt", "burst", [1, 2, 3], max_tokens=250))
    worker.wait_for(messages.Tokens)
    worker.wait_for(messages.Stats, lambda stats: any(i.running for i in stats.instances), timeout_s=TIMEOUT_S)
    worker.abort("burst")
    assert idle_stats(worker, "opt").blocks_used == 0


def test_an_idle_instance_forgets_its_prefixes(worker: WorkerProcess, folders: dict[str, Path]) -> None:
    worker.submit(request_to("opt", "warm", list(range(30)), max_tokens=2))
    collect(worker, {"warm"})
    worker.wait_for(
        messages.Stats, lambda stats: all(i.blocks_cached == 0 for i in stats.instances), timeout_s=TIMEOUT_S
    )


def test_requests_for_a_loading_model_are_held(worker: WorkerProcess, tiny_folder: Callable[[str], Path]) -> None:
    worker.offer(describe(tiny_folder("gemma2"), "late"), dtype="f32")
    worker.submit(request_to("late", "held", [1, 2, 3], max_tokens=3))
    events = collect(worker, {"held"})["held"]
    assert len(events) == 3


def test_a_request_for_an_unknown_model_is_refused(worker: WorkerProcess) -> None:
    record = Work(10**6, "nobody", 1, 0.0, 1.0, 1.0).record()
    worker.send(messages.Ask(10**6, Propose(record), request_to("nobody", "lost", [1])))
    reply = worker.wait_for(messages.Reply, lambda one: one.number == 10**6)
    assert reply.answer == Refused(Refusal.HARDWARE)


def evicted(worker: WorkerProcess, model: str) -> Evicted:
    """A request of the model that comes back unfinished."""
    while True:
        for notice in worker.wait_for(messages.Said, timeout_s=TIMEOUT_S).notices:
            if isinstance(notice, Evicted) and notice.request.model == model:
                return notice


def test_a_failed_load_names_its_file_and_gives_back_what_was_held(
    worker: WorkerProcess, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    card = describe(tiny_folder("llama"), "broken")
    for file in Path(card.path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[:1000])
    worker.offer(msgspec.structs.replace(card, path=str(tmp_path)))
    worker.submit(request_to("broken", "doomed", [1]))
    failed = worker.wait_for(messages.LoadFailed)
    assert str(tmp_path) in failed.error
    assert evicted(worker, "broken").reason == "load_failed"


def test_unloading_gives_its_requests_back_and_frees_the_name(worker: WorkerProcess, folders: dict[str, Path]) -> None:
    worker.submit(request_to("qwen3", "cut", [1, 2], max_tokens=250))
    worker.wait_for(messages.Tokens, lambda tokens: tokens.model == "qwen3")
    worker.send(messages.Unload("qwen3"))
    back = evicted(worker, "qwen3")
    assert back.reason == "unloaded"
    assert back.request.produced > 0
    assert worker.wait_for(messages.Unloaded).model == "qwen3"
    worker.abort("cut")
    worker.load(describe(folders["qwen3"], "qwen3"), dtype="f32")
    worker.wait_for(messages.Loaded)


def test_a_model_unloaded_while_it_loads_makes_way_for_the_next_of_its_name(
    worker: WorkerProcess, tiny_folder: Callable[[str], Path]
) -> None:
    worker.load(describe(tiny_folder("llama"), "swap"), dtype="f32")
    worker.submit(request_to("swap", "early", [1], max_tokens=2))
    worker.send(messages.Unload("swap"))
    worker.abort("early")
    worker.wait_for(messages.Unloaded)
    worker.offer(describe(tiny_folder("gemma2"), "swap"), dtype="f32")
    worker.submit(request_to("swap", "late", [1, 2, 3], max_tokens=8))
    events = collect(worker, {"late"})
    executor = make_executor(tiny_folder("gemma2"))
    (alone,) = Engine(executor).run(make_request([1, 2, 3], max_tokens=8)).values()
    executor.close()
    assert [event.token for event in events["late"]] == alone


def test_signals_to_the_group_are_left_to_the_gateway(worker: WorkerProcess, folders: dict[str, Path]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.process.pid, number)
    worker.submit(request_to("llama", "after", [1], max_tokens=2))
    assert len(collect(worker, {"after"})["after"]) == 2


def test_a_worker_leaves_when_told_and_when_its_parent_is_gone() -> None:
    with WorkerProcess("--threads", "1") as told:
        told.wait_for(messages.Hello)
        told.send(messages.Shutdown())
        assert told.process.wait(timeout=TIMEOUT_S) == 0
    with WorkerProcess("--threads", "1", "--parent", "1") as orphan:  # the last --parent wins: not its real parent
        assert orphan.process.wait(timeout=TIMEOUT_S) == 0
