"""The page in a real browser: every action of it, on a real server with tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Page, find_browser, running_browser
from server_fixture import Server, running_server

from dovetail.cli.ps import key_header

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: chromium)")


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "dovetail.yaml"
    config.write_text(f"""
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
    assert BROWSER is not None
    with running_browser(BROWSER, tmp_path_factory.mktemp("profile")) as browser:
        page = browser.page(server.url + "/")
        page.wait("document.querySelector('#model')?.options.length === 2")
        page.js("window.confirm = () => true")
        token = key_header(server.url)["authorization"].removeprefix("Bearer ")  # of a server without keys
        page.js(f"document.querySelector('#key').value = {token!r}")
        page.js("document.querySelector('#key').dispatchEvent(new Event('change'))")
        yield page


def view(page: Page, name: str) -> None:
    page.js(f"location.hash = '{name}'")
    page.wait(f"!document.getElementById('{name}').hidden")


def state_of(model: str) -> str:
    return f"document.querySelector('tr[data-model={model}]')?.cells[1].textContent"


def click(page: Page, model: str, label: str) -> None:
    buttons = f"[...document.querySelectorAll('tr[data-model={model}] button')]"
    page.js(f"{buttons}.find((button) => button.textContent === '{label}').click()")


def test_a_question_is_answered_and_the_next_one_goes_on(page: Page) -> None:
    view(page, "chat")
    page.js("const plain = fetch; window.fetch = (at, how) => ((window.sent = how?.body), plain(at, how))")
    for number in (1, 2):
        page.js("document.querySelector('#model').value = 'llama'")
        page.js("document.querySelector('#prompt').value = 'hello'")
        page.js("document.querySelector('#ask').requestSubmit()")
        page.wait(f"document.querySelectorAll('.assistant .note').length === {number}")
    assert page.js("JSON.parse(window.sent).temperature") == 0.7, "its authors recommend none"
    assert page.js("document.querySelectorAll('.said.user').length") == 2
    assert page.js("document.querySelector('.assistant .text').textContent.length") > 0
    assert page.js("document.querySelector('#problem').textContent") == ""
    page.js("document.querySelector('#clear').click()")
    assert page.js("document.querySelectorAll('.said').length") == 0


def test_models_are_unloaded_loaded_added_and_removed(page: Page, tiny_folder: Callable[[str], Path]) -> None:
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
    page.wait("document.querySelector('#model').options.length === 3")
    click(page, "third", "Remove")
    page.wait(f"!{state_of('third')}")


def test_a_failure_is_told_on_the_page(page: Page) -> None:
    view(page, "models")
    page.js("document.querySelector('#add-name').value = 'fourth'")
    page.js("document.querySelector('#add-source').value = './nowhere'")
    page.js("document.querySelector('#add').requestSubmit()")
    told = "document.querySelector('#problem').textContent + document.querySelector('#pulls').textContent"
    page.wait(f"({told}).includes('nowhere')")


def test_the_picture_shows_who_held_the_device(page: Page, server: Server) -> None:
    server.post("/v1/completions", {"model": "qwen3", "prompt": "a", "max_tokens": 40, "ignore_eos": True})
    view(page, "turns")
    page.wait("document.querySelector('#legend').textContent.includes('qwen3')")
    # Workers tell of their turns about once a second, and of the last ones when they fall idle.
    page.wait("parseInt(document.querySelector('.device canvas').getAttribute('aria-label').split(' ')[1]) >= 40")
    drawn = "[...document.querySelector('.device canvas').getContext('2d').getImageData(0, 0, 9999, 60).data]"
    assert page.js(f"{drawn}.some((value) => value > 0)")


def test_the_page_fits_a_phone_and_nothing_comes_from_elsewhere(page: Page, server: Server) -> None:
    page.size(400, 800)
    for name in ("chat", "models", "turns"):
        view(page, name)
        assert page.js("document.documentElement.scrollWidth") <= 400
    hosts = page.js("[...new Set(performance.getEntriesByType('resource').map(({ name }) => new URL(name).origin))]")
    assert hosts == [server.url]
    page.size(1400, 900)


def test_the_api_is_documented_from_its_own_document(page: Page, server: Server) -> None:
    page.goto(server.url + "/docs")
    page.wait("document.querySelectorAll('details').length > 15")
    assert "POST /v1/chat/completions" in page.js("document.body.innerText")
