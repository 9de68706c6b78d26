"""What the page costs: time to first paint from loopback, and processor time while each view is open, in Chromium.

    python tests/cpu/page_cost.py [SECONDS]

Serves a tiny model of random weights; prints medians of 20 visits, and for each view the share of a core that the
gateway and all of the browser's processes used together over so many seconds: while the server is idle, and while a
stream runs, whose own cost in the gateway is that of the chat's view, which asks nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from browser import Page, find_browser, running_browser  # noqa: E402
from server_fixture import Server, running_server  # noqa: E402
from tiny import save_tiny  # noqa: E402

VISITS = 20
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def main(seconds: float) -> None:
    browser = find_browser()
    if browser is None:
        sys.exit("no Chromium here (Debian: chromium)")
    with tempfile.TemporaryDirectory(prefix="page-cost-") as folder:
        root = Path(folder)
        save_tiny("llama", root / "llama")
        with running_server(root / "llama") as server, running_browser(browser, root / "profile") as running:
            page = running.page(server.url + "/")
            paints = [first_paint(page, server.url, visit) for visit in range(VISITS)]
            print(json.dumps({"first_paint_ms": {"median": statistics.median(paints), "longest": max(paints)}}))
            gateway = psutil.Process(server.process.pid)
            pages = [one for one in psutil.Process().children(recursive=True) if "chrom" in one.name()]
            time.sleep(seconds)  # what a browser does after its start is not the page's
            for stream in (False, True):
                with streaming(server, stream):
                    for view in ("chat", "models", "turns"):
                        page.js(f"location.hash = '{view}'")
                        time.sleep(3)
                        print(json.dumps({"view": view, "stream": stream} | used(gateway, pages, seconds)), flush=True)


@contextmanager
def streaming(server: Server, wanted: bool) -> Iterator[None]:
    """One stream after the other, as fast as the model speaks, in a process of its own: the browser's are counted."""
    if not wanted:
        yield
        return
    body = {"model": "llama", "prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    code = f"import httpx\nwhile True: httpx.post({server.url + '/v1/completions'!r}, json={body!r}, timeout=60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def first_paint(page: Page, url: str, visit: int) -> float:
    page.goto(f"{url}/?visit={visit}")
    page.wait(f"location.search === '?visit={visit}' && {PAINT}")
    return round(float(page.js(PAINT)), 1)


def used(gateway: psutil.Process, pages: list[psutil.Process], seconds: float) -> dict[str, float]:
    """Per cent of a core."""
    before = [spent([gateway]), spent(pages)]
    time.sleep(seconds)
    after = [spent([gateway]), spent(pages)]
    server, browser = (100 * (late - early) / seconds for early, late in zip(before, after, strict=True))
    return {"gateway_percent": round(server, 2), "browser_percent": round(browser, 2)}


def spent(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
