"""The page in a real browser: every action of it, on a real server with tiny models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser import Page, find_browser, running_browser
from page_cost import weights
from server_fixture import Server, run_command, running_server

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: chromium)")

WIDTHS = {1440: 900, 390: 844}
MCP_SERVER = Path(__file__).parents[1] / "pure" / "mcp_server.py"
SCRIPTED = Path(__file__).parents[2] / "tools" / "scripted_server.py"
COST = Path(__file__).parents[2] / "docs" / "measurements" / "abuse.md"
VIEWS = ("chat", "models", "batches", "turns", "api", "connect")


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "dovetail.yaml"
    config.write_text(f"""
batch: {{folder: {config.parent / "batches"}}}
models:
  llama: {{source: {tiny_folder("llama")}, keep_alive: -1, preload: true}}
  qwen3: {{source: {tiny_folder("qwen3")}, keep_alive: -1}}
server: {{default_max_tokens: 8}}
nodes: [{{kv_cache: 4MiB, threads: 1}}]
""")
    with running_server("--config", config) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """As `dovetail open` shows it, where no browser is found and its address is copied to one."""
    assert BROWSER is not None
    address = run_command("open", "--url", server.url).stdout.strip()
    with running_browser(BROWSER, tmp_path_factory.mktemp("profile")) as browser:
        page = browser.page(address, 1440)
        page.wait("document.querySelector('#model')?.options.length === 2")
        page.js("window.confirm = () => true")
        yield page


def view(page: Page, name: str) -> None:
    page.js(f"location.hash = '{name}'")
    page.wait(f"!document.getElementById('{name}').hidden && document.getElementById('{name}').children.length > 0")


def shows(page: Page, selector: str) -> None:
    page.wait(f"!!document.querySelector({json.dumps(selector)})")


def ask(page: Page, text: str, model: str = "llama") -> None:
    page.js(f"document.querySelector('#model').value = '{model}'")
    page.js("document.querySelector('#model').dispatchEvent(new Event('change'))")
    page.js(f"document.querySelector('#prompt').value = {json.dumps(text)}")
    page.js("document.querySelector('#ask').requestSubmit()")


def answered(page: Page, number: int) -> None:
    page.wait(f"document.querySelectorAll('.assistant .note').length === {number}")


def reload(page: Page) -> None:
    page.js("window.isOld = true")
    page.js("location.reload()")
    page.wait("!window.isOld && document.querySelector('#model')?.options.length === 2")
    page.js("window.confirm = () => true")


def new_chat(page: Page) -> None:
    view(page, "chat")
    page.js("document.querySelector('#clear').click()")
    assert page.js("document.querySelectorAll('.said').length") == 0


def press(page: Page, label: str, within: str = "document") -> None:
    buttons = f"[...{within}.querySelectorAll('button')]"
    named = "(button.textContent || button.getAttribute('aria-label'))"
    page.js(f"{buttons}.filter((button) => {named} === {json.dumps(label)}).at(-1).click()")


def chat_of(page: Page) -> Any:
    return json.loads(page.js("localStorage.getItem('dovetail.chat.' + sessionStorage.getItem('chat'))") or "null")


def state_of(model: str) -> str:
    return f"document.querySelector('tr[data-model={model}]')?.dataset.state"


def click(page: Page, model: str, label: str) -> None:
    press(page, label, f"document.querySelector('tr[data-model={model}]')")


def test_open_hands_over_its_token_and_the_address_keeps_nothing_of_it(page: Page) -> None:
    assert page.js("sessionStorage.getItem('key').length") > 20
    assert page.js("location.hash") == "#chat"
    assert page.js("history.length") <= 2


def test_a_question_is_answered_and_the_next_one_goes_on(page: Page) -> None:
    new_chat(page)
    page.js(
        "const plain = fetch; window.fetch = (at, how) => ((window.sent = how?.body ?? window.sent), plain(at, how))"
    )
    for number in (1, 2):
        ask(page, "hello")
        answered(page, number)
    sent = json.loads(page.js("window.sent"))
    assert sent["temperature"] == 0.7, "its authors recommend none"
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert page.js("document.querySelectorAll('.said.user').length") == 2
    assert page.js("document.querySelector('.assistant .text').textContent.length") > 0
    assert page.js("document.querySelector('#problem').textContent") == ""


def test_a_reload_keeps_the_conversation_and_the_list_of_others(page: Page) -> None:
    new_chat(page)
    ask(page, "to be kept")
    answered(page, 1)
    said = page.js("[...document.querySelectorAll('.said .body')].map((node) => node.textContent)")
    reload(page)
    page.wait(
        "document.querySelectorAll('.said').length === 2 && document.querySelector('#model').options.length === 2"
    )
    assert page.js("[...document.querySelectorAll('.said .body')].map((node) => node.textContent)") == said
    new_chat(page)
    press(page, "to be kept")
    assert page.js("document.querySelectorAll('.said').length") == 2
    press(page, "Delete to be kept")
    assert page.js("document.querySelectorAll('.said').length") == 0
    assert "to be kept" not in page.js("document.querySelector('.sidebar').textContent")


def test_settings_are_sent_and_a_wrong_one_is_named(page: Page) -> None:
    new_chat(page)
    page.js("document.querySelector('#settings').click()")
    page.js("document.querySelector('#system').value = 'Be brief.'")
    page.js("document.querySelector('#set-max_tokens').value = 'many'")
    press(page, "Save")
    assert "Longest answer" in page.js("document.querySelector('dialog .error').textContent")
    page.js("document.querySelector('#set-max_tokens').value = '3'")
    page.js("document.querySelector('#set-temperature').value = '0'")
    press(page, "Save")
    page.wait("!document.querySelector('dialog')")
    ask(page, "hello")
    answered(page, 1)
    kept = chat_of(page)
    assert (kept["system"], kept["sampling"]) == ("Be brief.", {"max_tokens": 3, "temperature": 0})
    assert "limit of 3 tokens" in page.js("document.querySelector('.assistant .note').textContent")
    new_chat(page)
    page.js("document.querySelector('#settings').click()")
    assert page.js("document.querySelector('#system').value") == "Be brief.", (
        "the next conversation begins with the same"
    )
    press(page, "Defaults")
    press(page, "Save")
    page.wait("!document.querySelector('dialog')")


@contextmanager
def still(server: Server) -> Iterator[None]:
    """While the worker computes nothing: an answer cannot be over before it is looked at."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    workers = [one for one in children if "dovetail.worker" in " ".join(one.cmdline())]
    assert workers
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


def test_an_answer_that_is_waited_for_shows_it_and_can_be_stopped(page: Page, server: Server) -> None:
    new_chat(page)
    with still(server):
        ask(page, "hello")
        shows(page, ".assistant .wait .dots")
        page.wait("/, \\d+ s$/.test(document.querySelector('.wait').textContent)", timeout_s=15)
        assert page.js("document.querySelector('#send').title") == "Stop"
        assert page.js("document.querySelector('.assistant').getAttribute('aria-busy')") == "true"
        page.js("document.querySelector('#ask').requestSubmit()")
        answered(page, 1)
    assert page.js("document.querySelector('.assistant .note').textContent").startswith("llama · stopped")
    assert page.js("document.querySelector('#send').title") == "Send"
    assert page.js("document.querySelector('.wait')") is None
    press(page, "Retry")
    page.wait("document.querySelector('.assistant .note')?.textContent.includes('limit of 8 tokens')")
    assert page.js("document.querySelectorAll('.said').length") == 2


def test_a_question_is_changed_and_asked_again(page: Page) -> None:
    new_chat(page)
    for number in (1, 2):
        ask(page, f"question {number}")
        answered(page, number)
    press(page, "Edit", "document.querySelector('.said.user')")
    page.js("document.querySelector('.editing textarea').value = 'another question'")
    press(page, "Send", "document.querySelector('.editing')")
    page.wait("document.querySelector('.said.user .body').textContent === 'another question'")
    answered(page, 1)
    assert [message["role"] for message in chat_of(page)["messages"]] == ["user", "assistant"]
    assert chat_of(page)["messages"][0]["content"] == "another question"
    press(page, "Edit", "document.querySelector('.said.user')")
    press(page, "Cancel", "document.querySelector('.editing')")
    assert page.js("document.querySelector('.said.user .body').textContent") == "another question"


def test_an_error_is_told_beside_its_answer_on_a_phone_too(page: Page) -> None:
    new_chat(page)
    page.size(390, 844)
    ask(page, "word " * 4000)
    shows(page, ".assistant .error")
    told = "document.querySelector('.assistant .error')"
    assert "context" in page.js(f"{told}.textContent")
    box = page.js(f"(({{ top, bottom, right }}) => [top, bottom, right])({told}.getBoundingClientRect())")
    assert box[0] >= 0
    assert box[1] <= 844
    assert box[2] <= 390
    assert page.js("document.querySelector('.assistant .error button').textContent") == "Retry"
    reload(page)
    shows(page, ".assistant .error")
    page.size(1440, 900)


HOLD = """{
  window.held = null;
  window.plainFetch ??= fetch;
  const holds = ({ signal }) => new Response(new ReadableStream({ start: (stream) => {
    window.held = stream;
    signal.addEventListener('abort', () => stream.error(new DOMException('', 'AbortError')));
  } }));
  window.fetch = async (at, how) => at === '/v1/chat/completions' ? holds(how) : plainFetch(at, how);
}"""


def push(page: Page, line: str) -> None:
    page.js(f"held.enqueue(new TextEncoder().encode({json.dumps(line + chr(10) * 2)}))")
    page.js("new Promise((done) => setTimeout(done, 200))")


def test_a_load_is_shown_with_its_progress(page: Page) -> None:
    """The server's own comments, in a stream that is held: a load of a tiny model is over before it could be seen."""
    new_chat(page)
    page.js(HOLD)
    ask(page, "hello")
    page.wait("!!(window.held && document.querySelector('.wait .dots'))")
    seen = []
    for standing in [
        {"state": "starting"},
        {"state": "queued", "position": 3},
        {"state": "loading", "done_bytes": 41_943_040, "total_bytes": 96_712_344},
        {"state": "computing"},
    ]:
        push(page, f": dovetail {json.dumps(standing)}")
        seen.append(page.js("document.querySelector('.wait').textContent").partition(",")[0])
        shown = page.js("(({ hidden, max, value }) => [hidden, max, value])(document.querySelector('.wait progress'))")
        assert shown[0] == ("done_bytes" not in standing)
        assert shown[0] or shown[1:] == [96_712_344, 41_943_040]
    assert seen == [
        "Starting a worker", "Waiting for a place: number 3", "Loading the model: 42 MB of 97 MB", "Reading the prompt",
    ]  # fmt: skip
    for text in ("**Half", "** an", " answer"):
        push(page, "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}))
    assert page.js("document.querySelector('.wait')") is None
    assert page.js("document.querySelector('.assistant strong').textContent") == "Half"
    assert page.js("document.getAnimations().length") == 0, "nothing moves when nothing happens"
    page.js("document.querySelector('#ask').requestSubmit()")
    answered(page, 1)
    page.js("window.fetch = plainFetch")
    assert page.js("document.querySelector('.assistant .note').textContent").startswith("llama · stopped")
    assert chat_of(page)["messages"][1]["content"] == "**Half** an answer", "what had come is kept"


def test_an_error_within_a_stream_keeps_what_had_come(page: Page) -> None:
    new_chat(page)
    page.js(HOLD)
    ask(page, "hello")
    page.wait("!!window.held")
    push(page, "data: " + json.dumps({"choices": [{"delta": {"reasoning_content": "Well, *well*"}}]}))
    assert page.js("!!document.querySelector('.wait')"), "thoughts are no answer yet"
    push(page, "data: " + json.dumps({"choices": [{"delta": {"content": "so far"}}]}))
    push(page, "data: " + json.dumps({"error": {"message": "the worker was lost", "code": "worker_lost"}}))
    shows(page, ".assistant .error")
    page.js("window.fetch = plainFetch")
    assert page.js("document.querySelector('.assistant > .body > .text').textContent") == "so far"
    assert page.js("document.querySelector('.assistant .thought em').textContent") == "well"
    assert "the worker was lost" in page.js("document.querySelector('.assistant .error').textContent")


HOSTILE = """# <img src=x onerror="window.pwned = 1">
<script>window.pwned = 1</script> <iframe src="//evil.example"></iframe> <svg/onload=window.pwned=1>
![x](https://evil.example/pixel.png) [a](javascript:window.pwned=1) [b](data:text/html,<script>1</script>)
[c](https://example.org/"onmouseover="window.pwned=1) <https://example.org/x>

| <b onclick=window.pwned=1>x</b> | y |
|---|---|
| `<style>*{display:none}</style>` | **bold** |

```html
<script>window.pwned = 1</script>
```
- [x] <input autofocus onfocus=window.pwned=1>
"""


def test_what_a_model_writes_is_never_more_than_text(page: Page) -> None:
    chat = {"id": "hostile", "title": "t", "updated": 1, "model": "llama", "system": "", "sampling": {}}
    chat["messages"] = [
        {"role": "user", "content": HOSTILE},
        {"role": "assistant", "content": HOSTILE, "thought": HOSTILE},
    ]
    page.js(f"localStorage.setItem('dovetail.chat.hostile', {json.dumps(json.dumps(chat))})")
    page.js("sessionStorage.setItem('chat', 'hostile')")
    reload(page)
    page.wait("document.querySelectorAll('.said').length === 2")
    assert page.js("document.querySelector('.said.user .body').textContent") == HOSTILE
    tags = set(page.js("[...document.querySelectorAll('.said .body *')].map((node) => node.tagName.toLowerCase())"))
    plain = {"div", "p", "h2", "br", "a", "code", "pre", "strong", "ul", "li", "input", "span", "button", "details"}
    assert tags <= plain | {"summary", "table", "thead", "tbody", "tr", "th", "td"}
    links = page.js(
        "[...document.querySelectorAll('.said .body a')].map((node) => [node.protocol, node.target, node.rel])"
    )
    assert {link[0] for link in links} == {"https:"}
    assert all(link[1] == "_blank" and "noopener" in link[2] for link in links)
    names = page.js("[...document.querySelectorAll('.said .body *')].flatMap((node) => node.getAttributeNames())")
    assert not any(name.startswith("on") for name in names)
    assert page.js("window.pwned") is None
    assert page.js("document.querySelector('.codeblock code').textContent") == "<script>window.pwned = 1</script>"
    page.js("localStorage.removeItem('dovetail.chat.hostile')")


def test_code_is_copied_as_it_was_written(page: Page) -> None:
    text = "Here:\n\n```python\ndef f(x):\n    return x < 1  # & more\n```\n"
    chat = {"id": "code", "title": "t", "updated": 1, "messages": [{"role": "assistant", "content": text}]}
    page.js(f"localStorage.setItem('dovetail.chat.code', {json.dumps(json.dumps(chat))})")
    page.js("sessionStorage.setItem('chat', 'code')")
    reload(page)
    shows(page, ".codeblock .hl-keyword")
    page.js(
        "const takes = { writeText: async (text) => (window.copied = text) };"
        "Object.defineProperty(navigator, 'clipboard', { value: takes })"
    )
    page.js("document.querySelector('.codeblock .copy').click()")
    page.wait("window.copied")
    assert page.js("window.copied") == "def f(x):\n    return x < 1  # & more"
    press(page, "Copy", "document.querySelector('.foot')")
    page.wait(f"window.copied === {json.dumps(text)}")
    page.js("localStorage.removeItem('dovetail.chat.code')")


def test_models_are_unloaded_loaded_added_and_removed(page: Page, tiny_folder: Callable[[str], Path]) -> None:
    reload(page)
    view(page, "models")
    page.wait(f"['ready', 'idle'].includes({state_of('llama')})")
    click(page, "llama", "Unload")
    page.wait(f"['absent', 'host'].includes({state_of('llama')})")
    click(page, "llama", "Load")
    page.wait(f"['ready', 'idle'].includes({state_of('llama')})")
    page.js("document.querySelector('#add-name').value = 'third'")
    page.js(f"document.querySelector('#add-source').value = {str(tiny_folder('opt'))!r}")
    page.js("document.querySelector('#add').requestSubmit()")
    page.wait(state_of("third"))
    page.wait("document.querySelector('#add-source').value === ''")
    view(page, "chat")
    page.wait("document.querySelector('#model').options.length === 3")
    assert "third · on disk" in page.js("document.querySelector('#model').textContent")
    view(page, "models")
    click(page, "third", "Remove")
    page.wait(f"!{state_of('third')}")


def test_a_failed_add_is_told_beside_the_form_which_keeps_its_text(page: Page) -> None:
    view(page, "models")
    page.js("document.querySelector('#add-name').value = 'fourth'")
    page.js("document.querySelector('#add-source').value = './nowhere'")
    page.js("document.querySelector('#add').requestSubmit()")
    page.wait("document.querySelector('#add-problem').textContent.includes('nowhere')")
    assert page.js("document.querySelector('#add-source').value") == "./nowhere"
    assert page.js("document.querySelector('#add-name').value") == "fourth"


def test_a_pull_is_shown_with_its_progress_by_one_request_each_time(page: Page, server: Server) -> None:
    model = server.get("/api/models").json()["data"][0]
    pull = {"name": "far", "source": "hf:org/far", "state": "running", "stage": "download", "started": 1}
    pull |= {"done_bytes": 50, "total_bytes": 100, "error": None}
    coming = {"data": [model, model | {"name": "far", "state": "absent", "tier": "remote", "pull": pull}]}
    view(page, "chat")
    reload(page)
    page.js("window.plainFetch = fetch; window.paths = []")
    page.js(
        "window.fetch = async (at, how) => (paths.push(at), at === '/api/models') "
        f"? new Response({json.dumps(json.dumps(coming))}) : plainFetch(at, how)"
    )
    view(page, "models")
    page.wait("document.querySelector('#pulls')?.textContent === 'far from hf:org/far: download 50 %'")
    bar = page.js("(({ max, value }) => [max, value])(document.querySelector('#pulls progress'))")
    assert bar == [100, 50]
    page.wait("paths.length >= 2", timeout_s=15)
    assert page.js("[...new Set(paths)]") == ["/api/models"], "each more costs an idle page as much again"
    page.js("window.fetch = plainFetch")
    view(page, "chat")


def test_without_the_token_the_page_says_how_to_get_it(page: Page, server: Server) -> None:
    view(page, "models")
    page.wait(state_of("llama"))
    key = page.js("sessionStorage.getItem('key')")
    page.js("sessionStorage.removeItem('key')")
    click(page, "llama", "Unload")
    page.wait("document.querySelector('tr[data-model=llama] .error')?.textContent.includes('dovetail open')")
    assert server.url in page.js("document.querySelector('tr[data-model=llama] .error').textContent")
    page.js(f"sessionStorage.setItem('key', '{key}')")


def batch_lines(count: int, max_tokens: int) -> str:
    body = {"model": "llama", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
    lines = ({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body} for at in range(count))
    return "".join(json.dumps(line) + "\n" for line in lines)


def submit_batch(page: Page, text: str) -> str:
    """By the form; returns its id."""
    before = page.js("document.querySelectorAll('#batch-table tr').length")
    page.js(
        "(() => { const chosen = new DataTransfer(); "
        f"chosen.items.add(new File([{json.dumps(text)}], 'lines.jsonl')); "
        "document.querySelector('#batch-file').files = chosen.files; "
        "document.querySelector('#submit-batch').requestSubmit(); })()"
    )
    page.wait(f"document.querySelectorAll('#batch-table tr').length === {before + 1}")
    found: str = page.js("document.querySelector('#batch-table tr').dataset.batch")
    return found


def status_of(batch: str) -> str:
    return f"document.querySelector('tr[data-batch={batch}]')?.dataset.status"


def test_a_batch_is_sent_watched_cancelled_and_fetched(page: Page) -> None:
    view(page, "batches")
    assert page.js("document.querySelector('nav a.here').textContent") == "Batches"
    page.js("document.querySelector('#batches .hint').textContent")
    batch = submit_batch(page, batch_lines(3000, 60))
    row = f"document.querySelector('tr[data-batch={batch}]')"
    page.wait(f"{row}.querySelector('progress')?.value > 0")
    assert "of 3000" in page.js(f"{row}.textContent")
    press(page, "Cancel", row)
    page.wait(f"{status_of(batch)} === 'cancelled'")
    assert page.js(f"[...{row}.querySelectorAll('button')].map((one) => one.textContent)") == ["Answers", "Errors"]
    small = submit_batch(page, batch_lines(3, 2))
    page.wait(f"{status_of(small)} === 'completed'")
    page.js("URL.createObjectURL = (blob) => { window.fetched = blob.text(); return 'blob:x'; }")
    press(page, "Answers", f"document.querySelector('tr[data-batch={small}]')")
    page.wait("!!window.fetched")
    answers = page.js("window.fetched").splitlines()
    assert {json.loads(line)["custom_id"] for line in answers} == {"0", "1", "2"}


def test_what_is_wrong_with_a_file_is_told_beside_its_batch(page: Page) -> None:
    view(page, "batches")
    batch = submit_batch(page, batch_lines(1, 2) + "{}\n")
    page.wait(f"{status_of(batch)} === 'failed'")
    assert "Line 2: the line needs custom_id" in page.js(
        f"document.querySelector('tr[data-batch={batch}]').textContent"
    )


def test_best_effort_is_striped_in_the_picture_and_the_legend_says_so(page: Page) -> None:
    cell = {"turns": 1, "held_s": {"m": 0.06}}
    waited_for, best_effort = (
        cell | {"cell": 990, "best_effort_s": {}},
        cell | {"cell": 991, "best_effort_s": {"m": 0.06}},
    )
    news = {
        "now_s": 60.0, "window_s": 60, "cell_s": 0.06,
        "nodes": [{"node": "n", "cells": [waited_for, best_effort], "memory": []}],
    }  # fmt: skip
    drawn = page.js(
        "(async () => { const { drawTurns, forgetTurns } = await import('/ui/turns.js'); forgetTurns(); "
        "const devices = document.createElement('div'), legend = document.createElement('div'); "
        f"drawTurns(devices, legend, {json.dumps(news)}); "
        "const canvas = devices.querySelector('canvas'); "
        "const column = (left) => [...canvas.getContext('2d').getImageData(left, 0, 1, 60 * devicePixelRatio).data]"
        ".filter((_, at) => at % 4 === 3).map(Number); "
        "const found = { legend: legend.textContent, plain: column(989), striped: column(990) }; "
        "forgetTurns(); return found; })()"
    )
    assert "best effort" in drawn["legend"]
    assert not 0 < sum(value > 0 for value in drawn["plain"]) < 50
    changes = sum((early > 0) != (late > 0) for early, late in pairwise(drawn["striped"]))
    assert changes >= 10, "no stripes"
    assert sum((early > 0) != (late > 0) for early, late in pairwise(drawn["plain"])) <= 2


def test_the_picture_shows_who_held_the_device(page: Page, server: Server) -> None:
    server.post("/v1/completions", {"model": "qwen3", "prompt": "a", "max_tokens": 40, "ignore_eos": True})
    view(page, "turns")
    page.wait("document.querySelector('#legend').textContent.includes('qwen3')")
    # Workers tell of their turns about once a second, and of the last ones when they fall idle.
    page.wait("parseInt(document.querySelector('.device canvas').getAttribute('aria-label').split(' ')[1]) >= 40")
    drawn = "[...document.querySelector('.device canvas').getContext('2d').getImageData(0, 0, 9999, 60).data]"
    assert page.js(f"{drawn}.some((value) => value > 0)")


def box(page: Page, selector: str) -> dict[str, float]:
    found: dict[str, float] = page.js(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
    return found


def test_nothing_is_drawn_over_the_times_below_the_picture(page: Page, server: Server) -> None:
    """The memory of a small model beside a large one is a line at the very bottom."""
    server.post("/v1/completions", {"model": "llama", "prompt": "a", "max_tokens": 4, "ignore_eos": True})
    view(page, "turns")
    shows(page, ".device canvas[aria-label]")
    for label in (".begin", ".end"):
        assert box(page, f".picture {label}")["top"] >= box(page, ".picture canvas")["bottom"]
        assert box(page, f".picture {label}")["bottom"] <= box(page, ".picture")["bottom"]


def test_a_request_is_seen_whole_on_a_phone_too(page: Page) -> None:
    entries(page, "api")
    for width, height in WIDTHS.items():
        page.size(width, height)
        press(page, "Chat", "document.querySelector('#api .index')")
        assert page.js("(({ scrollHeight, clientHeight }) => scrollHeight - clientHeight)"
                       "(document.querySelector('#api textarea.body'))") <= 0, width  # fmt: skip
    page.size(1440, 900)


def entries(page: Page, name: str) -> list[str]:
    view(page, name)
    page.wait(f"document.querySelectorAll('#{name} .index button').length > 3")
    found: list[str] = page.js(
        f"[...document.querySelectorAll('#{name} .index button')].map((node) => node.textContent)"
    )
    return found


def test_every_example_of_the_api_runs(page: Page, server: Server) -> None:
    shown = entries(page, "api")
    has_messages = "/v1/messages" in server.get("/openapi.json").json()["paths"]
    assert ("Messages" in shown) == has_messages
    assert {"Chat", "Responses", "Completions", "Embeddings"} <= set(shown)
    for name in shown:
        press(page, name, "document.querySelector('#api .index')")
        field = "document.querySelector('#api textarea.body')"
        page.js(f'{field} && ({field}.value = {field}.value.replace(/"model": "\\w+"/, \'"model": "llama"\'))')
        page.js("document.querySelector('#run').click()")
        page.wait("/^\\d+ after/.test(document.querySelector('#api .run .hint').textContent)")
        assert page.js("document.querySelector('#api .run .hint').textContent").startswith("200 "), name
    press(page, "Chat", "document.querySelector('#api .index')")
    page.js("document.querySelector('#api textarea.body').value = '{}'")
    page.js("document.querySelector('#run').click()")
    page.wait("document.querySelector('#api .run .hint').textContent.startsWith('400')")
    assert "messages" in page.js("document.querySelector('#api .answer').textContent")


def test_the_programs_that_the_page_shows_run_as_they_are(page: Page, server: Server) -> None:
    entries(page, "api")
    for name in ("Chat", "Chat, streamed", "Responses", "Embeddings", "Tokenize", "Models"):
        press(page, name, "document.querySelector('#api .index')")
        program = page.js("document.querySelector('#api .page > div:last-child code').textContent")
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert '"object":' in done.stdout or '"tokens":' in done.stdout, done.stdout
    press(page, "Chat", "document.querySelector('#api .index')")
    press(page, "Python", "document.querySelector('#api .page')")
    exec(page.js("document.querySelector('#api .page > div:last-child code').textContent"), {})


def test_settings_of_other_clients_name_this_server_and_the_chosen_model(page: Page, server: Server) -> None:
    shown = entries(page, "connect")
    assert {"Codex", "opencode", "aider", "Open WebUI", "LiteLLM", "LangChain", "lm-eval"} <= set(shown)
    assert ("Claude Code" in shown) == ("/v1/messages" in server.get("/openapi.json").json()["paths"])
    page.js("document.querySelector('#connect select').value = 'qwen3'")
    page.js("document.querySelector('#connect select').dispatchEvent(new Event('change'))")
    for name in shown:
        press(page, name, "document.querySelector('#connect .index')")
        text = page.js("[...document.querySelectorAll('#connect code')].map((node) => node.textContent).join('\\n')")
        assert server.url in text, name
        assert "qwen3" in text or name == "Open WebUI", name
        assert page.js("sessionStorage.getItem('key')") not in text, "a key is nothing to copy around"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_and_its_input_stays_at_the_bottom(page: Page, width: int, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.size(width, WIDTHS[width])
    for name in VIEWS:
        view(page, name)
        assert page.js("document.documentElement.scrollWidth") <= width, name
        assert page.js("document.documentElement.scrollHeight") <= WIDTHS[width], name
        assert contrast(page, f"#{name}") >= 4.5, name
    new_chat(page)
    for _ in range(2):
        box = page.js("(({ top, bottom }) => [top, bottom])(document.querySelector('#ask').getBoundingClientRect())")
        assert box[1] == WIDTHS[width]
        assert box[0] > WIDTHS[width] - 120
        ask(page, "line\n" * 60)
        answered(page, 1)
    page.call("Emulation.setEmulatedMedia", features=[])
    page.size(1440, 900)


def contrast(page: Page, selector: str) -> float:
    """Of its text and the page's ground, by the formula of WCAG."""
    ink = f"getComputedStyle(document.querySelector('{selector}')).color"
    colours = page.js(f"[{ink}, getComputedStyle(document.body).backgroundColor]")
    shares = [[int(part) / 255 for part in colour[4:-1].split(",")] for colour in colours]
    bright = sorted(
        sum(weight * (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), share, strict=True))
        for share in shares
    )  # fmt: skip
    return (bright[1] + 0.05) / (bright[0] + 0.05)


def test_nothing_comes_from_elsewhere_and_an_idle_chat_asks_nothing(page: Page, server: Server) -> None:
    for name in VIEWS:
        view(page, name)
    view(page, "chat")
    hosts = page.js("[...new Set(performance.getEntriesByType('resource').map(({ name }) => new URL(name).origin))]")
    assert hosts == [server.url]
    page.js("new Promise((done) => setTimeout(done, 2000))")  # what the views before it have asked for comes in
    page.js("performance.clearResourceTimings()")
    page.js("new Promise((done) => setTimeout(done, 7000))")  # longer than the models' slowest clock
    assert page.js("performance.getEntriesByType('resource').length") == 0
    assert page.js("document.getAnimations().length") == 0


def test_a_first_visit_weighs_what_the_docs_say(server: Server, tmp_path: Path) -> None:
    """`docs/measurements/abuse.md`; to be changed there when the page has become heavier or lighter."""
    said = re.search(
        r"A first visit to the chat takes (\d+) files, (\d+) kB, of which (\d+) kB are sent", COST.read_text()
    )
    assert said is not None
    assert BROWSER is not None
    with running_browser(BROWSER, tmp_path / "profile") as browser:
        page = browser.page(server.url + "/")
        page.wait("document.querySelector('#model')?.options.length === 2")
        found = weights(page)
    assert found["files"] == int(said[1])
    assert found["decodedBodySize"] / 1000 == pytest.approx(int(said[2]), rel=0.03)
    assert found["transferSize"] / 1000 == pytest.approx(int(said[3]), rel=0.03)


def test_the_api_is_documented_from_its_own_document(page: Page, server: Server) -> None:
    page.goto(server.url + "/docs")
    page.wait("document.querySelectorAll('details').length > 15")
    assert "POST /v1/chat/completions" in page.js("document.body.innerText")


def test_an_answer_that_a_reload_cuts_off_is_kept_as_far_as_it_came(page: Page, server: Server) -> None:
    page.goto(server.url + "/")
    page.wait("document.querySelector('#model')?.options.length === 2")
    new_chat(page)
    page.js(HOLD)
    ask(page, "hello")
    page.wait("!!window.held")
    push(page, "data: " + json.dumps({"choices": [{"delta": {"content": "as far as"}}]}))
    reload(page)
    page.wait("document.querySelectorAll('.said').length === 2")
    assert page.js("document.querySelector('.assistant .text').textContent") == "as far as"
    assert "interrupted" in page.js("document.querySelector('.assistant .note').textContent")


def test_a_server_with_keys_is_asked_with_the_visitors_own(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "dovetail.yaml"
    config.write_text(f"""
models: {{llama: {{source: {tiny_folder("llama")}}}}}
auth: {{keys: [{{name: operator, key: sk-operator, admin: true}}]}}
nodes: [{{kv_cache: 4MiB, threads: 1}}]
""")
    assert BROWSER is not None
    with running_server("--config", config) as keyed, running_browser(BROWSER, tmp_path / "profile") as browser:
        page = browser.page(keyed.url + "/")
        page.wait("document.querySelector('#problem')?.textContent.includes('asks for a key')")
        page.js("document.querySelector('#key').value = 'sk-operator'")
        page.js("document.querySelector('#key').dispatchEvent(new Event('change'))")
        page.wait("document.querySelector('#model')?.options.length === 1 && document.querySelector('#problem').hidden")
        entries(page, "connect")
        assert "YOUR_KEY" in page.js("document.querySelector('#connect code').textContent")
        assert "sk-operator" not in page.js("document.querySelector('#connect').textContent")
        monkeypatch.setenv("DOVETAIL_API_KEY", "sk-operator")
        address = run_command("open", "models", "--url", keyed.url).stdout.strip()
        assert "sk-operator" not in address
        other = browser.page(address)
        other.wait("document.querySelectorAll('#table tr').length === 1")
        assert other.js("sessionStorage.getItem('key')") == "sk-operator"
        again = browser.page(address)
        again.wait("document.querySelector('#problem')?.textContent.includes('asks for a key')")


def test_a_view_that_is_left_and_returned_to_while_it_comes_is_there_once(page: Page) -> None:
    reload(page)
    page.js(
        "for (const name of ['api', 'chat', 'api']) { location.hash = name; dispatchEvent(new Event('hashchange')) }"
    )
    page.wait("document.querySelectorAll('#api .index button').length > 3")
    page.js("new Promise((done) => setTimeout(done, 300))")
    assert page.js("document.querySelectorAll('#api .index').length") == 1


def test_tools_of_an_mcp_server_are_chosen_called_and_shown(tmp_path: Path) -> None:
    """On a server whose model follows a script, because one of 135M parameters calls nothing by itself."""
    pytest.importorskip("mcp", reason="the package mcp is not installed (extra: mcp)")
    assert BROWSER is not None
    notes = {"command": [sys.executable, str(MCP_SERVER)], "tools": ["keep"]}
    (tmp_path / "dovetail.yaml").write_text(json.dumps({"mcp": {"servers": {"notes": notes}}}))
    command = [sys.executable, str(SCRIPTED), str(tmp_path), "--config", str(tmp_path / "dovetail.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with running_browser(BROWSER, tmp_path / "profile") as browser:
            page = browser.page(url, 390)
            page.wait("document.querySelector('#model')?.options.length === 1")
            page.wait("performance.getEntriesByType('resource').some(({name}) => name.endsWith('/v1/mcp/servers'))")
            press(page, "Settings")
            shows(page, ".tools-of input")
            page.js("document.querySelector('.tools-of input').click()")
            press(page, "Save")
            ask(page, 'Call notes.keep with {"text": "milk"}.', "scripted")
            answered(page, 1)
            assert page.js("document.querySelector('.call summary').textContent") == "notes: keep was called"
            assert "the last: milk" in page.js("document.querySelector('.call').textContent")
            assert "It said: 1 kept" in page.js("document.querySelector('.assistant .text').textContent")
            assert chat_of(page)["messages"][1]["calls"][0]["output"] == "1 kept, the last: milk"
            assert page.js("document.documentElement.scrollWidth") <= 390
    finally:
        process.terminate()
        process.wait(60)
