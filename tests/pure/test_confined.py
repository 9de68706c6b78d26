"""Processes that may take so much and no more: chat templates as programs that came with a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from gateway_builders import make_card

from dovetail.confined import Bounds, Confined, Exceeded, Lane
from dovetail.errors import InvalidRequest, Overloaded
from dovetail.gateway.clients import current_client
from dovetail.gateway.text.chat import TemplateFacts, TemplateText
from dovetail.gateway.text.grammar_trials import BOUNDS as TRIAL_BOUNDS
from dovetail.gateway.text.grammar_trials import GrammarTrials
from dovetail.gateway.text.templates import Templates
from dovetail.types import Grammar

BOUNDS = Bounds(cpu_s=0.2, wall_s=20.0, memory_bytes=256 << 20, kept_bytes=16 << 20)
HELLO = [{"role": "user", "content": "hi"}]
ENDLESS = {
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 9 ** (9 ** 9) }}",
}
GREEDY = {
    "a product": "{{ ('a' * 3000000000) | length }}",
    "doubling": "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "a list": "{% set x = [0] * 900000000 %}{{ x | length }}",
}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def text_of(folder: Path, template: str) -> TemplateText:
    return TemplateFacts(make_card(folder, chat_template=template)).text


def test_a_template_is_rendered_as_in_this_process(tmp_path: Path) -> None:
    templates = Templates(BOUNDS)
    text = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ tools | length }}é🗼"
    for _ in range(2):
        assert run(templates.render(text_of(tmp_path, text), HELLO, tools=[{"a": 2**70}])) == "[user] hi1é🗼"
    with pytest.raises(InvalidRequest, match=r"refuses these messages.*not today"):
        run(templates.render(text_of(tmp_path, "{{ raise_exception('not today') }}"), HELLO))


@pytest.mark.parametrize("template", [*ENDLESS.values(), *GREEDY.values()], ids=[*ENDLESS, *GREEDY])
def test_a_template_without_end_or_measure_is_an_error_and_others_go_on(template: str, tmp_path: Path) -> None:
    templates, before = Templates(BOUNDS), psutil.Process().memory_info().rss

    async def both() -> str:
        bad = asyncio.create_task(templates.render(text_of(tmp_path, template), HELLO))
        with pytest.raises(InvalidRequest, match="chat template"):
            await bad
        return await templates.render(text_of(tmp_path, "{{ messages[0].content }}"), HELLO)

    assert run(both()) == "hi"
    assert psutil.Process().memory_info().rss < before + (256 << 20)


def test_a_slow_template_keeps_only_its_own_kind_waiting(tmp_path: Path) -> None:
    templates = Templates(BOUNDS)
    slow, quick = text_of(tmp_path, ENDLESS["a loop"]), text_of(tmp_path, "{{ messages[0].content }}")

    async def both() -> list[str]:
        with pytest.raises(InvalidRequest):
            await templates.render(slow, HELLO)  # known to be slow from now on
        several = [asyncio.create_task(templates.render(slow, HELLO)) for _ in range(3)]
        await asyncio.sleep(0)
        texts = [await templates.render(quick, HELLO) for _ in range(5)]
        assert not any(task.done() for task in several)  # they are still at it
        for task in several:
            task.cancel()
        await asyncio.gather(*several, return_exceptions=True)
        return texts

    started = time.monotonic()
    assert run(both()) == ["hi"] * 5
    print(f"{time.monotonic() - started:.1f} s")


def test_clients_take_turns_at_what_is_slow(tmp_path: Path) -> None:
    templates = Templates(BOUNDS)
    slow, ended = text_of(tmp_path, ENDLESS["a loop"]), list[str]()

    async def ask(client: str) -> None:
        current_client.set(client)
        with pytest.raises(InvalidRequest):
            await templates.render(slow, HELLO)
        ended.append(client)

    async def both() -> None:
        await ask("ann")  # known to be slow from now on
        tasks = [asyncio.create_task(ask("ann")) for _ in range(8)]
        await asyncio.sleep(0)
        await asyncio.create_task(ask("bob"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(both())
    assert ended[-1] == "bob"
    assert len(ended) <= 4  # of ann's: the first, the one that was running, and perhaps the next


def test_one_client_has_half_of_the_places(tmp_path: Path) -> None:
    class Slow(Confined):
        def call(self, request: bytes) -> bytes:
            time.sleep(10)
            return b""

    async def fill() -> tuple[int, bool, bool]:
        lane = Lane(Slow("", BOUNDS), max_waiting=16)
        tasks = []
        while not lane.is_full("ann"):
            tasks.append(asyncio.create_task(lane.call(b"", "ann")))
            await asyncio.sleep(0)
        full = len(tasks), lane.is_full("ann"), lane.is_full("bob")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not lane.is_full("ann")
        return full

    assert run(fill()) == (8, True, False)


def test_what_gives_way_does_so_before_its_first_call() -> None:
    confined = Confined("dovetail.gateway.text.chat_child", dataclasses.replace(BOUNDS, niceness=7))
    confined.start()
    try:
        assert psutil.Process(confined.pid).nice() >= 7
    finally:
        confined.close()


def test_a_child_whose_parent_ends_before_it_reads_an_answer_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", "dovetail.gateway.text.chat_child", str(theirs.fileno()), "5", "1e9", "1e9", "0", "0"],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    request = json.dumps({"template": ["name", "", "", ""], "messages": HELLO}).encode()
    ours.sendall(len(request).to_bytes(8, "little") + request)
    ours.recv(1)  # the rest stays unread: its end is a reset
    ours.close()
    assert child.wait(30) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_child_is_in_our_session_where_its_niceness_counts_and_in_a_group_of_its_own() -> None:
    """Linux divides a core among sessions first (sched_autogroup): in one of its own, a nice child takes half of it."""
    confined = Confined("dovetail.gateway.text.chat_child", BOUNDS)
    confined.start()
    try:
        assert confined.pid is not None
        assert os.getsid(confined.pid) == os.getsid(0)
        assert os.getpgid(confined.pid) == confined.pid  # a Ctrl-C does not reach it
        confined.call(json.dumps({"template": ["name", "", "", ""], "messages": HELLO}).encode())
        status = Path(f"/proc/{confined.pid}/status")
        ignored = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigIgn:")]
        assert int(ignored[0], 16) >> (signal.SIGTTOU - 1) & 1  # nor does a terminal stop it for what it prints
    finally:
        confined.close()


def template_processes() -> dict[int, int]:
    """Bytes in memory by process id."""
    sizes = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # another test's that has just ended
            if "chat_child" in " ".join(child.cmdline()):
                sizes[child.pid] = child.memory_info().rss
    return sizes


def test_memory_that_one_conversation_needed_is_given_back(tmp_path: Path) -> None:
    templates = Templates(dataclasses.replace(BOUNDS, wall_s=120.0))
    text = text_of(tmp_path, "{{ messages[0].content }}")
    others = template_processes()
    assert run(templates.render(text, HELLO))
    before = template_processes().keys() - others.keys()
    assert len(before) == 1
    big = [{"role": "user", "content": "x" * (24 << 20)}]
    assert len(run(templates.render(text, big))) == 24 << 20
    after = template_processes()
    assert all(after.get(process, 0) < 64 << 20 for process in before), "it is small again, or has ended"


GRAMMAR = Grammar("regex", "[ab]{2,4}")


def test_a_grammar_that_had_no_processor_is_tried_again_and_not_refused_for_good(tmp_path: Path) -> None:
    trials = GrammarTrials(dataclasses.replace(TRIAL_BOUNDS, wall_s=3.0))
    card = make_card(tmp_path)

    async def asked_while_stopped_and_then_again() -> str:
        await trials.warm()
        child = trials.pid
        assert child is not None
        os.kill(child, signal.SIGSTOP)  # a machine so busy that the child gets nothing
        with pytest.raises(Overloaded, match="busy machine") as refused:
            await trials.problem(card, GRAMMAR)
        assert refused.value.retry_after_s
        for _ in range(20):  # as a client does that keeps to Retry-After
            try:
                return await trials.problem(card, GRAMMAR)
            except Overloaded:
                continue
        raise AssertionError("it was never tried again")

    assert run(asked_while_stopped_and_then_again()) == ""


def test_a_grammar_over_its_processor_time_is_told_so_and_forgotten_after_a_while(tmp_path: Path) -> None:
    trials = GrammarTrials(dataclasses.replace(TRIAL_BOUNDS, cpu_s=0.1), measured_kept_s=0.0)
    card, endless = make_card(tmp_path), Grammar("json_schema", '{"type": "integer", "multipleOf": 4999999}')

    async def twice() -> list[str]:
        await trials.warm()
        first = await trials.problem(card, endless)
        await asyncio.sleep(0.01)
        assert not trials._known
        return [first, await trials.problem(card, Grammar("regex", "("))]

    too_long, wrong = run(twice())
    assert "0.1 s of processor time" in too_long
    assert "regex" in wrong
    assert len(trials._known) == 1  # what the text itself says stays


COMPUTES = """
import os
import time
from dovetail.confined import serve


def compute(request):
    started, niceness = time.process_time(), [os.getpriority(os.PRIO_PROCESS, 0)]
    while time.process_time() < started + float(request):
        niceness.append(os.getpriority(os.PRIO_PROCESS, 0))
    return b"%d %d" % (niceness[0], niceness[-1])


serve(compute)
"""


@pytest.fixture
def computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose calls say how nice they were when they began, and when they ended."""
    (tmp_path / "computes.py").write_text(COMPUTES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "computes"


def test_a_call_that_computes_is_waited_for_longer_than_one_that_does_not(computes: str) -> None:
    confined = Confined(computes, dataclasses.replace(BOUNDS, cpu_s=1.5, wall_s=1.4))
    try:
        confined.call(b"0")
        assert confined.call(b"1.6")
        assert confined.pid is not None
        os.kill(confined.pid, signal.SIGSTOP)
        with pytest.raises(Exceeded, match="hardly any processor time") as stopped:
            confined.call(b"0")
        assert stopped.value.is_wall
    finally:
        confined.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
def test_a_call_gives_way_when_it_takes_long_and_the_next_one_begins_as_others_equal(computes: str) -> None:
    bounds = dataclasses.replace(BOUNDS, cpu_s=2.0, niceness=7, quick_s=0.1)
    confined, ours = Confined(computes, bounds), os.getpriority(os.PRIO_PROCESS, 0)
    try:
        assert confined.call(b"0.01") == b"%d %d" % (ours, ours)
        assert confined.call(b"0.8") == b"%d %d" % (ours, min(ours + 7, 19))
        assert confined.call(b"0.01") == b"%d %d" % (ours, ours)
    finally:
        confined.close()


READS_LONG = """
import time
from dovetail.confined import serve


def read(request):
    while time.process_time() < 2.5:
        pass


serve(lambda request: b"done", read)
"""


def test_what_a_call_needs_of_the_server_is_not_its_own_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads_long.py").write_text(READS_LONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    confined = Confined("reads_long", dataclasses.replace(BOUNDS, wall_s=60.0))
    assert confined.call(b"x") == b"done"
    confined.close()
