"""A real server whose dovetail.yaml is edited while it serves, and whose models come and go through its API."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from server_fixture import Server, eventually, run_command, running_server
from tiny_gguf import save_tiny_gguf

KEY = {"authorization": "Bearer sk-boss"}


class Edited:
    """A server, its file and its log."""

    def __init__(self, server: Server, file: Path, log: Path, folders: dict[str, Path]) -> None:
        self.server = server
        self.file = file
        self.log = log
        self.folders = folders

    def write(self, models: str, keys: str = "{name: boss, key: sk-boss, admin: true}", server: str = "{}") -> None:
        self.file.write_text(f"models: {{{models}}}\nserver: {server}\nauth: {{keys: [{keys}]}}\n")

    def reload(self, *, says: str) -> None:
        before = len(self.log.read_text())
        self.server.hang_up()
        eventually(lambda: says in self.log.read_text()[before:])

    def model(self, name: str, **settings: object) -> str:
        entry = {"source": str(self.folders[name.partition("-")[0]]), **settings}
        return f"{name}: {json.dumps(entry)}"

    def names(self) -> set[str]:
        return {model.id for model in self.server.client(api_key="sk-boss").models.list()}


@pytest.fixture(scope="module")
def edited(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edited]:
    folder = tmp_path_factory.mktemp("edited")
    file, log = folder / "dovetail.yaml", folder / "log"
    folders = {}
    for name in ("llama", "qwen3", "opt"):
        folders[name] = folder / name
        shutil.copytree(tiny_folder(name), folders[name])
    options = ("--config", file, "--threads", "1", "--kv-cache", "16MiB", "--store", folder / "store")
    made = Edited(None, file, log, folders)  # type: ignore[arg-type]
    made.write(made.model("llama"))
    with running_server(*options, log=log) as made.server:
        yield made


def test_a_reload_changes_models_and_keys_under_a_running_stream(edited: Edited) -> None:
    client = edited.server.client(api_key="sk-boss")
    text = {"prompt": "go on", "max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="llama", **text).choices[0].text
    stream = client.completions.create(model="llama", stream=True, n=1, **text)
    pieces = [next(stream).choices[0].text]
    boss, guest = "{name: boss, key: sk-boss, admin: true}", "{name: guest, key: sk-guest}"
    edited.write(edited.model("qwen3", aliases=["q"], preload=True, slo={"ttft": "3s"}), keys=f"{boss}, {guest}")
    edited.reload(says="reloaded")
    assert edited.names() == {"qwen3", "q"}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="llama", prompt="a")
    guest_client = edited.server.client(api_key="sk-guest")
    assert guest_client.completions.create(model="q", prompt="a", max_tokens=2).model == "qwen3"
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole
    shown = edited.server.get("/api/models/q", headers=KEY).json()
    assert (shown["state"], shown["slo"]["ttft"]) == ("idle", 3.0)
    eventually(
        lambda: [m["name"] for m in edited.server.get("/api/ps", headers=KEY).json()["nodes"][0]["models"]] == ["qwen3"]
    )
    edited.write(edited.model("qwen3"))
    edited.reload(says="reloaded")
    with pytest.raises(openai.AuthenticationError):
        guest_client.completions.create(model="qwen3", prompt="a")


def test_a_model_from_the_store_is_served_through_reloads_that_do_not_change_it(edited: Edited, tmp_path: Path) -> None:
    """One whose source is no folder that is served in place."""
    weights = tmp_path / "tiny.gguf"
    save_tiny_gguf("llama", weights)
    edited.folders["stored"] = weights
    edited.write(edited.model("stored", keep_alive="1h"))
    edited.reload(says="reloaded")
    client = edited.server.client(api_key="sk-boss")
    eventually(lambda: edited.server.get("/api/models/stored", headers=KEY).json()["tier"] != "remote")
    assert client.completions.create(model="stored", prompt="a", max_tokens=2).choices
    pulls = len(edited.server.get("/api/pulls", headers=KEY).json()["data"])
    for number in range(5):
        if number == 3:
            edited.write(edited.model("stored", keep_alive="2h"))
        edited.reload(says="reloaded")
        shown = edited.server.get("/api/models/stored", headers=KEY).json()
        assert shown["state"] in ("idle", "ready", "running"), shown
        assert client.completions.create(model="stored", prompt="a", max_tokens=2).choices
    assert edited.server.get("/api/models/stored", headers=KEY).json()["keep_alive"] == 7200
    assert len(edited.server.get("/api/pulls", headers=KEY).json()["data"]) == pulls
    reloaded = httpx.post(f"{edited.server.url}/api/config/reload", headers=KEY)
    assert reloaded.status_code == 200, reloaded.text


@pytest.mark.parametrize(
    ("models", "says"),
    [
        ("qwen3: {source: here, keepalive: 5}", "models.qwen3.keepalive: unknown key"),
        ("qwen3: {source: /no/such/folder}", "models.qwen3.source: /no/such/folder: neither"),
        ("qwen3: {source: '${env.NO_SUCH_VARIABLE}'}", "NO_SUCH_VARIABLE is not set"),
        ("qwen3: [", "not valid YAML"),
    ],
)
def test_a_mistake_leaves_everything_as_it_was(edited: Edited, models: str, says: str) -> None:
    edited.write(edited.model("qwen3", aliases=["fine"]))
    edited.reload(says="reloaded")
    edited.write(models)
    edited.reload(says="stays as it was")
    line = [line for line in edited.log.read_text().splitlines() if "not reloaded" in line][-1]
    assert says in line, line
    assert str(edited.file) in line
    assert edited.names() == {"qwen3", "fine"}
    assert says in edited.server.get("/health", headers=KEY).json()["config_problem"]
    assert edited.server.client(api_key="sk-boss").completions.create(model="fine", prompt="a", max_tokens=2).choices
    assert edited.server.process.poll() is None


def test_what_takes_a_restart_is_named(edited: Edited) -> None:
    edited.write(edited.model("qwen3"), server="{max_queue: 9, host: 0.0.0.0}")
    edited.reload(says="server.host has changed")
    shown = edited.server.get("/api/config", headers=KEY).json()
    assert (shown["config"]["server"]["max_queue"], shown["needs_restart"]) == (9, ["server.host"])


def test_a_model_is_added_served_stopped_and_removed_from_the_command_line(edited: Edited, tmp_path: Path) -> None:
    edited.write(edited.model("qwen3"))
    edited.reload(says="reloaded")
    options = {"env": {**os.environ, "DOVETAIL_API_KEY": "sk-boss", "DOVETAIL_URL": edited.server.url}}
    weights = tmp_path / "tiny.gguf"
    save_tiny_gguf("llama", weights)
    for name, source in (("there", edited.folders["opt"]), ("pulled", weights)):
        done = run_command("add", name, source, "--alias", f"{name}-too", "--ttft", "20s", "--tpot", "20s", **options)
        assert (done.returncode, done.stdout) == (0, f"{name} is served at {edited.server.url}\n"), done.stderr
    client = edited.server.client(api_key="sk-boss")
    assert client.completions.create(model="there-too", prompt="a", max_tokens=16).model == "there"
    assert client.completions.create(model="pulled", prompt="a", max_tokens=2).choices
    table = run_command("ps", "--all", **options).stdout
    row = next(line for line in table.splitlines() if "there" in line)
    assert "100 %" in row
    assert row.count("ms") == 2
    again = run_command("add", "there", edited.folders["opt"], **options)
    assert (again.returncode, "is taken" in again.stderr) == (1, True)
    assert "unloaded" in run_command("stop", "there", **options).stdout
    shown = json.loads(run_command("ps", "--all", "--json", **options).stdout)
    assert {model["name"]: model["state"] for model in shown["models"]}["there"] == "absent"
    assert client.completions.create(model="there", prompt="a", max_tokens=2).choices
    assert "removed" in run_command("stop", "there", "pulled", "--remove", **options).stdout
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="there-too", prompt="a")
    missing = run_command("stop", "there", **options)
    assert (missing.returncode, "was removed" in missing.stderr) == (1, True)


def test_an_add_that_fails_says_why_and_leaves_no_row(edited: Edited, tmp_path: Path) -> None:
    options = {"env": {**os.environ, "DOVETAIL_API_KEY": "sk-boss", "DOVETAIL_URL": edited.server.url}}
    whole, broken = tmp_path / "whole.gguf", tmp_path / "broken.gguf"
    save_tiny_gguf("llama", whole)
    broken.write_bytes(whole.read_bytes()[:-1000])
    before = run_command("ps", "--all", **options).stdout
    done = run_command("add", "phantom", broken, **options)
    assert (done.returncode, done.stdout) == (1, "")
    assert "broken.gguf" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    after = run_command("ps", "--all", **options).stdout
    assert "phantom" not in after
    assert len(after.splitlines()) == len(before.splitlines())


def test_what_cannot_be_pulled_is_told_of_below_the_table(edited: Edited) -> None:
    """Of a model that was added by the API, which nobody follows."""
    options = {"env": {**os.environ, "DOVETAIL_API_KEY": "sk-boss", "DOVETAIL_URL": edited.server.url}}
    body = {"name": "phantom", "source": "hf:no-such/model", "aliases": []}
    assert edited.server.post("/api/models", body, headers=KEY).status_code == 202
    eventually(lambda: "phantom could not be pulled" in run_command("ps", "--all", **options).stdout, 60)
    lines = run_command("ps", "--all", **options).stdout.splitlines()
    row = next(line for line in lines if line.startswith("absent") or " phantom" in line)
    assert row.split()[-1] == "phantom"
    assert "removed" in run_command("stop", "phantom", "--remove", **options).stdout


def test_a_store_that_is_gone_is_an_error_for_each_request_and_no_more(edited: Edited) -> None:
    edited.write(edited.model("qwen3", preload=True) + ", " + edited.model("llama"))
    edited.reload(says="reloaded")
    client = edited.server.client(api_key="sk-boss")
    assert client.completions.create(model="qwen3", prompt="a", max_tokens=2).choices
    shutil.rmtree(edited.folders["llama"])
    shutil.rmtree(edited.folders["qwen3"])
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="llama"):
            client.completions.create(model="llama", prompt="a")
    # What is in memory is served on.
    assert client.completions.create(model="qwen3", prompt="a", max_tokens=2).choices
    assert httpx.get(f"{edited.server.url}/health").status_code == 200
