"""`dovetail store` as a user meets it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from store_builders import flip_bit
from test_store_adapters import write_adapter

from dovetail.store import Catalogue
from dovetail.store.format.manifest import partition_files

TinyFolder = Callable[[str], Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path, tiny_folder: TinyFolder) -> Path:
    """A store with a model under two names, and an adapter."""
    catalogue = Catalogue(tmp_path / "home")
    for name in ("one", "two"):
        catalogue.pull(str(tiny_folder("llama")), name=name)
    catalogue.take(str(write_adapter(tmp_path / "tuned")))
    return tmp_path / "home"


@pytest.fixture
def run(home: Path) -> Run:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "DOVETAIL_HOME": str(home), "COLUMNS": "300"}
        line = [sys.executable, "-m", "dovetail", *arguments]
        return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)

    return command


def test_ls_shows_sizes_alone_and_shared(run: Run) -> None:
    listing = json.loads(run("store", "ls", "--json").stdout)
    rows = {row["name"]: row for row in listing["entries"]}
    assert rows["one"]["shared_bytes"] == rows["one"]["size_bytes"] > 0
    assert (rows["tuned"]["kind"], rows["tuned"]["shared_bytes"]) == ("adapter", 0)
    assert listing["blob_bytes"] == rows["one"]["size_bytes"] + rows["tuned"]["size_bytes"]
    assert listing["unused_blob_bytes"] == listing["staging_bytes"] == 0
    text = run("store", "ls").stdout
    assert "adapter" in text
    assert "of them unused" in text
    assert "adapter" in run("list").stdout
    assert "rank" in run("show", "tuned").stdout
    assert json.loads(run("show", "tuned", "--json").stdout)["adapter"]["rank"] == 4


def test_verify_names_damage_and_exits_with_1(run: Run, home: Path) -> None:
    sound = run("store", "verify")
    source = json.loads(run("show", "two", "--json").stdout)["source"]
    assert (sound.returncode, "all sound" in sound.stdout) == (0, True)
    ((blob, _),) = partition_files(home / "models" / "one")
    flip_bit(blob, 100)
    damaged = run("store", "verify", "two")
    assert damaged.returncode == 1
    assert str(blob) in damaged.stdout
    assert "chunk 0" in damaged.stdout
    assert "embed.weight" in damaged.stdout
    assert f"two: `dovetail pull {source} --name two` fetches it anew" in damaged.stdout
    report = json.loads(run("store", "verify", "--json").stdout)
    assert report["damage"][0]["models"] == ["one", "two"]
    assert run("store", "verify", "nope").stderr.startswith("error: model 'nope' not found")


def test_found_damage_is_shown_kept_from_serving_and_mended_by_the_next_pull(run: Run, home: Path) -> None:
    source = json.loads(run("show", "one", "--json").stdout)["source"]
    ((blob, _),) = partition_files(home / "models" / "one")
    flip_bit(blob, 100)
    assert run("store", "verify").returncode == 1
    states = {row["name"]: row["problem"] for row in json.loads(run("store", "ls", "--json").stdout)["entries"]}
    assert "chunk 0" in states["one"]
    assert (states["tuned"], "2 damaged are left out" in run("list").stderr) == ("", True)
    served = run("serve", "one", "--port", "0")
    assert (served.returncode, "one is damaged" in served.stderr) == (1, True)
    assert run("pull", source, "--name", "one").returncode == 0
    assert run("store", "verify").returncode == 0
    assert [row["name"] for row in json.loads(run("list", "--json").stdout)] == ["one", "tuned", "two"]


def test_gc_says_what_would_go_and_keeps_what_is_pinned(run: Run, home: Path, tmp_path: Path) -> None:
    assert run("store", "gc").stdout == "0 B freed\n"
    assert run("store", "pin", "one").stdout == "one is pinned\n"
    planned = json.loads(run("store", "gc", "--max-size", "0", "--dry-run", "--json").stdout)
    assert [removal["name"] for removal in planned["removed"]] == ["tuned"]  # two shares all it has with one
    (tmp_path / "dovetail.yaml").write_text(f"store: {{path: {home}, max_size: 1kB}}\n")
    done = run("store", "gc", "--config", str(tmp_path / "dovetail.yaml"))
    assert "removed model tuned" in done.stdout
    assert "over the limit is pinned or in use" in done.stdout
    assert [row["name"] for row in json.loads(run("list", "--json").stdout)] == ["one", "two"]
    run("store", "pin", "one", "--off")
    run("store", "gc", "--max-size", "0")
    assert json.loads(run("list", "--json").stdout) == []
    assert run("store", "gc", "--max-size", "lots").returncode == 1


def test_layout_and_partitions_are_chosen_when_pulling(run: Run, tiny_folder: TinyFolder) -> None:
    pulled = run("pull", str(tiny_folder("llama")), "--name", "cut", "--layout", "int8", "--tp", "2")
    assert "int8 in 2 partitions" in pulled.stdout
    shown = json.loads(run("show", "cut", "--json").stdout)
    assert (shown["layout"], shown["partitions"]) == ("int8", 2)


@pytest.mark.parametrize("name", ["ls", "verify", "gc", "pin"])
def test_every_help_text_has_an_example(run: Run, name: str) -> None:
    assert f"Example: dovetail store {name}" in run("store", name, "--help").stdout
