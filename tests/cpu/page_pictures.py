"""Pictures of the page's views for the docs, at 1400 and 400 pixels, of a server on which two small models answer.

python tests/cpu/page_pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from browser import find_browser, running_browser  # noqa: E402
from server_fixture import Server, running_server  # noqa: E402
from tiny import save_tiny  # noqa: E402

MODEL = "smollm2-135m-instruct"
SIZES = {1400: 900, 400: 800}
ANSWERED = "(document.querySelector('#send').textContent === 'Send')"
READY = {
    "chat": "true",
    "models": "document.querySelectorAll('#table tr').length === 2",
    "turns": "document.querySelector('.device canvas')?.hasAttribute('aria-label')",
}


def main(folder: Path) -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium here (Debian: chromium)")
    with tempfile.TemporaryDirectory(prefix="page-pictures-") as scratch:
        save_tiny("qwen3", Path(scratch) / "tiny-qwen3")
        with (
            running_server(MODEL, Path(scratch) / "tiny-qwen3") as server,
            running_browser(browser, Path(scratch) / "profile") as running,
        ):
            page = running.page(server.url + "/")
            page.wait("document.querySelector('#model')?.options.length === 2")
            busy = [threading.Thread(target=work, args=(server, name)) for name in (MODEL, "tiny-qwen3")]
            for thread in busy:
                thread.start()
            page.js(f"document.querySelector('#model').value = '{MODEL}'")
            page.js("document.querySelector('#prompt').value = 'Please name the capital of Germany.'")
            page.js("document.querySelector('#ask').requestSubmit()")
            page.wait(
                "document.querySelector('.assistant .note') && document.querySelector('#send').textContent === 'Send'"
            )
            for thread in busy:
                thread.join()
            for width, height in SIZES.items():
                page.size(width, height)
                for view in ("chat", "models", "turns"):
                    page.js(f"location.hash = '{view}'")
                    page.wait(f"!document.getElementById('{view}').hidden")
                    page.wait(READY[view])
                    page.js("new Promise((done) => setTimeout(done, 1500))")
                    page.screenshot(folder / f"console-{view}-{width}.png")


def work(server: Server, model: str) -> None:
    """Some seconds of requests, one after the other."""
    for number in range(6):
        body = {"model": model, "prompt": f"Number {number} is", "max_tokens": 120, "ignore_eos": True}
        server.post("/v1/completions", body)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "docs")
