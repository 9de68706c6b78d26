"""Sizes of nodes against the machine: what is more than there is, or too little for anything, is refused by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import node_sizes
from dovetail.cli.offer import ConfigFile
from dovetail.cli.serve import override_with
from dovetail.config import Config, load_config
from dovetail.errors import ConfigError

GIB = 2**30


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sizes, "usable_cores", lambda: 2)
    monkeypatch.setattr(node_sizes, "memory_bytes", lambda: (25 * GIB, 20 * GIB))


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("[{memory: 64GiB}]", "nodes.cpu-0.memory: 64.0GiB asked, this machine has 25.0GiB; leave it out"),
        ("[{threads: 16}]", "nodes.cpu-0.threads: 16 asked, this machine has 2 cores; leave it out"),
        ("[{memory: 8B}]", "nodes.cpu-0.memory: 8 bytes asked, a node takes at least 32MiB"),
        ("[{name: a, memory: 13GiB}, {name: b, memory: 13GiB}]", "nodes.a.memory + nodes.b.memory: 26.0GiB asked"),
        ("[{memory: 1GiB, kv_cache: 2GiB}]", "nodes.cpu-0.kv_cache: 2.0GiB asked, the node has 1.0GiB"),
    ],
)
def test_a_node_that_the_machine_cannot_hold_is_refused(tmp_path: Path, nodes: str, says: str) -> None:
    path = tmp_path / "dovetail.yaml"
    path.write_text(f"nodes: {nodes}")
    override = override_with({}, {}, None, None, None)
    with pytest.raises(ConfigError) as caught:
        override(load_config(path))
    assert str(caught.value).startswith(says)
    with pytest.raises(ConfigError) as caught:
        ConfigFile(path, override, ()).read()
    assert str(caught.value).startswith(f"{path}: {says}")


def test_options_are_checked_like_the_file() -> None:
    for given, says in (({"threads": 3}, "threads: 3 asked"), ({"kv_cache": 30 * GIB}, "kv_cache: 30.0GiB asked")):
        with pytest.raises(ConfigError, match=says):
            override_with({}, given, None, None, "cpu")(Config())
    with pytest.raises(ConfigError, match=r"store.host_pool: 26.0GiB asked, this machine has 25.0GiB"):
        override_with({}, {}, None, None, "cpu")(Config.model_validate({"store": {"host_pool": 26 * GIB}}))


@pytest.mark.parametrize(
    "nodes", [[{}], [{"memory": 25 * GIB, "threads": 2}], [{"device": "cuda:0", "memory": 80 * GIB}]]
)
def test_what_fits_is_taken(nodes: list[dict[str, Any]]) -> None:
    config = Config.model_validate({"nodes": nodes})
    assert override_with({}, {}, None, None, None)(config).nodes[0].memory == config.nodes[0].memory
