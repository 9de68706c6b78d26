"""What the page costs: time to first paint from loopback, and processor time while each view is open, in Chromium.

    python tests/cpu/page_cost.py [SECONDS]

Prints what the files weigh that a first visit to the chat takes, plain and as they are sent. Serves a tiny model of
random weights; prints medians of 20 visits, and for each view the share of a core that the gateway and all of the
browser's processes used together over so many seconds (three times; a multiple of 6, which is how often an idle page
asks): while the server is idle, and while a stream runs. What the gateway spends on the stream varies more than the
page costs, so at last the page's questions about the stream are asked again and again without it: what one takes, as
often as the page asks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from browser import Page, find_browser, running_browser  # noqa: E402
from server_fixture import Server, running_server  # noqa: E402
from tiny import save_tiny  # noqa: E402

VIEWS = ("chat", "models", "turns", "api", "connect")
VISITS = 20
SETTLING_S = 15.0  # what a browser does after its start is not the page's
ROUNDS = 3
QUESTIONS = 300
POLL_S = 3.0  # as app.js has it
CELLS = 1166  # of a window of 1400 pixels
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
            page.wait("document.querySelector('#model')?.options.length === 1")
            tell(first_visit=weights(page))
            gateway = psutil.Process(server.process.pid)
            pages = [one for one in psutil.Process().children(recursive=True) if "chrom" in one.name()]
            time.sleep(SETTLING_S)
            for stream in (False, True):
                with streaming(server, stream):
                    measure_views(page, gateway, pages, seconds, stream=stream)
            for view, paths in questions(server).items():
                tell(view=view, stream="asked after", **asked(gateway, server, paths))
            paints = [first_paint(page, server.url, visit) for visit in range(VISITS)]
            tell(first_paint_ms={"median": statistics.median(paints), "longest": max(paints)})


def weights(page: Page) -> dict[str, int]:
    """Bytes of the page's own files; what it asks of the API is not among them."""
    files = "performance.getEntriesByType('resource').filter(({ name }) => name.includes('/ui/'))"
    entries = f"[...performance.getEntriesByType('navigation'), ...{files}]"
    sums = {
        field: f"{entries}.reduce((sum, one) => sum + one.{field}, 0)" for field in ("decodedBodySize", "transferSize")
    }
    found = {field: int(page.js(expression)) for field, expression in sums.items()}
    return {"files": int(page.js(f"{entries}.length"))} | found


def measure_views(
    page: Page, gateway: psutil.Process, pages: list[psutil.Process], seconds: float, *, stream: bool
) -> None:
    """In turns, and the median of each: now and then a browser tidies up, for tenths of a second, whatever it shows."""
    rounds: dict[str, list[tuple[float, float]]] = {view: [] for view in VIEWS}
    for _ in range(ROUNDS):
        for view, shares in rounds.items():
            page.js(f"location.hash = '{view}'")
            time.sleep(3)
            shares.append(used(gateway, pages, seconds))
    for view, shares in rounds.items():
        of_gateway, of_browser = zip(*shares, strict=True)
        tell(view=view, stream=stream, gateway_percent=middle(of_gateway), browser_percent=middle(of_browser))


def middle(percents: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(percents), 2), "most": round(max(percents), 2)}


def tell(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def questions(server: Server) -> dict[str, list[str]]:
    """What the page asks while a stream runs. Of turns, what an interval of it brought."""
    last_s = server.get("/api/turns/shares?cells=1").json()["now_s"]
    turns = f"/api/turns/shares?cells={CELLS}&after={last_s - POLL_S}"
    return {"models": ["/api/models"], "turns": [turns]}


def asked(gateway: psutil.Process, server: Server, paths: list[str]) -> dict[str, float]:
    with httpx.Client(base_url=server.url) as client:
        before = spent([gateway])
        for _ in range(QUESTIONS):
            for path in paths:
                client.get(path).raise_for_status()
        each_s = (spent([gateway]) - before) / QUESTIONS
    return {"gateway_ms": round(1000 * each_s, 2), "gateway_percent": round(100 * each_s / POLL_S, 2)}


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


def used(gateway: psutil.Process, pages: list[psutil.Process], seconds: float) -> tuple[float, float]:
    """Per cent of a core, of the gateway and of the browser."""
    before = [spent([gateway]), spent(pages)]
    time.sleep(seconds)
    after = [spent([gateway]), spent(pages)]
    server, browser = (100 * (late - early) / seconds for early, late in zip(before, after, strict=True))
    return server, browser


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
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 12.0)
