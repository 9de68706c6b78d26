"""Pictures of the page for the docs, of a server on which two small models answer.

    python tests/cpu/page_pictures.py [FOLDER] [--all]

At 1440 and 390 pixels; with --all also in the dark, and of every view.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from itertools import product
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from browser import Page, find_browser, running_browser  # noqa: E402
from server_fixture import COMMAND, Server, running_server  # noqa: E402
from tiny import save_tiny  # noqa: E402

MODEL = "smollm2-135m-instruct"
SIZES = {1440: 900, 390: 844}
QUESTION = "Write a short Python function that adds two numbers, in a code block, and explain it in a list."
READY = {
    "chat": "document.querySelectorAll('.said').length === 2",
    "models": "document.querySelectorAll('#table tr').length === 2",
    "batches": "document.querySelectorAll('#batch-table tr').length === 2",
    "turns": "!!document.querySelector('.device canvas')?.hasAttribute('aria-label')",
    "api": "document.querySelectorAll('#api .index button').length > 3",
    "connect": "document.querySelectorAll('#connect .index button').length > 3",
}
FOR_DOCS = {
    ("chat", "light"),
    ("models", "light"),
    ("batches", "light"),
    ("turns", "light"),
    ("chat", "dark"),
    ("connect", "light"),
}


def main(folder: Path, *, is_all: bool) -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium here (Debian: chromium)")
    with tempfile.TemporaryDirectory(prefix="page-pictures-") as scratch:
        save_tiny("qwen3", Path(scratch) / "tiny-qwen3")
        with (
            running_server("--config", config_in(Path(scratch))) as server,
            running_browser(browser, Path(scratch) / "profile") as running,
        ):
            command = [*COMMAND, "open", "--url", server.url]
            address = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            page = running.page(address, 1440)
            page.wait("document.querySelector('#model')?.options.length === 2")
            busy = [threading.Thread(target=work, args=(server, name)) for name in (MODEL, "tiny-qwen3")]
            ask(page)
            submit(server, 4)
            submit(server, 3000)
            for thread in busy:
                thread.start()
            for thread in busy:
                thread.join()
            for scheme, (width, height), view in product(("light", "dark"), SIZES.items(), READY):
                if is_all or (view, scheme) in FOR_DOCS:
                    page.call(
                        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                    )
                    page.size(width, height)
                    show(page, view)
                    suffix = "-dark" if scheme == "dark" else ""
                    page.screenshot(folder / f"console-{view}-{width}{suffix}.png")


def config_in(folder: Path) -> Path:
    file = folder / "dovetail.yaml"
    models = {MODEL: {"source": MODEL}, "tiny-qwen3": {"source": str(folder / "tiny-qwen3")}}
    file.write_text(json.dumps({"models": models, "batch": {"folder": str(folder / "batches")}}))
    return file


def ask(page: Page) -> None:
    page.js(f"document.querySelector('#model').value = '{MODEL}'")
    page.js(f"document.querySelector('#prompt').value = {QUESTION!r}")
    page.js("document.querySelector('#ask').requestSubmit()")
    page.wait("!!document.querySelector('.assistant .note')", timeout_s=300)


def show(page: Page, view: str) -> None:
    page.js(f"location.hash = '{view}'")
    page.wait(f"!document.getElementById('{view}').hidden && {READY[view]}")
    page.js("new Promise((done) => setTimeout(done, 1500))")
    page.js("document.querySelector('.scroller') && (document.querySelector('.scroller').scrollTop = 0)")


def submit(server: Server, count: int) -> None:
    """A batch, which shows in its view and between the requests of others."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Name a city."}], "max_tokens": 32}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    text = "".join(json.dumps(line | {"custom_id": str(number)}) + "\n" for number in range(count))
    client = server.client()
    file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def work(server: Server, model: str) -> None:
    """Some seconds of requests, one after the other."""
    for number in range(4):
        body = {"model": model, "prompt": f"Number {number} is", "max_tokens": 120, "ignore_eos": True}
        server.post("/v1/completions", body)


if __name__ == "__main__":
    named = [Path(argument) for argument in sys.argv[1:] if argument != "--all"]
    main(named[0] if named else Path(__file__).parents[2] / "docs", is_all="--all" in sys.argv)
