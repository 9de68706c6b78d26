"""The gateway as a process of its own, on a real socket and the fake worker, for tests that attack it.

As a script: `edge_server.py FOLDER CONFIG MODEL`, serves until SIGTERM. As a module: starts that script.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

STOP_TIMEOUT_S = 20.0


class Edge:
    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path) -> None:
        self.process = process
        self.url = url
        self.folder = folder
        self.port = int(url.rpartition(":")[2])

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, **{"timeout": 30} | options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, **{"timeout": 30} | options)

    def is_alive(self) -> bool:
        return self.get("/live").status_code == 200

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096


@contextmanager
def running_edge(folder: Path, config: dict[str, Any] | None = None, model: str = "fake") -> Iterator[Edge]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "dovetail.json"
    file.write_text(json.dumps(config or {}))
    command = [sys.executable, __file__, str(folder), str(file), model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, f"the server ended with code {process.wait(STOP_TIMEOUT_S)}"
        yield Edge(process, line.strip(), folder)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()


async def _serve(folder: Path, file: Path, model: str) -> None:
    from gateway_builders import make_admin, make_card, running_service

    from dovetail.cli.serve import settle_down
    from dovetail.config import load_config
    from dovetail.gateway.app import make_app
    from dovetail.gateway.http.listen import base_url, listen
    from dovetail.gateway.server import HttpServer
    from dovetail.gateway.service import Limits

    config = load_config(file)
    card = make_card(folder, model)
    async with running_service(folder, card, limits=Limits.of(config.server)) as service:
        await service.start()
        admin = make_admin(service, config)
        listener = listen("127.0.0.1", 0)
        settle_down()
        print(base_url(listener), flush=True)
        await HttpServer(make_app(admin), admin).serve(sockets=[listener])


if __name__ == "__main__":
    from dovetail.cli.serve import run_loop

    run_loop(_serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
