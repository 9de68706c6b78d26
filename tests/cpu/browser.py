"""A real Chromium without a window, driven over its debugging pipe: nothing is needed but the browser itself."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
# What a container may lack (its sandbox, shared memory) and a test does not need (the network beyond this machine).
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip


def find_browser() -> str | None:
    return next((path for name in COMMANDS if (path := shutil.which(name))), None)


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def js(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := self._js_while_loading(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.1)
        return value

    def _js_while_loading(self, expression: str) -> Any:
        """None if the page went while it was asked: the next one is asked again."""
        try:
            return self.js(expression)
        except AssertionError as error:
            if "navigated or closed" in str(error):
                return None
            raise

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


class Browser:
    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._rest = b""
        self._number = 0

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._commands, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (reply := self._next()).get("id") != self._number:
            pass  # an event
        assert "error" not in reply, f"{method}: {reply['error']}"
        return reply["result"]

    def page(self, url: str, width: int = 1400, height: int = 900) -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        page.size(width, height)
        page.goto(url)
        return page

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._replies, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def running_browser(command: str, profile: Path) -> Iterator[Browser]:
    read_commands, commands = os.pipe()
    replies, write_replies = os.pipe()
    wired = f'exec "$@" 3<&{read_commands} 4>&{write_replies}'
    process = subprocess.Popen(
        ["bash", "-c", wired, "browser", command, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(read_commands, write_replies),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_replies)
    try:
        yield Browser(commands, replies)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(replies)
